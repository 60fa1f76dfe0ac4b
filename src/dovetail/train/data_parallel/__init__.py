"""`dovetail.DistributedDataParallel` and `dovetail.optimizer`: planned buckets behind backward, and behind forward too.

May import `core`, `measure` and `planning`. Begin with `module.py` (torch's reducer, planned); then `tuning/` (which
plan is kept), `sharded/` (the second line, with an exchange of our own) and `wire/` (what moves the bytes).
"""

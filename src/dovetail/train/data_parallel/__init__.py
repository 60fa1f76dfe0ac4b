"""`dovetail.DistributedDataParallel` and `dovetail.optimizer`: planned buckets behind backward, and behind forward too.

May import `core`, `measure` and `planning`. Begin with `module.py` (torch's reducer, planned), then `exchange.py` (our
own, with `optimizer.py`), `slot.py` (the states of a gradient) and `wire/` (what moves the bytes).
"""

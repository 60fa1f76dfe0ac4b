"""Many live jobs on shared devices. One room for each process, and what they share.

May import `core`, `measure`, `planning`, `simulate` and `train`; `web` and `service` also `view`.
Begin with `service.py` (the coordinator's process), then `coordinator/`, `executor/`, `aggregator/`.
"""

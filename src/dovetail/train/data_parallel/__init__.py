"""`dovetail.DistributedDataParallel` and `dovetail.optimizer`: planned buckets behind backward, or forward too.

May import `core`, `measure` and `planning`.
Begin with `module.py` (torch's reducer, planned), then `forward_overlap.py` and `exchange.py` (our own).
"""

from . import forward_overlap as forward_overlap  # enters itself as the class for overlap="forward"

"""A whole cluster without hardware: jobs of a trace under a policy, at the task level and at the fluid level.

May import `core` and `planning`; called by `dovetail schedule` and by `cluster.replay`.
Begin with `run.py`, then `control.py` (a job's life), `tasks.py` (every task an event) and `fluid.py` (jobs at rates).
"""

from .report import ClusterReport, LowerBounds, lower_bounds, report
from .run import ClusterOutcome, simulate
from .study import Capacity, capacity
from .tasks import EXACT, Overheads

__all__ = [
    "EXACT",
    "Capacity",
    "ClusterOutcome",
    "ClusterReport",
    "LowerBounds",
    "Overheads",
    "capacity",
    "lower_bounds",
    "report",
    "simulate",
]

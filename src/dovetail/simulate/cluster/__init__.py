"""A whole cluster without hardware: jobs of a trace under a policy, at the task level and at the fluid level."""

from .bounds import Bounds, bounds
from .capacity import Capacity, capacity
from .report import Report, report
from .run import Outcome, simulate
from .tasks import EXACT, Costs

__all__ = ["EXACT", "Bounds", "Capacity", "Costs", "Outcome", "Report", "bounds", "capacity", "report", "simulate"]

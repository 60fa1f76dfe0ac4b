"""A whole cluster without hardware: jobs of a trace under a policy, at the task level and at the fluid level."""

from .run import Outcome, simulate
from .tasks import EXACT, Costs

__all__ = ["EXACT", "Costs", "Outcome", "simulate"]

"""A plan without hardware: one iteration as a predicted timeline, what is best, and how it scales with workers."""

from .iteration import simulate
from .joint import choose
from .scale import ScalePoint, scale, techniques

__all__ = ["ScalePoint", "choose", "scale", "simulate", "techniques"]

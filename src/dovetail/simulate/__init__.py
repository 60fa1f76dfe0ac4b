"""A plan without hardware: one iteration as a predicted timeline, and how iterations scale with workers."""

from .iteration import simulate
from .scale import ScalePoint, scale

__all__ = ["ScalePoint", "scale", "simulate"]

"""Plans without hardware: predicted timelines, scores and scaling studies; whole clusters and their traces.

May import `core` and `planning`; no torch.
Begin with `iteration.py`.
"""

from .auto import choose
from .iteration import simulate
from .scale import ScalePoint, scale, techniques

__all__ = ["ScalePoint", "choose", "scale", "simulate", "techniques"]

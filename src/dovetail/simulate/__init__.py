"""Plans without hardware: predicted timelines, scores and scaling studies; whole clusters and their traces.

May import `core` and `planning`; no torch.
Begin with `iteration.py`.
"""

from .auto import choose
from .iteration import simulate
from .node import NodePrediction, with_node
from .scale import ScalePoint, scale, techniques

__all__ = ["NodePrediction", "ScalePoint", "choose", "scale", "simulate", "techniques", "with_node"]

"""Gradient merging: where to cut the stream of gradients into all-reduces. Everything about it under one name.

`stream` turns a profile into gradients in ready order; `schedule`, `finish` and `objective` say what a partition costs;
`optimal`, `optimal_affine`, `fewest`, `best_with` and `robust` choose one; `lower_bound` says how much is left to gain.
"""

from .exact import best_per_count, best_with, fewest, lower_bound, optimal, optimal_affine
from .robust import robust
from .stream import Stream, allowed, finish, objective, schedule, stream

__all__ = [
    "Stream",
    "allowed",
    "best_per_count",
    "best_with",
    "fewest",
    "finish",
    "lower_bound",
    "objective",
    "optimal",
    "optimal_affine",
    "robust",
    "schedule",
    "stream",
]

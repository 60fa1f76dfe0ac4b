"""Buckets of partial backpropagation: which gradients of a segment travel together, and the memory they travel in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .segments import Leaf


@dataclass(eq=False)
class SegmentBucket:
    """Gradients of one segment and one dtype that travel together."""

    segment: int
    leaves: list[Leaf]
    flat: torch.Tensor
    """All that travels: the gradients, then for each of them how many contributors had it."""
    gradients: torch.Tensor
    views: list[torch.Tensor]
    used: torch.Tensor

    @classmethod
    def of(cls, leaves: list[Leaf]) -> SegmentBucket:
        first = leaves[0].parameter
        # Half precision is added up in single precision: the eight bits of its mantissa are too few for a sum.
        dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32
        sizes = [leaf.parameter.numel() for leaf in leaves]
        flat = torch.zeros(sum(sizes) + len(leaves), dtype=dtype, device=first.device)
        gradients, used = flat.split([sum(sizes), len(leaves)])
        views = [part.view(leaf.parameter.shape) for part, leaf in zip(gradients.split(sizes), leaves, strict=True)]
        return cls(leaves[0].segment, leaves, flat, gradients, views, used)


def segment_buckets(leaves: Sequence[Leaf], merged: Mapping[str, int]) -> list[SegmentBucket]:
    """One bucket for each segment and dtype, the last segments first.

    `merged` gives the merge planner's bucket of each parameter, by name; where it is empty, segments stay whole.
    """
    order = {leaf: i for i, leaf in enumerate(leaves)}
    groups: dict[tuple[int, int, torch.dtype], list[Leaf]] = {}
    for leaf in sorted(leaves, key=lambda leaf: (-leaf.segment, merged.get(leaf.name, -1), -order[leaf])):
        bucket = -1 if leaf.alias else merged.get(leaf.name, -1)
        groups.setdefault((leaf.segment, bucket, leaf.parameter.dtype), []).append(leaf)
    return [SegmentBucket.of(group) for group in groups.values()]

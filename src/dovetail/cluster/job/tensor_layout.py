"""Where each tensor of a model is in flat memory: one flat tensor per dtype, gradients ordered by segment.

Every process that has the same model and the same division computes the same layout by itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dovetail.train.partial.segments import Leaf, Segments

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes, as in torch's allocator: elsewhere kernels may round differently."""


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's place in the flat tensor of its dtype, in elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    segment: int = 0

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def of(self, flats: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
        """The tensor, as a view of the flat tensor of its dtype."""
        return flats[self.dtype][self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Slots one after another, and the number of elements of each dtype, including gaps for alignment."""

    slots: tuple[TensorSlot, ...]
    sizes: dict[torch.dtype, int]
    bounds: dict[torch.dtype, tuple[int, ...]] = field(default_factory=dict)
    """For each dtype, the element at which each segment begins, and the end of the last."""

    @property
    def bytes(self) -> int:
        return sum(n * dtype.itemsize for dtype, n in self.sizes.items())

    def views(self, flats: dict[torch.dtype, torch.Tensor]) -> list[torch.Tensor]:
        return [slot.of(flats) for slot in self.slots]

    def private(self) -> dict[torch.dtype, torch.Tensor]:
        """New flat tensors of these sizes, filled with zeros."""
        return {dtype: torch.zeros(n, dtype=dtype) for dtype, n in self.sizes.items()}


@dataclass(frozen=True)
class ModelLayout:
    """The layout of a whole model."""

    parameters: FlatLayout
    buffers: FlatLayout
    gradients: FlatLayout
    """One slot per leaf: a parameter that several segments share has a slot in each."""
    segments: int

    @property
    def fingerprint(self) -> str:
        """Equal for equal layouts only."""
        slots = [*self.parameters.slots, *self.buffers.slots, *self.gradients.slots]
        described = repr([(s.name, str(s.dtype), s.shape, s.start, s.segment) for s in slots])
        return hashlib.sha256(described.encode()).hexdigest()[:16]


def leaves_of(model: nn.Module, segments: Segments | None) -> list[Leaf]:
    """The leaves that get gradients, from the first segment to the last; without segments, the trained parameters."""
    if segments is None:
        return [Leaf(name, 0, p, p) for name, p in model.named_parameters() if p.requires_grad]
    return sorted(segments.leaves, key=lambda leaf: leaf.segment)


def layout_of(model: nn.Module, leaves: Sequence[Leaf], segments: int) -> ModelLayout:
    return ModelLayout(
        parameters=flat_layout((name, p, 0) for name, p in model.named_parameters()),
        buffers=flat_layout((name, b, 0) for name, b in model.named_buffers()),
        gradients=flat_layout(((leaf.name, leaf.parameter, leaf.segment) for leaf in leaves), segments=segments),
        segments=segments,
    )


def flat_layout(tensors: Iterable[tuple[str, torch.Tensor, int]], *, segments: int = 1) -> FlatLayout:
    slots: list[TensorSlot] = []
    ends: dict[torch.dtype, int] = {}
    begins: dict[torch.dtype, list[int]] = {}
    for name, tensor, segment in tensors:
        unit = max(1, ALIGNMENT // tensor.dtype.itemsize)
        start = -(-ends.get(tensor.dtype, 0) // unit) * unit
        known = begins.setdefault(tensor.dtype, [])
        known += [start] * (segment + 1 - len(known))  # segments without tensors of this dtype are empty
        slots.append(TensorSlot(name, tensor.dtype, tuple(tensor.shape), start, segment))
        ends[tensor.dtype] = start + tensor.numel()
    sizes = {dtype: -(-n // ALIGNMENT) * ALIGNMENT for dtype, n in ends.items()}
    bounds = {dtype: (*known, *[ends[dtype]] * (segments + 1 - len(known))) for dtype, known in begins.items()}
    return FlatLayout(tuple(slots), sizes, bounds)

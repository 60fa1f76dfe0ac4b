"""Where each tensor of a model lies in flat memory: one run of elements per dtype, gradients by segment.

Every process that has the same model and the same division of it comes to the same layout by itself.
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
"""Bytes at which tensors begin, as torch's own allocator has it: kernels may round otherwise elsewhere."""


@dataclass(frozen=True)
class Slot:
    """One tensor's place among those of its dtype, in elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    segment: int = 0

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def of(self, flats: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
        """The tensor, as a view of the flat one of its dtype."""
        return flats[self.dtype][self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Run:
    """Slots one after another, and how many elements of each dtype they take, gaps for alignment included."""

    slots: tuple[Slot, ...]
    sizes: dict[torch.dtype, int]
    bounds: dict[torch.dtype, tuple[int, ...]] = field(default_factory=dict)
    """For each dtype, where each segment begins, and the end."""

    @property
    def bytes(self) -> int:
        return sum(n * dtype.itemsize for dtype, n in self.sizes.items())

    def views(self, flats: dict[torch.dtype, torch.Tensor]) -> list[torch.Tensor]:
        return [slot.of(flats) for slot in self.slots]

    def private(self) -> dict[torch.dtype, torch.Tensor]:
        """Memory of one's own in this shape."""
        return {dtype: torch.zeros(n, dtype=dtype) for dtype, n in self.sizes.items()}


@dataclass(frozen=True)
class Layout:
    """Of a whole model."""

    parameters: Run
    buffers: Run
    gradients: Run
    """One slot per leaf: a parameter that several segments share has one in each."""
    segments: int

    @property
    def fingerprint(self) -> str:
        """The same for the same layout only."""
        said = repr([(s.name, str(s.dtype), s.shape, s.start, s.segment) for run in self._runs() for s in run.slots])
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def _runs(self) -> tuple[Run, ...]:
        return self.parameters, self.buffers, self.gradients


def leaves_of(model: nn.Module, segments: Segments | None) -> list[Leaf]:
    """What gets gradients, from the input's segment to the output's; without segments, every trained parameter."""
    if segments is None:
        return [Leaf(name, 0, p, p) for name, p in model.named_parameters() if p.requires_grad]
    return sorted(segments.leaves, key=lambda leaf: leaf.segment)


def layout_of(model: nn.Module, leaves: Sequence[Leaf], segments: int) -> Layout:
    return Layout(
        parameters=_run((name, p, 0) for name, p in model.named_parameters()),
        buffers=_run((name, b, 0) for name, b in model.named_buffers()),
        gradients=_run(((leaf.name, leaf.parameter, leaf.segment) for leaf in leaves), segments=segments),
        segments=segments,
    )


def _run(tensors: Iterable[tuple[str, torch.Tensor, int]], *, segments: int = 1) -> Run:
    slots: list[Slot] = []
    ends: dict[torch.dtype, int] = {}
    begins: dict[torch.dtype, list[int]] = {}
    for name, tensor, segment in tensors:
        unit = max(1, ALIGNMENT // tensor.dtype.itemsize)
        start = -(-ends.get(tensor.dtype, 0) // unit) * unit
        known = begins.setdefault(tensor.dtype, [])
        known += [start] * (segment + 1 - len(known))  # segments without tensors of this dtype are empty
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start, segment))
        ends[tensor.dtype] = start + tensor.numel()
    sizes = {dtype: -(-n // ALIGNMENT) * ALIGNMENT for dtype, n in ends.items()}
    bounds = {dtype: (*known, *[ends[dtype]] * (segments + 1 - len(known))) for dtype, known in begins.items()}
    return Run(tuple(slots), sizes, bounds)

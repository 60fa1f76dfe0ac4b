"""Where parameters and gradients are in memory: flat buckets, of which every rank updates one n-th.

A bucket holds the values of its parameters end to end in one tensor, padded so that n ranks can share it out evenly;
the parameters are views of it. Their gradients have a tensor of the same form. Rank r's share is the r-th of n equal
parts. It covers pieces of a few parameters: the rank gets the summed gradients of these pieces and updates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from . import ring
from .lane import LaneWork


@dataclass(frozen=True)
class ShardPiece:
    """This rank's part of one parameter: its elements [start, stop) in the order of memory."""

    index: int
    start: int
    stop: int
    values: torch.Tensor
    """One-dimensional view of the parameter's elements."""
    gradient: torch.Tensor
    """The gradient of these elements, summed over ranks."""


@dataclass(eq=False)
class ShardedBucket:
    """Parameters whose gradients travel together, and whose new values do too."""

    number: int
    members: tuple[int, ...]
    values: torch.Tensor
    gradients: torch.Tensor
    share: torch.Tensor
    """This rank's n-th of the reduced gradients."""
    views: dict[int, torch.Tensor]
    """View of each member's place in `gradients`."""
    pointers: dict[int, int]
    """Address of each member's values: the parameter must still be there when new values arrive."""
    offsets: dict[int, int]
    pieces: tuple[ShardPiece, ...]
    missing: int = 0
    """Number of members whose gradient of this pass is not there yet."""
    reducing: LaneWork | None = field(default=None)

    def mine(self, rank: int) -> torch.Tensor:
        """This rank's n-th of the values."""
        width = self.share.numel()
        return self.values[rank * width : (rank + 1) * width]


def lay_out(
    parameters: Sequence[nn.Parameter], order: Sequence[int], cuts: Sequence[int], *, ranks: int, rank: int
) -> list[ShardedBucket]:
    """Moves the parameters into buckets: `order` names them in gradient-ready order, `cuts` the end of each bucket.

    Every Parameter object stays the same; only its memory changes.
    """
    assert sorted(order) == list(range(len(parameters))) and list(cuts)[-1] == len(order)
    starts = [0, *cuts[:-1]]
    return [
        _bucket(number, [order[k] for k in range(start, stop)], parameters, ranks, rank)
        for number, (start, stop) in enumerate(zip(starts, cuts, strict=True))
    ]


def _bucket(
    number: int, members: list[int], parameters: Sequence[nn.Parameter], ranks: int, rank: int
) -> ShardedBucket:
    like = parameters[members[0]]
    elements = ring.padded(sum(parameters[i].numel() for i in members), ranks)
    values = torch.zeros(elements, dtype=like.dtype, device=like.device)
    gradients = torch.zeros_like(values)
    width = elements // ranks
    share = torch.zeros(width, dtype=like.dtype, device=like.device)
    views, pointers, offsets, pieces, at = {}, {}, {}, [], 0
    for i in members:
        parameter = parameters[i]
        place = _same_form(values, parameter, at)
        place.copy_(parameter.data)
        parameter.data = place
        views[i], pointers[i], offsets[i] = _same_form(gradients, parameter, at), place.data_ptr(), at
        low, high = max(at, rank * width), min(at + parameter.numel(), (rank + 1) * width)
        empty = not parameter.numel() and rank == 0  # some rank must have its state, as torch's optimisers do
        if low < high or empty:
            high = max(low, high)
            gradient = share[low - rank * width : high - rank * width]
            pieces.append(ShardPiece(i, low - at, high - at, values[low:high], gradient))
        at += parameter.numel()
    return ShardedBucket(
        number, tuple(members), values, gradients, share, views, pointers, offsets, tuple(pieces), missing=len(members)
    )


def _same_form(flat: torch.Tensor, parameter: torch.Tensor, at: int) -> torch.Tensor:
    """The elements of `flat` from `at` on, with the shape of `parameter` and, if that has no gaps, its strides."""
    return torch.as_strided(flat, parameter.size(), strides(parameter), flat.storage_offset() + at)


def strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's own strides if its elements fill their memory (channels last does), else row-major ones."""
    if parameter.is_contiguous():
        return tuple(parameter.stride())
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return tuple(torch.empty(parameter.shape, device="meta").stride())
        expected *= size
    return tuple(parameter.stride())


def in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of something with the shape of `parameter`, one-dimensional, in the order of its memory."""
    buffer = torch.empty_strided(parameter.size(), strides(parameter), dtype=tensor.dtype, device=tensor.device)
    buffer.copy_(tensor)
    return torch.as_strided(buffer, (parameter.numel(),), (1,))


def in_shape(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The reverse of `in_memory_order`: a new tensor with the shape of `parameter`."""
    return torch.as_strided(flat, parameter.size(), strides(parameter), flat.storage_offset()).clone()

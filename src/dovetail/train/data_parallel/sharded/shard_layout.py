"""Where parameters and gradients are in memory: flat buckets, which every rank updates whole or one n-th of.

A bucket holds the values of its parameters end to end in one tensor, padded so that n ranks can share it out evenly;
the parameters are views of it. Their gradients have a tensor of the same form. Of a split bucket rank r's share is the
r-th of n equal parts. It covers pieces of a few parameters: the rank gets the summed gradients of these pieces and
updates them. Of a whole bucket every rank's share is all of it.

A bucket that travels in fewer bytes keeps what was lost on the way and adds it the next time: of this rank's
contributions, and of what this rank sends as the owner of its n-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dovetail.core.errors import Error
from dovetail.core.network import Precision
from dovetail.core.plan import Bucket, BucketKind

from ..wire import ring
from ..wire.buffers import BufferPool
from ..wire.lane import LaneWork


@dataclass(frozen=True)
class ShardPiece:
    """This rank's part of one parameter: its elements [start, stop) in the order of memory."""

    index: int
    start: int
    stop: int
    values: torch.Tensor
    """The elements that the optimiser updates, one-dimensional."""
    gradient: torch.Tensor
    """The gradient of these elements, summed over ranks."""


@dataclass(frozen=True)
class LostParts:
    """What the codec has lost of a bucket that travels in fewer bytes, in fp32, to be sent the next time."""

    contribution: torch.Tensor
    """Of this rank's gradients: one element for each of the bucket's."""
    owned: torch.Tensor
    """Of this rank's n-th: of the sums that it sends, or of the new values."""


@dataclass(eq=False)
class ShardedBucket:
    """Parameters whose gradients travel together, and whose new values do too."""

    number: int
    kind: BucketKind
    precision: Precision
    members: tuple[int, ...]
    values: torch.Tensor
    gradients: torch.Tensor | None
    """This rank's gradients, end to end as the values are; of a whole bucket, afterwards the reduced ones. A split
    bucket has them only from the first gradient of a pass until they are reduced."""
    share: torch.Tensor
    """The reduced gradients that this rank has: its n-th, or all of them (`gradients` itself) of a whole bucket."""
    first: int
    """Index of the first element of the share."""
    master: torch.Tensor | None
    """Of a split bucket in fewer bytes: this rank's n-th as the optimiser updates it. Else that is part of `values`."""
    lost: LostParts | None
    parameters: dict[int, nn.Parameter]
    pointers: dict[int, int]
    """Address of each member's values: the parameter must still be there when new values arrive."""
    offsets: dict[int, int]
    pieces: tuple[ShardPiece, ...]
    missing: int = 0
    """Number of members whose gradient of this pass is not there yet."""
    standing: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of a whole bucket: reduced gradients that were not zeroed, to which those of the next pass are added."""
    reducing: LaneWork | None = field(default=None)

    def place(self, index: int) -> torch.Tensor:
        """A member's place in `gradients`, in the shape of the parameter."""
        assert self.gradients is not None, "the bucket is open"
        return _same_form(self.gradients, self.parameters[index], self.offsets[index])

    def open(self, buffers: BufferPool) -> None:
        """Gets memory for the gradients, if it has none."""
        if self.gradients is None:
            self.gradients = buffers.take(self.values.shape, self.values.dtype, self.values.device)
            self.gradients[self.filled :].zero_()  # the padding travels too

    def close(self, buffers: BufferPool) -> None:
        """Gives the memory of a split bucket's gradients back: they are reduced."""
        if self.kind == "split" and self.gradients is not None:
            buffers.give(self.gradients)
            self.gradients = None

    @property
    def filled(self) -> int:
        """Elements without the padding."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def bytes(self) -> int:
        return self.values.numel() * self.values.element_size()

    @property
    def mine(self) -> torch.Tensor:
        """This rank's share of the values."""
        return self.values[self.first : self.first + self.share.numel()]


def lay_out(
    parameters: Sequence[nn.Parameter], order: Sequence[int], buckets: Sequence[Bucket], *, ranks: int, rank: int
) -> list[ShardedBucket]:
    """Moves the parameters into buckets: `order` names them in gradient-ready order, in which `buckets` count.

    Every Parameter object stays the same; only its memory changes. A bucket whose parameters have several dtypes
    becomes one for each of them.
    """
    assert sorted(order) == list(range(len(parameters))) and buckets[-1].stop == len(order)
    uniform: list[tuple[list[int], Bucket]] = []
    for bucket in buckets:
        members: dict[torch.dtype, list[int]] = {}
        for i in order[bucket.start : bucket.stop]:
            members.setdefault(parameters[i].dtype, []).append(i)
        uniform += [(of_dtype, bucket) for of_dtype in members.values()]
    return [_bucket(number, those, b, parameters, ranks, rank) for number, (those, b) in enumerate(uniform)]


def _bucket(
    number: int, members: list[int], plan: Bucket, parameters: Sequence[nn.Parameter], ranks: int, rank: int
) -> ShardedBucket:
    like = parameters[members[0]]
    elements = ring.padded(sum(parameters[i].numel() for i in members), ranks)
    values = torch.zeros(elements, dtype=like.dtype, device=like.device)
    gradients, width, first, master, lost = None, elements, 0, None, None
    if plan.kind == "split":
        width = elements // ranks
        first, share = rank * width, torch.zeros(width, dtype=like.dtype, device=like.device)
    else:
        share = gradients = torch.zeros_like(values)
    if plan.precision != "full" and ranks > 1:
        lost = LostParts(torch.zeros_like(values), torch.zeros(elements // ranks, dtype=like.dtype, device=like.device))
        master = torch.zeros_like(share) if plan.kind == "split" else None
    updated = values[first : first + width] if master is None else master
    pointers, offsets, pieces, at = {}, {}, [], 0
    for i in members:
        parameter = parameters[i]
        place = _same_form(values, parameter, at)
        place.copy_(parameter.data)
        parameter.data = place
        pointers[i], offsets[i] = place.data_ptr(), at
        low, high = max(at, first), min(at + parameter.numel(), first + width)
        # Some rank must have the state of a parameter without elements, as torch's optimisers do.
        empty = not parameter.numel() and (plan.kind == "whole" or rank == 0)
        if low < high or empty:
            here = slice(low - first, max(low, high) - first)
            pieces.append(ShardPiece(i, low - at, max(low, high) - at, updated[here], share[here]))
        at += parameter.numel()
    return ShardedBucket(
        number=number,
        kind=plan.kind,
        precision=plan.precision,
        members=tuple(members),
        values=values,
        gradients=gradients,
        share=share,
        first=first,
        master=master,
        lost=lost,
        parameters={i: parameters[i] for i in members},
        pointers=pointers,
        offsets=offsets,
        pieces=tuple(pieces),
        missing=len(members),
    )


def check_places(buckets: Sequence[ShardedBucket], names: Sequence[str]) -> None:
    """Refuses parameters that no longer are views of their bucket; `names` are those of all parameters."""
    for bucket in buckets:
        for i, pointer in bucket.pointers.items():
            if bucket.parameters[i].data_ptr() != pointer:
                raise Error(
                    f"overlap: {names[i]!r} has new memory since the model was wrapped; move or convert a model before "
                    "it is wrapped, and change values in place (p.data.copy_(…))"
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
    """The elements of something with the shape of `parameter`, one-dimensional, in the order of its memory.

    A view where the tensor has the parameter's strides, else a copy.
    """
    if tuple(tensor.stride()) != strides(parameter):
        buffer = torch.empty_strided(parameter.size(), strides(parameter), dtype=tensor.dtype, device=tensor.device)
        tensor = buffer.copy_(tensor)
    return torch.as_strided(tensor, (parameter.numel(),), (1,), tensor.storage_offset())


def in_shape(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The reverse of `in_memory_order`: a new tensor with the shape of `parameter`."""
    return torch.as_strided(flat, parameter.size(), strides(parameter), flat.storage_offset()).clone()

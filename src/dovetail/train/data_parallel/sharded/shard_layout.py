"""Which elements travel together and who updates them: buckets, which every rank updates whole or one n-th of.

Every parameter stays in its own memory, so whatever refers to it stays valid. A bucket is the parameters' elements end
to end, padded so that n ranks can share them out evenly; it has memory of that form only while it travels. Of a split
bucket rank r's share is the r-th of n equal parts. It covers pieces of a few parameters: the rank gets the summed
gradients of these pieces and updates them where the parameters are. Of a whole bucket every rank's share is all of it.

A parameter whose optimiser needs it whole has an owner, one rank that updates all of it. Parameters of one optimiser
travel apart from those of others, so a bucket has owned parameters only, or none. A split one with owned parameters has
them in the order of their owners: its shares have different sizes, given by their borders, and no padding.

A bucket that travels in fewer bytes keeps what was lost on the way and adds it the next time: of this rank's
contributions, and of what this rank sends as the owner of its n-th.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import nn

from dovetail.core.errors import Error
from dovetail.core.network import Precision
from dovetail.core.plan import Bucket, BucketKind
from dovetail.train import device_streams
from dovetail.train.device_streams import StreamSet

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
    """The elements that the optimiser updates, a view of the parameter or of the bucket's master: one-dimensional, or
    in the parameter's own form if that has an owner."""
    gradient: torch.Tensor
    """The gradient of these elements, summed over ranks, one-dimensional."""

    def formed(self, elements: torch.Tensor) -> torch.Tensor:
        """One number for each of these elements, one-dimensional, in the form of `values`."""
        return torch.as_strided(elements, self.values.size(), self.values.stride(), elements.storage_offset())


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
    elements: int
    """Elements of all members, and the padding."""
    gradients: torch.Tensor | None
    """This rank's gradients, end to end; of a whole bucket, afterwards the reduced ones. A split bucket has them only
    from the first gradient of a pass until they are reduced."""
    share: torch.Tensor
    """The reduced gradients that this rank has: its n-th, or all of them (`gradients` itself) of a whole bucket."""
    first: int
    """Index of the first element of the share."""
    master: torch.Tensor | None
    """Of a split bucket in fewer bytes: this rank's n-th as the optimiser updates it. The parameters hold what all
    ranks have. Else the optimiser updates the parameters themselves."""
    lost: LostParts | None
    parameters: dict[int, nn.Parameter]
    memory: dict[int, torch.Tensor]
    """Each member's own memory, one-dimensional."""
    offsets: dict[int, int]
    borders: tuple[int, ...] | None
    """Of a split bucket of owned parameters: where the ranks' shares begin, and its end. None: shares are equal."""
    pieces: tuple[ShardPiece, ...]
    missing: int
    """Number of members whose gradient of this pass is not there yet."""
    streams: StreamSet
    """Where gradients were put into the bucket since it was last sent."""
    standing: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of a whole bucket: reduced gradients that were not zeroed, to which those of the next pass are added."""
    reducing: LaneWork | None = field(default=None)
    opened: torch.Event | None = field(default=None)
    """On an accelerator: from when on other streams may use the memory of `gradients`."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory that a transfer of the bucket uses and that is not from a pool, the parameters' included."""
        yield from self.memory.values()
        yield self.share
        if self.master is not None:
            yield self.master
        if self.lost is not None:
            yield self.lost.contribution
            yield self.lost.owned

    def place(self, index: int) -> torch.Tensor:
        """A member's place in `gradients`, in the shape of the parameter."""
        assert self.gradients is not None, "the bucket is open"
        return _same_form(self.gradients, self.parameters[index], self.offsets[index])

    def open(self, buffers: BufferPool) -> None:
        """Gets memory for the gradients, if it has none, to be used in the device's current stream."""
        device = self.share.device
        if self.gradients is None:
            self.gradients = buffers.take(self.elements, self.share.dtype, device)
            self.gradients[self.filled :].zero_()  # the padding travels too
            self.opened = device_streams.mark(device)
        if self.streams.add_current():
            device_streams.follow(self.opened, device)

    def close(self, buffers: BufferPool) -> None:
        """Gives the memory of a split bucket's gradients back: they are reduced."""
        if self.kind == "split" and self.gradients is not None:
            buffers.give(self.gradients)
            self.gradients = None

    @contextmanager
    def travelling(self, buffers: BufferPool) -> Iterator[torch.Tensor]:
        """Memory for the values, end to end, for the time of the block; the padding is zero."""
        with buffers.lend(self.elements, self.share.dtype, self.share.device) as flat:
            flat[self.filled :].zero_()
            yield flat

    def pack(self, flat: torch.Tensor, start: int, stop: int, *, at: int = 0) -> None:
        """Copies elements [start, stop) of the bucket from the parameters into `flat`, whose first element is `at`."""
        if spans := list(self._spans(start, stop)):
            torch._foreach_copy_([flat[low - at : high - at] for _, low, high in spans], [m for m, _, _ in spans])

    def unpack(self, flat: torch.Tensor, start: int, stop: int) -> None:
        """The reverse of `pack`: copies from `flat` into the parameters."""
        if spans := list(self._spans(start, stop)):
            torch._foreach_copy_([m for m, _, _ in spans], [flat[low:high] for _, low, high in spans])

    def add(self, start: int, differences: torch.Tensor) -> None:
        """Adds to the parameters; the first of `differences` belongs to element `start` of the bucket."""
        if spans := list(self._spans(start, start + differences.numel())):
            torch._foreach_add_(
                [m for m, _, _ in spans], [differences[low - start : high - start] for _, low, high in spans]
            )

    def _spans(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(part of a member's memory, its first element and the one behind its last in the bucket), member by member.

        Together they are elements [start, stop) but for the padding.
        """
        first = bisect_right(self.members, start, key=self.offsets.__getitem__) - 1
        for i in self.members[max(first, 0) :]:
            at = self.offsets[i]
            if at >= stop:
                return
            memory = self.memory[i]
            low, high = max(at, start), min(at + memory.numel(), stop)
            if low < high:
                yield memory[low - at : high - at], low, high

    def renew_master(self) -> None:
        """Brings `master` to the exact values: what all ranks have, and what the codec has lost of this rank's n-th."""
        assert self.master is not None and self.lost is not None
        for piece in self.pieces:
            piece.values.copy_(piece.formed(self.memory[piece.index][piece.start : piece.stop]))
        self.master.add_(self.lost.owned)

    @property
    def filled(self) -> int:
        """Elements without the padding."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def bytes(self) -> int:
        return self.elements * self.share.element_size()


def lay_out(
    parameters: Sequence[nn.Parameter],
    order: Sequence[int],
    buckets: Sequence[Bucket],
    ranks: int,
    rank: int,
    owners: Mapping[int, int],
    users: Mapping[int, int],
) -> list[ShardedBucket]:
    """Puts the parameters into buckets: `order` names them in gradient-ready order, in which `buckets` count.

    `owners` are the ranks of those that are updated whole, `users` the numbers of the optimisers that update each. The
    parameters and their memory stay as they are. A bucket whose parameters have several dtypes or optimisers becomes
    one for each of them.
    """
    assert sorted(order) == list(range(len(parameters))) and buckets[-1].stop == len(order)
    uniform: list[tuple[list[int], Bucket]] = []
    for bucket in buckets:
        alike: dict[tuple[torch.dtype, int | None], list[int]] = {}
        for i in order[bucket.start : bucket.stop]:
            alike.setdefault((parameters[i].dtype, users.get(i)), []).append(i)
        uniform += [(members, bucket) for members in alike.values()]
    return [_bucket(number, those, b, parameters, ranks, rank, owners) for number, (those, b) in enumerate(uniform)]


def _bucket(
    number: int,
    members: list[int],
    plan: Bucket,
    parameters: Sequence[nn.Parameter],
    ranks: int,
    rank: int,
    owners: Mapping[int, int],
) -> ShardedBucket:
    like = parameters[members[0]].data
    borders, elements = None, ring.padded(sum(parameters[i].numel() for i in members), ranks)
    owned = members[0] in owners
    assert all((i in owners) == owned for i in members), "one optimiser updates all of them"
    if owned and plan.kind == "split":
        members = sorted(members, key=owners.__getitem__)
        sizes = [sum(parameters[i].numel() for i in members if owners[i] == r) for r in range(ranks)]
        borders = (0, *accumulate(sizes))
        elements = borders[-1]
    gradients, width, first, master, lost = None, elements, 0, None, None
    if plan.kind == "split":
        first, stop = (borders or ring.equal_borders(elements, ranks))[rank : rank + 2]
        width = stop - first
        share = like.new_zeros(width)
    else:
        share = gradients = like.new_zeros(elements)
    if plan.precision != "full" and ranks > 1:
        sent = width if plan.kind == "split" else elements // ranks
        lost = LostParts(like.new_zeros(elements), like.new_zeros(sent))
        master = torch.zeros_like(share) if plan.kind == "split" else None
    memory, offsets, pieces, at = {}, {}, [], 0
    for i in members:
        parameter = parameters[i]
        memory[i], offsets[i] = own_memory(parameter), at
        low, high = max(at, first), min(at + parameter.numel(), first + width)
        # Some rank must have the state of a parameter without elements, as torch's optimisers do.
        empty = not parameter.numel() and (plan.kind == "whole" or rank == owners.get(i, 0))
        if low < high or empty:
            high = max(low, high)
            here, there = slice(low - first, high - first), slice(low - at, high - at)
            values = memory[i][there] if master is None else master[here]
            values = (_same_form(values, parameter, 0) if owned else values).data
            pieces.append(ShardPiece(i, there.start, there.stop, values, share[here]))
        at += parameter.numel()
    return ShardedBucket(
        number=number,
        kind=plan.kind,
        precision=plan.precision,
        members=tuple(members),
        elements=elements,
        gradients=gradients,
        share=share,
        first=first,
        master=master,
        lost=lost,
        parameters={i: parameters[i] for i in members},
        memory=memory,
        offsets=offsets,
        borders=borders,
        pieces=tuple(pieces),
        missing=len(members),
        streams=StreamSet(like.device),
    )


def plan_of(buckets: Sequence[ShardedBucket]) -> tuple[list[int], list[Bucket]]:
    """The reverse of `lay_out`: (indices of the parameters in gradient-ready order, buckets that count in it)."""
    order = [i for bucket in buckets for i in bucket.members]
    stops = accumulate(len(bucket.members) for bucket in buckets)
    return order, [
        Bucket(start=stop - len(b.members), stop=stop, bytes=b.bytes, kind=b.kind, precision=b.precision)
        for b, stop in zip(buckets, stops, strict=True)
    ]


def check_memory(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters whose elements do not fill a memory of their own: pieces of them could not be updated."""
    taken: list[tuple[int, int, str]] = []
    for name, parameter in named:
        if tuple(parameter.stride()) != strides(parameter):
            raise Error(
                f"overlap: {name!r} has strides {tuple(parameter.stride())}, which leave gaps in its memory or use it "
                "twice; expected a dense parameter (make it from tensor.contiguous())"
            )
        if parameter.numel():
            at = parameter.data_ptr()
            taken.append((at, at + parameter.numel() * parameter.element_size(), name))
    taken.sort()
    for (_, end, name), (start, _, other) in pairwise(taken):
        if start < end:
            raise Error(f"overlap: {name!r} and {other!r} share memory; expected one Parameter that both modules have")


def _same_form(flat: torch.Tensor, parameter: torch.Tensor, at: int) -> torch.Tensor:
    """The elements of `flat` from `at` on, with the shape of `parameter` and, if that has no gaps, its strides."""
    return torch.as_strided(flat, parameter.size(), strides(parameter), flat.storage_offset() + at)


def own_memory(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's elements in the order of its memory.

    `.data` has a version of its own and no base: nothing but this tensor holds the memory (`references.py` counts).
    """
    return torch.as_strided(parameter.data, (parameter.numel(),), (1,), parameter.storage_offset()).data


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

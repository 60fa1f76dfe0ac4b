"""How buckets travel: what the lane runs for one bucket. And the search for parameters that no rank has used.

A bucket gets flat memory when its transfer begins and gives it back at the end. The elements that an all-gather brings
are copied into the parameters as they arrive, on the lane's thread, while the link carries the next ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from dovetail.train import device_streams

from ..wire import coded, ring
from ..wire.buffers import BufferPool
from ..wire.coded import Coder
from ..wire.lane import CommunicationLane, Run
from .shard_layout import ShardedBucket
from .slot import GradientSlot, GradientState, SlotEvent


def reducing(
    bucket: ShardedBucket,
    onto: set[int],
    standing: Mapping[int, torch.Tensor],
    buffers: BufferPool,
    coder: Coder | None,
    group: dist.ProcessGroup,
    tag: int,
) -> Run:
    """The all-reduce of a whole bucket that is full now, or the reduce-scatter of a split one.

    What is reduced replaces what the bucket had, but for the members in `onto`, to which it is added; of a whole bucket
    `standing` holds what these had.
    """
    bucket.open(buffers)  # it has no memory yet if it holds nothing but empty parameters
    flat, lost = bucket.gradients, bucket.lost
    assert flat is not None

    def whole() -> ring.Transfer:
        if lost is None or coder is None:
            yield from ring.all_reduce(flat, group, tag=tag)
        else:
            yield from coded.all_reduce(flat, lost.contribution, lost.owned, coder, group, tag=tag)
        for i, before in standing.items():
            bucket.place(i).add_(before)
        device_streams.hold_here(standing.values())

    def split() -> ring.Transfer:
        if lost is None or coder is None:
            yield from ring.reduce_scatter(flat, group, tag=tag, borders=bucket.borders)
        else:
            yield from coded.reduce_scatter(flat, lost.contribution, coder, group, tag=tag, borders=bucket.borders)
        mine = flat[bucket.first : bucket.first + bucket.share.numel()]
        if not onto:
            bucket.share.copy_(mine)
        else:
            for piece in bucket.pieces:
                if piece.index not in onto:
                    piece.gradient.zero_()
            bucket.share.add_(mine)
        bucket.close(buffers)

    return whole if bucket.kind == "whole" else split


def gathering(
    bucket: ShardedBucket, buffers: BufferPool, coder: Coder | None, group: dist.ProcessGroup, tag: int
) -> Run:
    """The all-gather of a split bucket's new values; of one in fewer bytes, of how they differ from the old ones."""
    lost, master = bucket.lost, bucket.master
    if lost is None or master is None or coder is None:
        return _values_of_owners(bucket, buffers, group, tag)

    def run() -> ring.Transfer:
        with buffers.lend(master.shape, master.dtype, master.device) as difference:
            difference[max(0, bucket.filled - bucket.first) :].zero_()  # the padding is no parameter's
            bucket.pack(difference, bucket.first, bucket.first + master.numel(), at=bucket.first)
            torch.sub(master, difference, out=difference)
            yield from coded.all_gather(
                bucket.elements,
                difference,
                lost.owned,
                coder,
                group,
                arrived=bucket.add,
                tag=tag,
                borders=bucket.borders,
            )

    return run


def gathering_exactly(bucket: ShardedBucket, buffers: BufferPool, group: dist.ProcessGroup, tag: int) -> Run:
    """The all-gather of what the masters of a bucket in fewer bytes exactly are."""
    bucket.renew_master()
    for piece in bucket.pieces:
        piece.formed(bucket.memory[piece.index][piece.start : piece.stop]).copy_(piece.values)
    return _values_of_owners(bucket, buffers, group, tag)


def _values_of_owners(bucket: ShardedBucket, buffers: BufferPool, group: dist.ProcessGroup, tag: int) -> Run:
    """Gives all ranks what the parameters hold on the ranks that own each n-th."""

    def run() -> ring.Transfer:
        with bucket.travelling(buffers) as flat:
            bucket.pack(flat, bucket.first, bucket.first + bucket.share.numel())
            yield from ring.all_gather(
                flat, group, tag=tag, borders=bucket.borders, arrived=lambda a, b: bucket.unpack(flat, a, b)
            )

    return run


class UnusedSearch:
    """Which parameters no rank has used in a pass: the others get a gradient on every rank, as torch gives them one.

    All ranks begin it at the same point.
    """

    def __init__(
        self, slots: Sequence[GradientSlot], group: dist.ProcessGroup, lane: CommunicationLane, tag: int
    ) -> None:
        self._slots = slots
        used = [float(slot.look() in (GradientState.REDUCED, GradientState.MIXED)) for slot in slots]
        used += [0.0] * (ring.padded(len(used), group.size()) - len(used))
        self._flags = flags = device_streams.to_device(used, torch.float32, slots[0].parameter.device)
        device_streams.hold_for(lane.stream, [flags])
        self._work = lane.submit("the search for unused parameters", lambda: ring.all_reduce(flags, group, tag=tag))

    def end(self) -> None:
        """Gives a parameter that some rank used a gradient on this one.

        On an accelerator the host waits for the answer, and only if this rank has not used a parameter.
        """
        self._work.wait()
        device_streams.hold_here([self._flags])
        if all(slot.look() is not GradientState.EMPTY for slot in self._slots):
            return
        for slot, used in zip(self._slots, self._flags.tolist(), strict=False):
            if used:
                slot.on(SlotEvent.FIND)

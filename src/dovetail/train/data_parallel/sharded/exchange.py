"""The exchange of gradients and parameters, bucket by bucket, each in its own way.

A forward pass arms the exchange. In backward every gradient that becomes ready is copied to its place in its bucket.
When a bucket is full and all buckets before it are queued, its reduction is queued on the lane (an all-reduce of a
whole bucket, a reduce-scatter of a split one); so the order is the same on all ranks. The optimiser waits for the
buckets one by one, updates what this rank has of them and calls `gather`: the all-gathers of the split buckets are
queued in the order in which the next forward pass needs them, and every parameter in them is `Arriving` until its new
values are there.

What a gradient is follows torch: without `zero_grad` passes add up; a pass inside `no_sync` stays on its rank until the
next pass that synchronises; None means that the optimiser leaves the parameter alone. `slot.py` has the states.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from dovetail.core.errors import Error
from dovetail.core.network import Precision
from dovetail.core.plan import Bucket
from dovetail.measure.clock import Clock
from dovetail.train import device_streams
from dovetail.train.recording import SpanRecorder

from ..pass_stamps import ParameterUse, PassStamps
from ..wire import backends, coded
from ..wire.buffers import BufferPool
from ..wire.codec import CODECS
from ..wire.lane import CommunicationLane, LaneWork, Run, when_destroyed
from ..wire.usage import PrecisionUse, UsageLog
from . import transfers
from .arriving import Arrival, expect, settle, watch_entrances
from .gradients import GradientShares
from .references import KnownReferences
from .scattered import stand_in
from .shard_layout import ShardedBucket, lay_out
from .slot import BucketEntry, GradientSlot, GradientState, SlotEvent
from .together import RankMeeting

TAGS = 2**20
"""Tags that the messages of one transfer have for themselves: the next transfer begins while it ends."""
LOOK = 50
"""Iterations from one look at what codecs lose to the next: a look reads all gradients twice more."""


class GradientExchange:
    """The buckets of one model on one rank."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        name: str,
        find_unused: bool,
        order: Sequence[int],
        buckets: Sequence[Bucket],
    ) -> None:
        self.device = named[0][1].device
        self.group = backends.twin(group, self.device)
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self.meeting = RankMeeting(self.group)
        patience = backends.patience(self.group)
        self.lane = CommunicationLane(self.device, self.group, patience, idle=self.meeting.give_sign)
        self.shares = GradientShares(self, group)
        self.coders: dict[Precision, coded.Coder] = {name: coded.Coder(codec) for name, codec in CODECS.items()}
        self.find_unused = find_unused
        self.owners: dict[int, int] = {}
        """Ranks that update parameters whole, by index of the parameter: where the optimiser needs it so."""
        self.users: dict[int, int] = {}
        """Number of the optimiser that updates a parameter, by index; the parameters of each travel apart."""
        self.active = True
        """False while torch's reducer is in charge: then nothing happens here."""
        self.watching = False
        """The tuner wants to know when gradients become ready and when parameters are first used."""
        self.clock = Clock(self.device)
        self.stamps = PassStamps()
        """Of the last pass that armed the exchange."""
        self.uses: list[ParameterUse] = []
        """First uses of the parameters that the iteration before the last one sent (see `Arrival.uses`)."""
        self._coming_uses: list[ParameterUse] = []
        self._usage = UsageLog()
        self.on_step: Callable[[], None] | None = None
        """Called at the end of every `optimizer.step()`, on all ranks at the same point: planning happens here."""
        self.recorder = SpanRecorder(name, self.rank, self.clock)
        self.read_elsewhere: list[int] = []
        """Parameters that could be read through other references in the last step, which therefore waited for them."""
        self._search: transfers.UnusedSearch | None = None
        self._armed = self._begun = False
        self._next = self._iterations = 0
        self.passes = 0
        """Forward passes so far whose backward pass synchronises."""
        self.compiled = 0
        """Parameters of modules that went through torch.compile, which wait for them all before they begin."""
        self.tags = cycle(range(0, 512 * TAGS, TAGS))
        """First tags of the transfers to come, the same on all ranks."""
        held = weakref.ref(self)
        watch_entrances()
        when_destroyed(group, _weakly(held, "close"))
        self.slots: list[GradientSlot] = []
        self._handles = []
        self._nodes: list[Node] = []
        """Autograd's node that adds to `.grad` of each parameter: held, or torch makes another without our hooks."""
        for index, (parameter_name, parameter) in enumerate(named):
            scattered, mixed = (stand_in(parameter_name, parameter, index, weakref.ref(self.shares)) for _ in range(2))
            self.slots.append(GradientSlot(parameter_name, parameter, scattered, mixed))
            # Not a hook of the parameter: torch.autograd.grad calls those too and adds nothing to `.grad`.
            adding = get_gradient_edge(parameter).node
            self._nodes.append(adding)
            self._handles.append(adding.register_prehook(_weakly(held, "_before", index)))
            # Not one of register_post_accumulate_grad_hook: those of the user find this rank's gradient, as in torch.
            self._handles.append(adding.register_hook(_weakly(held, "_after", index)))
        self.index = {id(p): i for i, (_, p) in enumerate(named)}
        self.buckets: list[ShardedBucket] = []
        self.bucket_of: dict[int, ShardedBucket] = {}
        self.lay_out(order, buckets)

    def lay_out(self, order: Sequence[int], buckets: Sequence[Bucket]) -> None:
        """Makes new buckets of the same parameters; the shares are zero. All ranks do it at the same point."""
        self.settle()
        self._exact_values()
        for bucket in self.buckets:
            device_streams.hold_here(bucket.tensors())
        with torch.no_grad():
            parameters = [s.parameter for s in self.slots]
            self.buckets = lay_out(parameters, order, buckets, self.ranks, self.rank, self.owners, self.users)
        for bucket in self.buckets:
            device_streams.hold_for(self.lane.stream, bucket.tensors())
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self._references = KnownReferences(self.buckets, [s.name for s in self.slots])
        self._buffers = BufferPool()
        """Memory for gradients, which the device's current stream fills and the lane gives back."""
        # What an all-gather of this iteration gives back must not be what the next backward pass waits for.
        self._gathered = BufferPool() if device_streams.is_queued(self.device) else self._buffers
        self._usage.forget()

    def arm(self) -> None:
        """Called when a forward pass begins whose backward pass synchronises gradients."""
        if self._begun and self._armed:
            self._complete()
        for _ in self._waited_for():
            pass
        self._buffers.adopt(self.device)
        self.shares.forget()
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
        for slot in self.slots:
            slot.on(SlotEvent.ARM)
        self.stamps = PassStamps()
        self.passes += 1
        self._armed, self._begun, self._next = True, False, 0

    def reduced(self) -> Iterator[ShardedBucket]:
        """Yields the buckets in the order of their reduction, each once this rank has its share of the gradients."""
        if self._armed and (self._begun or self.find_unused):
            self._complete()
        return self._waited_for()

    def _waited_for(self) -> Iterator[ShardedBucket]:
        if self._search is not None:
            self._search.end()
            self._search = None
        for bucket in self.buckets:
            if bucket.reducing is not None:
                bucket.reducing.wait()
                if not device_streams.is_queued(self.device):
                    bucket.reducing = None  # on an accelerator each stream that uses the bucket must wait by itself
            yield bucket

    def gather(self, touched: Collection[int], *, first: bool = True) -> None:
        """Queues the all-gathers of these buckets, which run behind what comes next; `first`: of this iteration."""
        self._references.check_places()
        self.read_elsewhere = self._references.read_elsewhere()
        updated = [i for b in self.buckets if b.number in touched for i in b.members]
        torch.autograd.graph.increment_version([self.slots[i].parameter for i in updated])
        if first:
            self.uses, self._coming_uses = self._coming_uses, []
        uses = self._coming_uses if self.watched else None
        for bucket in reversed(self.buckets):
            if bucket.kind == "split" and bucket.number in touched:
                coder, tag = self.coders.get(bucket.precision), next(self.tags)
                run = transfers.gathering(bucket, self._gathered, coder, self.group, tag)
                gathering = self._submit("all-gather", bucket, run)
                for i in bucket.members:
                    expect(self.slots[i].parameter, Arrival(gathering, i, uses, self.clock))

    def settle(self, some: Iterable[int] | None = None) -> None:
        """Waits until every parameter is whole, or `some` are: on an accelerator, the device's current stream does."""
        for index in range(len(self.slots)) if some is None else some:
            settle(self.slots[index].parameter, last=True)

    def after_step(self, began: Any, *, last: bool = True) -> None:
        """Called at the end of `optimizer.step()`, on all ranks; the model's `last` optimiser ends the iteration.

        `began` is the stamp of its start, None where none was taken.
        """
        self.settle(self.read_elsewhere)
        self.meeting.end_step()
        if not last:
            return
        if self.recorder.active and self.active and began is not None:
            self._record_iteration(began, self.clock.stamp())
        self._iterations += 1
        for coder in self.coders.values():
            coder.look(self._iterations % LOOK == 0)
        self._usage.end_iteration(self.lane.used, self.codec_seconds)
        if self.on_step is not None:
            self.on_step()

    def has_gradient(self, index: int) -> bool:
        """Whether the optimiser must update this parameter, by torch's rule."""
        if not self.active:
            return self.slots[index].parameter.grad is not None
        return self.slots[index].look() is GradientState.REDUCED

    @property
    def unfinished(self) -> bool:
        """Whether a backward pass that synchronises has begun, and some gradients have not come yet."""
        return self._armed and self._begun

    def communicate(self, what: str, run: Run) -> None:
        """Runs a transfer on the lane, behind all that is queued, and waits for it."""
        self.lane.submit(what, run).wait()

    def close(self) -> None:
        """Ends communication for good once all that is queued is done; its thread and its sockets go."""
        self.lane.finish()
        self.group = cast(dist.ProcessGroup, None)

    @property
    def link_idle(self) -> float:
        """Share of an iteration in which nothing was on its way: the median of the last iterations."""
        return self._usage.idle

    @property
    def precision_use(self) -> PrecisionUse | None:
        """What lower precisions save and cost; None where every bucket travels in full."""
        fewer = [b for b in self.buckets if b.lost is not None]
        if not fewer:
            return None
        sent = sum(b.bytes for b in self.buckets if b.lost is None)
        sent += sum(self.coders[b.precision].codec.wire_bytes(b.elements) for b in fewer)
        share = sent / sum(b.bytes for b in self.buckets)
        error = max(self.coders[b.precision].error for b in fewer)
        return PrecisionUse(len(fewer), share=share, codec=self._usage.codec, error=error)

    @property
    def codec_seconds(self) -> float:
        """Seconds of processor time that encoding and decoding have taken on this rank so far."""
        return sum(coder.seconds for coder in self.coders.values())

    def _before(self, index: int) -> None:
        """A gradient is about to be added to `.grad`: a stand-in there makes room for it."""
        if self.active:
            self.slots[index].make_room()

    def _after(self, index: int) -> None:
        """A gradient was added: `.grad` holds this rank's gradient."""
        if not self.active:
            return
        slot = self.slots[index]
        gradient = slot.settle_room()
        if not self._armed or slot.ready:
            slot.on(SlotEvent.ADD, gradient)
            return
        if gradient.is_sparse:
            raise Error(f"overlap: the gradient of {slot.name!r} is sparse, and buckets are dense")
        slot.on(SlotEvent.FILL)
        if not self._begun:
            self.shares.forget()
        self._put(index, gradient)
        self._begun = True
        self.bucket_of[index].missing -= 1
        if self.watched:
            self.stamps.ready.append((index, self.clock.stamp()))
        self._launch()

    def _put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Puts what this rank gives (nothing is zero) into its bucket, whose slot was filled or skipped just now."""
        bucket = self.bucket_of[index]
        if bucket.reducing is not None:
            bucket.reducing.wait()
        bucket.open(self._buffers)
        place = bucket.place(index)
        if bucket.kind == "whole" and self.slots[index].state.entry is BucketEntry.ONTO:
            bucket.standing[index] = place.clone()  # of a split bucket that is in the share, apart from this place
        with torch.no_grad():
            if gradient is None:
                place.zero_()
            else:
                torch.mul(gradient.detach(), 1 / self.ranks, out=place)

    def _launch(self) -> None:
        """Queues the reduction of every full bucket, in order."""
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            bucket.streams.join()
            what = "all-reduce" if bucket.kind == "whole" else "reduce-scatter"
            bucket.reducing = self._submit(what, bucket, self._reducing(bucket))
            self._next += 1
        if self._next == len(self.buckets):
            self._armed = False
            if self.find_unused:
                self._search = transfers.UnusedSearch(self.slots, self.group, self.lane, next(self.tags))

    def _reducing(self, bucket: ShardedBucket) -> Run:
        """The reduction of a bucket that is full now."""
        onto = {i for i in bucket.members if self.slots[i].state.entry is BucketEntry.ONTO}
        standing, bucket.standing = bucket.standing, {}
        coder = self.coders.get(bucket.precision)
        return transfers.reducing(bucket, onto, standing, self._buffers, coder, self.group, next(self.tags))

    def _exact_values(self) -> None:
        """Gives all ranks the masters' exact values of buckets that travel in fewer bytes, before those end."""
        for bucket in self.buckets:
            if bucket.master is not None:
                with torch.no_grad():
                    run = transfers.gathering_exactly(bucket, self._gathered, self.group, next(self.tags))
                self.communicate("the exact values", run)

    def _submit(self, what: str, bucket: ShardedBucket, run: Run) -> LaneWork:
        work = self.lane.submit(f"the {what} of bucket {bucket.number}", run)
        self.recorder.add_queued(f"{what} {bucket.number}", bucket.bytes, work)
        return work

    @property
    def watched(self) -> bool:
        """Whether somebody wants to know when everything happens in an iteration."""
        return self.watching or self.recorder.active

    @property
    def timed(self) -> bool:
        """Whether the passes and updates of an iteration are stamped. On the CPU they always are: it costs nothing."""
        return self.watched or not device_streams.is_queued(self.device)

    @property
    def updating(self) -> float:
        """Seconds that the optimiser took in the last iteration that was timed, without waiting."""
        at = self.clock.seconds([stamp for pair in self.stamps.updates for stamp in pair])
        return sum(stop - start for start, stop in zip(at[::2], at[1::2], strict=True))

    def _record_iteration(self, began: Any, ended: Any) -> None:
        """Records the last forward and backward pass, and the optimiser's step from `began` to `ended`."""
        passed = self.stamps.seconds(self.clock, began, ended, self.uses)
        if passed is not None:
            (zero,) = self.clock.times([began])
            for name, kind, start, stop in passed.spans([slot.name for slot in self.slots]):
                self.recorder.add(name, kind, zero + start, zero + stop)

    def _complete(self) -> None:
        """Queues the remaining buckets after a backward pass in which some parameters got no gradient on this rank.

        As in torch, the other ranks get what earlier passes inside `no_sync` have left of them here, or else zeros.
        """
        unused = []
        for bucket in self.buckets[self._next :]:
            for i in bucket.members:
                slot = self.slots[i]
                if slot.ready:
                    continue
                own = slot.own if slot.look() in (GradientState.OWN, GradientState.MIXED) else None
                slot.on(SlotEvent.SKIP)
                self._put(i, own)
                if slot.parameter.requires_grad:
                    unused.append(slot.name)
            bucket.missing = 0
        self._launch()
        if unused and not self.find_unused:
            raise Error(
                f"overlap: {unused[0]!r} and {len(unused) - 1} other parameters got no gradient in this iteration: "
                "wrap the model with find_unused_parameters=True if that is intended"
            )


def _weakly(held: weakref.ref[GradientExchange], method: str, *given: int) -> Callable[..., None]:
    # Parameters hold their hooks: hooks that held the exchange would keep the model for ever.
    def call(*_: Any) -> None:
        if (exchange := held()) is not None:
            getattr(exchange, method)(*given)

    return call

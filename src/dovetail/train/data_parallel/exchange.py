"""The exchange of gradients and parameters: reduce-scatter behind backward, all-gather behind the next forward.

A forward pass arms the exchange. In backward every gradient that becomes ready is copied to its place in its bucket.
When a bucket is full and all buckets before it are queued, its reduce-scatter is queued on the lane; so the order is
the same on all ranks. The optimiser waits for the buckets one by one, updates this rank's pieces and calls `gather`:
the all-gathers are queued in the order in which the next forward pass needs them, and every parameter is `Arriving`
until its new values are there.

What a gradient is follows torch: without `zero_grad` passes add up; a pass inside `no_sync` stays on its rank until the
next pass that synchronises; None means that the optimiser leaves the parameter alone. Where torch would add a rank's
own gradient to a reduced one that was not zeroed, the two stay apart here: the reduced one is in the shares, the rank's
own one is kept beside them until the next pass sends it, and a stand-in in `.grad` notices when either is zeroed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from dovetail.core.errors import Error
from dovetail.core.timeline import SpanKind
from dovetail.train.integrations import keep
from dovetail.train.recording import SpanRecorder

from . import ring
from .arriving import Arrival, ScatteredGradient, expect, settle, stand_in
from .lane import CommunicationLane, LaneWork
from .shard_layout import ShardedBucket, lay_out

if TYPE_CHECKING:
    from .forward_tuner import ForwardTuner


@dataclass(eq=False)
class GradientSlot:
    """The state of one parameter's gradient on this rank."""

    name: str
    parameter: nn.Parameter
    scattered: ScatteredGradient
    """Stand-in for `.grad` while the shares hold the gradient."""
    mixed: ScatteredGradient
    """Stand-in for `.grad` while the shares hold a gradient and `own` is still to be added to it."""
    own: torch.Tensor | None = None
    """This rank's own gradient, not yet added to the one in the shares."""
    bucket: ShardedBucket | None = None
    ready: bool = False
    """The gradient of this pass is in the bucket."""
    used: bool = False
    """The parameter got a gradient in a pass that did not synchronise, since the last pass that did."""
    stands: bool = False
    """The shares held a gradient when the one that is being added came."""
    carried: bool = False
    """The gradient in the share was not zeroed: the next one is added to it."""


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
        cuts: Sequence[int],
    ) -> None:
        self.group = ring.twin(group)
        keep(self.group)
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self.device = named[0][1].device
        self.lane = CommunicationLane(self.device, self.group, ring.patience(self.group))
        self.find_unused = find_unused
        self.watching = False
        """The tuner wants to know when gradients become ready and when parameters are first used."""
        self.stamps: list[tuple[int, float]] = []
        """(index of the parameter, time.perf_counter()) of gradients as they became ready in the last pass."""
        self.uses: list[tuple[int, float, float]] = []
        """First uses of the parameters that the iteration before the last one sent (see `Arrival.uses`)."""
        self._coming_uses: list[tuple[int, float, float]] = []
        self.forward_span = (0.0, 0.0)
        """Start and end of the last forward pass that armed the exchange, by time.perf_counter()."""
        self.updating = 0.0
        """Seconds that the optimiser took in the last iteration, without waiting."""
        self.tuner: ForwardTuner | None = None
        self.recorder = SpanRecorder(name, self.rank)
        self._flags: torch.Tensor | None = None
        self._flagging: LaneWork | None = None
        self._armed = self._begun = False
        self._next = 0
        held = weakref.ref(self)
        self.slots: list[GradientSlot] = []
        self._handles = []
        self._nodes: list[Node] = []
        """Autograd's node that adds to `.grad` of each parameter: held, or torch makes another without our hooks."""
        for index, (parameter_name, parameter) in enumerate(named):
            scattered, mixed = (stand_in(parameter_name, parameter, _weakly(held, "_zero", index)) for _ in range(2))
            self.slots.append(GradientSlot(parameter_name, parameter, scattered, mixed))
            # Not a hook of the parameter: torch.autograd.grad calls those too and adds nothing to `.grad`.
            adding = get_gradient_edge(parameter).node
            self._nodes.append(adding)
            self._handles.append(adding.register_prehook(_weakly(held, "_before", index)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(_weakly(held, "_after", index)))
        self.index = {id(p): i for i, (_, p) in enumerate(named)}
        self.lay_out(order, cuts)

    def lay_out(self, order: Sequence[int], cuts: Sequence[int]) -> None:
        """Makes new buckets of the same parameters; the shares are zero. All ranks do it at the same point."""
        self.settle()
        with torch.no_grad():
            parameters = [s.parameter for s in self.slots]
            self.buckets = lay_out(parameters, order, cuts, ranks=self.ranks, rank=self.rank)
        for bucket in self.buckets:
            for i in bucket.members:
                self.slots[i].bucket = bucket
        self.needed = [b.number for b in reversed(self.buckets)]
        """Numbers of the buckets in the order in which forward needs them."""

    def arm(self) -> None:
        """Called when a forward pass begins whose backward pass synchronises gradients."""
        if self._begun and self._armed:
            self._complete()
        for _ in self._waited_for():
            pass
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
        for slot in self.slots:
            slot.ready = False
        self.stamps = []
        self._armed, self._begun, self._next = True, False, 0

    def reduced(self) -> Iterator[ShardedBucket]:
        """Yields the buckets in the order of their reduction, each once this rank has its share of the gradients."""
        if self._armed and (self._begun or self.find_unused):
            self._complete()
        return self._waited_for()

    def _waited_for(self) -> Iterator[ShardedBucket]:
        if self._flags is not None:
            self._learn_which_were_used()
        for bucket in self.buckets:
            if bucket.reducing is not None:
                bucket.reducing.wait()
                bucket.reducing = None
            yield bucket

    def gather(self) -> None:
        """Queues the all-gathers of the new values, which run behind whatever comes next."""
        self._check_places()
        torch.autograd.graph.increment_version([s.parameter for s in self.slots])
        self.uses, self._coming_uses = self._coming_uses, []
        uses = self._coming_uses if self._stamping else None
        for number in self.needed:
            bucket = self.buckets[number]
            gathering = self._submit("all-gather", bucket, _gather(bucket, self.group))
            for i in bucket.members:
                expect(self.slots[i].parameter, Arrival(gathering, i, uses))

    def settle(self) -> None:
        """Waits until every parameter is whole."""
        for slot in self.slots:
            settle(slot.parameter)

    def after_step(self, began: float) -> None:
        """Called at the end of `optimizer.step()`, on all ranks at the same point: planning happens here."""
        if self.recorder.active:
            self._record_iteration(began, time.perf_counter())
        if self.tuner is not None:
            self.tuner.after_step()

    def has_gradient(self, index: int) -> bool:
        """Whether the optimiser must update this parameter, by torch's rule."""
        slot = self.slots[index]
        return slot.parameter.grad is slot.scattered

    def communicate(self, what: str, run: Callable[[], None]) -> None:
        """Runs a function on the lane, behind all that is queued, and waits for it."""
        self.lane.submit(what, run).wait()

    def _before(self, index: int) -> None:
        """A gradient is about to be added to `.grad`: a stand-in there makes room for it."""
        slot = self.slots[index]
        gradient = slot.parameter.grad
        slot.stands = gradient is slot.scattered or gradient is slot.mixed
        if slot.stands:
            slot.parameter.grad = slot.own if gradient is slot.mixed else None
        slot.own = None

    def _after(self, index: int) -> None:
        """A gradient was added: `.grad` holds this rank's gradient."""
        slot = self.slots[index]
        gradient = slot.parameter.grad
        assert gradient is not None
        if not self._armed or slot.ready:
            slot.used = True
            if slot.stands:
                slot.own, slot.parameter.grad = gradient, slot.mixed
            return
        if gradient.is_sparse:
            raise Error(f"overlap: the gradient of {slot.name!r} is sparse, and buckets are dense")
        self._take(index, gradient)
        slot.carried = slot.stands
        slot.ready = self._begun = True
        assert slot.bucket is not None
        slot.bucket.missing -= 1
        if self._stamping:
            self.stamps.append((index, time.perf_counter()))
        self._launch()

    def _take(self, index: int, gradient: torch.Tensor) -> None:
        """Puts this rank's gradient into its bucket; from here on it belongs to the shares."""
        slot = self.slots[index]
        bucket = slot.bucket
        assert bucket is not None
        if bucket.reducing is not None:
            bucket.reducing.wait()
        with torch.no_grad():
            torch.mul(gradient.detach(), 1 / self.ranks, out=bucket.views[index])
        slot.parameter.grad, slot.own = slot.scattered, None

    def _launch(self) -> None:
        """Queues the reduce-scatter of every full bucket, in order."""
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            kept = {p.index for p in bucket.pieces if self.slots[p.index].carried}
            bucket.reducing = self._submit("reduce-scatter", bucket, _reduce(bucket, kept, self.group))
            for i in bucket.members:
                self.slots[i].carried = False
            self._next += 1
        if self._next == len(self.buckets):
            self._armed = False
            if self.find_unused:
                self._flags = torch.zeros(ring.padded(len(self.slots), self.ranks), device=self.device)
                for i, slot in enumerate(self.slots):
                    self._flags[i] = float(slot.ready or slot.used)
                self._flagging = self.lane.submit("the search for unused parameters", _add_up(self._flags, self.group))
            for slot in self.slots:
                slot.used = False

    def _submit(self, what: str, bucket: ShardedBucket, run: Callable[[], None]) -> LaneWork:
        work = self.lane.submit(f"the {what} of bucket {bucket.number}", run)
        nbytes = bucket.values.numel() * bucket.values.element_size()
        self.recorder.add_queued(f"{what} {bucket.number}", nbytes, work)
        return work

    @property
    def _stamping(self) -> bool:
        return self.watching or self.recorder.active

    def _record_iteration(self, began: float, ended: float) -> None:
        """Records the last forward and backward pass, and the optimiser's step from `began` to `ended`."""
        at, forward_end = self.forward_span
        spans: list[tuple[str, SpanKind, float, float]] = []
        for index, before, after in self.uses:
            if at <= before <= after <= forward_end:
                spans.append(("forward", "forward", at, before))
                spans.append((f"wait for {self.slots[index].name}", "wait", before, after))
                at = after
        spans.append(("forward", "forward", at, forward_end))
        spans.append(("backward", "backward", forward_end, max((t for _, t in self.stamps), default=forward_end)))
        for name, kind, start, stop in [*spans, ("optimizer", "optimizer", began, ended)]:
            if stop > start:
                self.recorder.add(name, kind, start, stop)

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
                gradient = slot.parameter.grad
                slot.carried = gradient is slot.scattered or gradient is slot.mixed
                own = (slot.own if slot.carried else gradient) if slot.used else None
                slot.used = own is not None
                if own is not None:
                    self._take(i, own)
                else:
                    bucket.views[i].zero_()
                if slot.parameter.requires_grad:
                    unused.append(slot.name)
            bucket.missing = 0
        self._launch()
        if unused and not self.find_unused:
            raise Error(
                f"overlap: {unused[0]!r} and {len(unused) - 1} other parameters got no gradient in this iteration: "
                "wrap the model with find_unused_parameters=True if that is intended"
            )

    def _learn_which_were_used(self) -> None:
        """Gives a parameter that some rank used a gradient on every rank, as torch does."""
        assert self._flags is not None and self._flagging is not None
        self._flagging.wait()
        for slot, used in zip(self.slots, self._flags.tolist(), strict=False):
            if used and slot.parameter.grad is None:
                slot.parameter.grad = slot.scattered
        self._flags = None

    def _zero(self, index: int) -> None:
        """A stand-in was set to zero: zeroes this rank's share of the gradient."""
        slot = self.slots[index]
        bucket = slot.bucket
        assert bucket is not None
        if bucket.reducing is not None:
            bucket.reducing.wait()
        for piece in bucket.pieces:
            if piece.index == index:
                piece.gradient.zero_()
        if slot.parameter.grad is slot.mixed:
            slot.parameter.grad, slot.own = slot.scattered, None

    def _check_places(self) -> None:
        """Refuses parameters that no longer are views of their bucket."""
        for bucket in self.buckets:
            for i, pointer in bucket.pointers.items():
                if self.slots[i].parameter.data_ptr() != pointer:
                    raise Error(
                        f"overlap: {self.slots[i].name!r} has new memory since the model was wrapped; move or convert "
                        "a model before it is wrapped, and change values in place (p.data.copy_(…))"
                    )


def _weakly(held: weakref.ref[GradientExchange], method: str, index: int) -> Callable[..., None]:
    # Parameters hold their hooks: hooks that held the exchange would keep the model for ever.
    def call(*_: Any) -> None:
        if (exchange := held()) is not None:
            getattr(exchange, method)(index)

    return call


def _reduce(bucket: ShardedBucket, kept: set[int], group: dist.ProcessGroup) -> Callable[[], None]:
    def run() -> None:
        mine = ring.reduce_scatter(bucket.gradients, group)
        if not kept:
            bucket.share.copy_(mine)
            return
        for piece in bucket.pieces:
            if piece.index not in kept:
                piece.gradient.zero_()
        bucket.share.add_(mine)

    return run


def _gather(bucket: ShardedBucket, group: dist.ProcessGroup) -> Callable[[], None]:
    mine = bucket.mine(group.rank())
    return lambda: ring.all_gather(mine, bucket.values, group)


def _add_up(flags: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    return lambda: ring.all_gather(ring.reduce_scatter(flags, group), flags, group)

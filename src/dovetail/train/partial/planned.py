"""Partial backpropagation under a plan: what happens at each event of a step. `lifecycle` says which may come when."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error, typed_line
from dovetail.measure.passes import tensors_in
from dovetail.planning.depth.guard import Guard
from dovetail.planning.depth.straggler import Stragglers
from dovetail.train.data_parallel.observe import Backward
from dovetail.train.device_streams import StreamSet, hold_for

from .courier import Courier, Delivery, RankReport
from .depths import schedule
from .lifecycle import BackpropEvent, BackpropState, next_state
from .noise_monitor import OptimiserMetric
from .segment_buckets import segment_buckets
from .segments import Leaf, Segments
from .use_check import UseCheck

log = logging.getLogger("dovetail")


@dataclass(frozen=True)
class BackpropOptions:
    """Options of a PartialBackprop, which describes them. All ranks must have the same."""

    guard: Guard | None
    stragglers: Stragglers | None
    rotate: Literal["data", "depth"]
    steps: int | None
    uneven_use: bool


@dataclass(frozen=True)
class _ForwardPass:
    """The newest forward pass. It counts once a gradient comes back through it."""

    samples: int = 0
    seconds: float = 0.0
    opaque: bool = False
    """Its output has no tensors to watch, so the end of its backward pass is not certain."""


@dataclass
class _RankWork:
    """What this rank has done since the last exchange."""

    samples: int = 0
    seconds: float = 0.0
    """Time of its own forward and backward passes."""
    leaves: set[Leaf] = field(default_factory=set)
    """Parameters that got a gradient."""


@dataclass
class _StepExchange:
    """The exchange of one step, from its first gradient on."""

    delivery: Delivery
    missing: list[set[Leaf]]
    """For each bucket, the gradients that this rank does not have yet."""
    streams: list[StreamSet]
    """For each bucket, where its gradients were computed."""


class PlannedBackprop:
    """The part of PartialBackprop that exists only with a plan: forward passes, gradients and exchanges.

    A forward pass arms it; the first gradient that comes back begins the exchange; buckets leave as they become ready;
    the end of the backward pass waits for all of them, and all ranks then draw the same conclusions for the next step.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: DepthPlan,
        options: BackpropOptions,
        courier: Courier,
        merged: Mapping[str, int],
    ) -> None:
        """All ranks come here with the same plan. `merged`: the merge planner's bucket of each parameter, by name."""
        self.plan, self._module, self._courier, self._merged = plan, module, courier, merged
        self._segments = Segments(module, plan)
        self.schedule = schedule(
            plan,
            guard=options.guard,
            stragglers=options.stragglers,
            rotate=options.rotate == "depth",
            steps=options.steps,
            speak=courier.rank == 0,
        )
        self._use = UseCheck(module, self._segments, courier, uneven_use=options.uneven_use)
        self._metric = OptimiserMetric([leaf.parameter for leaf in self._segments.leaves])
        self._set_buckets(self._segments.leaves)
        self._backward = Backward(self._on_backward_end)
        self._pass, self._work = _ForwardPass(), _RankWork()
        self._exchange: _StepExchange | None = None
        self._fault = ""
        """The first thing that went wrong in a backward pass; the end of its exchange raises it."""
        self._seconds_per_sample = 0.0  # of the step before
        self._stamp = 0.0  # time up to which this rank's work is accounted for
        self.state = next_state(BackpropState.AWAITING_PLAN, BackpropEvent.PLANNED)
        self.begin_at(0)
        self._register_hooks()

    def begin_at(self, step: int) -> None:
        """Sets the step that comes next."""
        self.step = step
        """Synchronised steps so far."""
        self.depths = self._previous = self.schedule.at(step)
        """How deep each worker goes in the step that is running or comes next, in segments."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, sync: bool) -> Any:
        """Runs the model with this rank's first segments out of autograd. `sync`: not inside `no_sync`."""
        after = self._after_forward(sync)
        depth, segments = self.depths[self._courier.rank], self._segments
        self._use.before_forward()
        self._backward.forget()
        if segments.thrown_away():
            self._work = _RankWork()
        start = time.perf_counter()
        segments.freeze(depth)
        try:
            with segments.aliases():
                output = self._module(*args, **kwargs)
        except BaseException as e:
            segments.thaw()
            self._courier.tell_failure(self.step, wait=isinstance(e, Exception))
            if depth == segments.count or isinstance(e, Error) or not isinstance(e, Exception):
                raise
            first = self.plan.layers[self.plan.segments[segments.count - depth].start]
            where = f"rank {self._courier.rank} at depth {depth} of {segments.count}"
            raise Error(f"{where}: the model cannot be cut before layer {first!r}: {typed_line(e)}") from e
        hooked = self._backward.expect(output)
        self._stamp = time.perf_counter()
        self._pass = _ForwardPass(_samples(args, kwargs), self._stamp - start, opaque=not hooked)
        self.state = after
        return output

    def _after_forward(self, sync: bool) -> BackpropState:
        event = BackpropEvent.FORWARD if sync else BackpropEvent.LOCAL_FORWARD
        try:
            return next_state(self.state, event)
        except Error as e:
            if self._exchange is not None:
                self._courier.abandon(self._exchange.delivery)
            self.state = next_state(self.state, BackpropEvent.FAILED)
            self._segments.thaw()  # the module is the user's again
            raise Error(f"step {self.step}: {e}") from None

    def _on_gradient(self, leaf: Leaf) -> None:
        before, self.state = self.state, next_state(self.state, BackpropEvent.GRADIENT)
        if before is BackpropState.UNSURE:
            raise self._told(leaf.gradient_inside(), next_step=self.step)
        if self.state not in (BackpropState.EXCHANGING, BackpropState.ACCUMULATING):
            return  # no forward pass of this object waits for it
        if self._backward.inside():
            self._note(leaf.gradient_inside())
        if before in (BackpropState.ARMED, BackpropState.LOCAL):
            # Only now: a forward pass without a backward pass does not count.
            self._work.samples += self._pass.samples
            self._work.seconds += self._pass.seconds
        if before is BackpropState.ARMED:
            self._begin_exchange()
        if self.state is BackpropState.ACCUMULATING:
            self._segments.hold(leaf)
        self._work.leaves.add(leaf)
        bucket = self._bucket_of.get(leaf)
        if bucket is None:
            self._note(
                f"parameter {leaf.name!r} got its first gradient, after it had none in the first step on any rank: "
                "pass uneven_use=True"
            )
        elif self._exchange is not None:
            self._exchange.streams[bucket].add_current()
            self._exchange.missing[bucket].discard(leaf)
            if not self._exchange.missing[bucket]:
                self._exchange.streams[bucket].join()
                self._courier.have(self._exchange.delivery, bucket)

    def _on_backward_end(self) -> None:
        before, self.state = self.state, next_state(self.state, BackpropEvent.BACKWARD_ENDED)
        if before not in (BackpropState.ACCUMULATING, BackpropState.EXCHANGING):
            return
        now = time.perf_counter()
        self._work.seconds += now - self._stamp
        self._stamp = now
        try:
            if before is BackpropState.EXCHANGING:
                self._end_exchange()
        finally:
            self._segments.thaw()

    def _begin_exchange(self) -> None:
        """At the first gradient of a synchronised backward pass: every rank comes here, at every such pass."""
        monitor = self.schedule.monitor
        measured = monitor is not None and monitor.due(self.step)
        known = measured and self._metric.known([leaf for bucket in self._buckets for leaf in bucket.leaves])
        report = RankReport(
            self.step, float(self._work.samples), self._seconds_per_sample, known, self._metric.learning_rate
        )
        delivery = Delivery(report, self.depths, self._segments.count, self._buckets, self._work.leaves)
        delivery.metric = self._metric if measured else None
        delivery.buffers = self._use.moving_buffers
        missing = [set(bucket.leaves) for bucket in self._buckets]
        streams = [StreamSet(bucket.flat.device) for bucket in self._buckets]
        self._exchange = _StepExchange(delivery, missing, streams)
        self._courier.begin(delivery)

    def _end_exchange(self) -> None:
        assert self._exchange is not None
        delivery = self._exchange.delivery
        try:
            self._courier.finish(delivery)
            if self._use.due(self.depths):
                self._use.check(self.depths, self._work.leaves, self._fault and f"step {self.step}: {self._fault}")
                if len(self._use.used_leaves) < len(self._bucket_of):
                    self._set_buckets(self._use.used_leaves)
            elif self._fault:
                raise self._told(self._fault, next_step=self.step + 1)
            self._segments.join_aliases()
            self._conclude(delivery)
        except BaseException:
            self.state = next_state(self.state, BackpropEvent.FAILED)
            raise
        self._exchange = None
        ended = BackpropEvent.DELIVERED_UNSURE if self._pass.opaque else BackpropEvent.DELIVERED
        self.state = next_state(self.state, ended)

    def _conclude(self, delivery: Delivery) -> None:
        """What the step means for the next ones. All ranks have the same reports and come to the same depths."""
        monitor, pace = self.schedule.monitor, self.schedule.pace
        if monitor is not None:
            monitor.follow(delivery.reports[0].rate)
        if monitor is not None and delivery.metric is not None:
            monitor.take(delivery.measurement(), self.schedule.order(self.step), self.schedule.least(self.step))
        if pace is not None and self.step:
            for line in pace.update([report.seconds for report in delivery.reports], self._previous):
                if self._courier.rank == 0:
                    log.info("step %d: %s", self.step, line)
        self._previous = self.depths
        self.step += 1
        self.depths = self.schedule.at(self.step)
        # By the sample, because workers may have different batches.
        self._seconds_per_sample = self._work.seconds / max(self._work.samples, 1)
        self._work = _RankWork()

    def _note(self, fault: str) -> None:
        self._fault = self._fault or fault

    def _told(self, fault: str, *, next_step: int) -> Error:
        """The error of a fault that only this rank may have. The others have all gradients of this step; they are told
        of the failure when they begin `next_step`.
        """
        self._courier.tell_failure(next_step)
        return Error(f"step {self.step}: {self._fault or fault}")

    def _set_buckets(self, leaves: Sequence[Leaf]) -> None:
        """Gradients of these leaves travel; those that no rank uses need not."""
        self._buckets = segment_buckets(leaves, self._merged)
        hold_for(self._courier.stream, [bucket.flat for bucket in self._buckets])
        self._bucket_of = {leaf: b for b, bucket in enumerate(self._buckets) for leaf in bucket.leaves}

    def _register_hooks(self) -> None:
        """Hooks hold this object weakly, so that a module that the user drops is freed."""
        us = weakref.ref(self)

        def gradient_hook(index: int) -> Callable[[torch.Tensor], None]:
            def ready(_: torch.Tensor) -> None:
                if (me := us()) is not None:
                    me._on_gradient(me._segments.leaves[index])

            return ready

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (me := us()) is not None:
                me._metric.seen(optimizer)

        for index, leaf in enumerate(self._segments.leaves):
            leaf.tensor.register_post_accumulate_grad_hook(gradient_hook(index))
        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)


def _samples(args: Any, kwargs: Any) -> int:
    """The first dimension of the first tensor."""
    return next((len(t) for t in tensors_in((args, kwargs)) if t.dim()), 1)

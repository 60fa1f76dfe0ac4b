"""Watches the iterations of a DDP module from outside: when forward ran, when each gradient was ready and reduced.

An iteration here is a forward pass followed by a backward pass that synchronises gradients. Which passes count is
torch's rule: a forward pass with gradients and outside `no_sync` arms the reducer, the next backward pass reduces and
disarms it. So evaluation in between, perhaps on one rank only, and further backward passes do not count. At the end of
an iteration every rank is at the same point of the same program: inside `backward()`, after the reducer has finished
and before any code of the user's. What all ranks must do together (measure the network, agree on a plan) is done there,
so it can never cross a collective of the user's.
"""

from __future__ import annotations

import contextlib
import heapq
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.hooks import RemovableHandle

from dovetail.measure.clock import Clock
from dovetail.measure.passes import tensors_in
from dovetail.train.rank_times import RankIteration, rank_iteration
from dovetail.train.recording import SpanRecorder

from . import reducer
from .layer_watch import LayerWatch

SETTLE = 2
"""Iterations until torch has put the buckets of a new reducer into gradient-ready order."""

NOT_RUNNING = -1
"""torch's number of the current backward pass while none runs."""


class Backward:
    """Finds the end of the backward pass that the user began, from hooks that run somewhere in it.

    Reentrant checkpointing runs further passes inside that one, and torch calls what is queued in such a pass at that
    pass's end, not at the end of the outer one. The model's outputs get their gradients in the outer pass, before any
    parameter gets one from them: hooks on the outputs therefore know which pass is the outer one.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """`at_end` is a method, held weakly: its owner can be collected while the user still holds an output."""
        self._at_end = weakref.WeakMethod(at_end)
        self._pass = NOT_RUNNING

    def forget(self) -> None:
        """Before forward: a backward pass that raised must not be taken for one that runs."""
        self._pass = NOT_RUNNING

    def expect(self, output: Any) -> bool:
        """Called after forward. False if no output can be hooked: then the first gradient's pass is the outer one."""
        held = weakref.ref(self)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def begun(_: torch.Tensor) -> None:
            if (backward := held()) is not None:
                backward.inside()

        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in outputs:
            tensor.register_hook(begun)
        return bool(outputs)

    def inside(self) -> bool:
        """Called while backward runs. True in a pass that runs inside the user's."""
        now = torch._C._current_graph_task_id()
        if self._pass == NOT_RUNNING:
            self._pass = now
            at_end_of_backward(self._end)
        return now != self._pass

    def _end(self) -> None:
        self._pass = NOT_RUNNING
        if (at_end := self._at_end()) is not None:
            at_end()


@dataclass(frozen=True)
class ObservedIteration:
    """One synchronised iteration as this rank saw it; times in seconds."""

    forward: float
    """Duration of the forward pass, without its waits for parameters."""
    total: float
    """From the start of forward until all gradients were reduced, or an optimiser of dovetail's was through."""
    period: float
    """What one iteration takes: `total`, or with an optimiser of dovetail's from the end of one step to the next."""
    ready: tuple[tuple[int, float], ...]
    """(parameter, seconds after the end of forward), in the order in which gradients became ready; on request only."""
    used: dict[int, float] = field(default_factory=dict)
    """Seconds from the start of forward to the first use of each parameter, where that was looked at."""
    update: float = 0.0
    """Duration of the optimiser, where that was looked at."""
    alone: RankIteration | None = None
    """Where this rank's own time went, without waiting for others; on request only."""


class Observer:
    """Calls `on_iteration` at the end of every synchronised iteration, on every rank, until closed."""

    def __init__(
        self, ddp: TorchDDP, parameters: list[nn.Parameter], on_iteration: Callable[[ObservedIteration], None]
    ) -> None:
        self._ddp, self._parameters, self._on_iteration = ddp, parameters, on_iteration
        self._clock = Clock(parameters[0].device)
        self._handles: list[RemovableHandle] = []
        self._armed = self._queued = False
        self._backward = Backward(self._outer_ended)
        self._output_hook = ddp.register_forward_hook(_Outputs(self._backward))
        self._start: Any = None
        self._forward_end: Any = None
        self._ready: list[tuple[int, Any]] = []
        self._timed = False
        self._layers = LayerWatch(ddp.module, parameters, self._clock)
        self._previous = self._computed = self._clock.stamp()
        self.watch(every_gradient=False)

    def watch(self, *, every_gradient: bool) -> None:
        """Chooses between stamping every gradient and just noticing that backward runs.

        Noticing needs hooks on all parameters too: no single one is sure to get a gradient in every iteration on every
        rank.
        """
        self._unhook()
        self._timed = every_gradient
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))
        if every_gradient:
            self._layers.open(handing=True)
        else:
            self._layers.close()

    def before_forward(self) -> None:
        self._queued = False  # a backward pass that raised must not silence the next
        self._backward.forget()
        if self._arms():
            self._start = self._clock.stamp()

    def after_forward(self) -> None:
        if self._arms():
            self._forward_end = self._clock.stamp()
            self._ready.clear()
            self._armed = True

    def close(self) -> None:
        self._unhook()
        self._layers.close()
        self._output_hook.remove()
        self._armed = self._queued = False

    def _arms(self) -> bool:
        return torch.is_grad_enabled() and bool(self._ddp.require_backward_grad_sync)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # torch's reducer holds the parameters where Python's collector cannot see. A hook that held this observer, and
        # through it the module, would keep both for ever if the user drops the module before planning ends.
        # Who compiles a whole step, backward and all, does not mean this one's frames.
        held = weakref.ref(self)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def gradient_ready(_: torch.Tensor) -> None:
            if (observer := held()) is not None:
                observer._on_gradient(index)

        return gradient_ready  # type: ignore[no-any-return]

    def _on_gradient(self, index: int) -> None:
        if not self._armed:
            return
        if self._timed:
            self._ready.append((index, self._clock.stamp()))
        self._queued = True
        self._backward.inside()

    def _outer_ended(self) -> None:
        # The reducer queues its own callback when the last bucket is ready; with a static graph it does so from within
        # another callback. A callback that queues another one runs behind all that were queued before: twice is enough.
        self._computed = self._clock.stamp()  # the reducer's callback, which waits for collectives, comes later
        at_end_of_backward(lambda: at_end_of_backward(self._end))

    def _end(self) -> None:
        if not self._queued:  # no parameter got a gradient, or in the meantime closed or in a new forward pass
            return
        self._queued = self._armed = False
        stop = self._clock.stamp()
        seconds = self._clock.seconds([self._start, self._forward_end, stop, *(s for _, s in self._ready)])
        start, forward_end, end, *ready = seconds
        self._on_iteration(
            ObservedIteration(
                forward=forward_end - start,
                total=end - start,
                period=end - start,
                ready=tuple((i, t - forward_end) for (i, _), t in zip(self._ready, ready, strict=True)),
                alone=self._alone(stop) if self._timed else None,
            )
        )
        self._previous = self._clock.stamp()  # planning is not part of the next iteration

    def _alone(self, stop: Any) -> RankIteration:
        stamps = [self._previous, self._start, self._forward_end, self._computed, stop, *(s for _, s in self._ready)]
        previous, began, forwarded, computed, ended, *ready = self._clock.seconds(stamps)
        visits, marks = self._layers.taken(self._previous)
        layers = (self._layers.layers[i] for i, _ in self._ready)
        marks += [("ready", layer, t) for layer, t in zip(layers, ready, strict=True)]
        return rank_iteration(
            visits, marks, previous=previous, began=began, forwarded=forwarded, computed=computed, ended=ended
        )

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Outputs:
    """A forward hook that passes the module's outputs on. In a copy or a pickle of the module it does nothing."""

    def __init__(self, backward: Backward | None = None) -> None:
        self._backward = weakref.ref(backward) if backward is not None else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._backward is not None and (backward := self._backward()) is not None:
            backward.expect(output)

    def __reduce__(self) -> tuple[type[_Outputs], tuple[()]]:
        return _Outputs, ()


class BucketRecorder(SpanRecorder):
    """Records a DDP module: takes the times of buckets in a hook that reduces just as torch does without one."""

    def __init__(self, ddp: TorchDDP) -> None:
        parameters = [p for _, p in reducer.reduced(ddp)]
        super().__init__(type(ddp.module).__name__, dist.get_rank(ddp.process_group), Clock(parameters[0].device))
        self._ddp, self._world = ddp, dist.get_world_size(ddp.process_group)
        self._observer = Observer(ddp, parameters, self._on_iteration)
        self._at_once = _at_once(ddp.process_group, parameters[0].device)
        self._start: Any = None
        self._forward_end: Any = None
        self._sent: list[tuple[int, Any]] = []
        self._done: dict[int, Any] = {}
        self._iterations = 0
        reducer.replace(ddp, reducer.current(ddp), call=self._reduce)

    def before_forward(self) -> None:
        self._start = self.clock.stamp()
        self._observer.before_forward()

    def after_forward(self) -> None:
        self._observer.after_forward()
        self._forward_end = self.clock.stamp()
        self._sent, self._done = [], {}

    def close(self) -> None:
        """Gives the module a reducer without the hook."""
        self._observer.close()
        reducer.replace(self._ddp, reducer.current(self._ddp))

    def _reduce(self, _: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        done, number, buffer, clock = self._done, len(self._sent), bucket.buffer(), self.clock
        self._sent.append((buffer.numel() * buffer.element_size(), clock.stamp()))
        work = dist.all_reduce(buffer.mul_(1.0 / self._world), group=self._ddp.process_group, async_op=True)

        def stamp(future: torch.futures.Future[Any]) -> torch.Tensor:
            done[number] = clock.stamp()
            value: list[torch.Tensor] | torch.Tensor = future.value()
            return value[0] if isinstance(value, list) else value

        return work.get_future().then(stamp)  # type: ignore[no-any-return]

    def _on_iteration(self, _: ObservedIteration) -> None:
        self._iterations += 1
        if self._iterations <= SETTLE or not self._sent:
            return
        # A bucket whose future nobody has called back counts as done when it was sent.
        ended = [self._done.get(number, sent) for number, (_, sent) in enumerate(self._sent)]
        times = iter(self.clock.times([self._start, self._forward_end, *(t for _, t in self._sent), *ended]))
        start, at = next(times), next(times)
        sent_at = [next(times) for _ in self._sent]
        self.add("forward", "forward", start, at)
        free = [0.0] * self._at_once
        for number, (sent, done) in enumerate(zip(sent_at, times, strict=True)):
            nbytes, _ = self._sent[number]
            self.add(f"backward to bucket {number}", "backward", at, sent)
            # A bucket waits until one of those before it is done; its span begins then.
            begin = min(max(sent, heapq.heappop(free)), done)
            heapq.heappush(free, done)
            self.add(f"bucket {number}", "communication", begin, done, nbytes)
            at = sent


def _at_once(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many all-reduces of a group run at a time: gloo has several threads, two by default."""
    with contextlib.suppress(AttributeError, RuntimeError):
        options: Any = group._get_backend(torch.device(device.type)).options
        return int(options._threads)  # none but gloo's have any
    return 1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    # FSDP2 and DDP's Python side wait for the end of backward in the same way; torch has no public name for it.
    torch.autograd.Variable._execution_engine.queue_callback(callback)

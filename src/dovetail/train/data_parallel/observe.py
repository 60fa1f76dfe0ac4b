"""Watches the steps of a DDP module from outside: when forward ran, when each gradient was ready, when all were sent.

A step here is a forward pass followed by a backward pass that synchronises gradients. Which one does is torch's rule:
a forward pass with gradients and outside `no_sync` arms the reducer, the next backward pass reduces and disarms it. So
evaluation in between, on one rank only perhaps, and further backward passes do not count. The end of a step is a place
where every rank stands at the same point of the same program: inside `backward()`, after the reducer has finished and
before any code of the user's. What all ranks must do together (measure the network, agree on a plan) is done there, so
it can never cross a collective of the user's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.hooks import RemovableHandle

from dovetail.measure.clock import Clock
from dovetail.measure.passes import tensors_in

NOT_RUNNING = -1
"""What torch's number of the present backward pass is outside of any."""


class Backward:
    """Finds the end of the backward pass that the user began, from hooks that run somewhere in it.

    Reentrant checkpointing runs further passes inside that one, and torch calls what is queued in such a pass at its
    end, not at the end of the whole. The model's outputs get their gradients in the outer pass, before any parameter
    gets one from them: hooks there know which pass is the outer one.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """`at_end` is a method, held weakly: whoever is dropped while the user holds an output goes."""
        self._at_end = weakref.WeakMethod(at_end)
        self._pass = NOT_RUNNING

    def forget(self) -> None:
        """Before forward: a backward pass that raised must not be taken for one that runs."""
        self._pass = NOT_RUNNING

    def expect(self, output: Any) -> bool:
        """After forward. False where the output has no tensors to hook: then the first gradient's pass is the outer."""
        us = weakref.ref(self)

        def begun(_: torch.Tensor) -> None:
            if (me := us()) is not None:
                me.inside()

        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in outputs:
            tensor.register_hook(begun)
        return bool(outputs)

    def inside(self) -> bool:
        """Called while backward runs: whether in a pass inside the user's."""
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
class Step:
    """One synchronised step, in seconds."""

    forward: float
    """How long forward took."""
    total: float
    """From the start of forward until all gradients were reduced."""
    ready: tuple[tuple[int, float], ...]
    """(parameter, seconds after the end of forward), in the order in which gradients became ready; on request only."""


class Observer:
    """Calls `on_step` at the end of every synchronised step, on every rank, until closed."""

    def __init__(self, ddp: TorchDDP, parameters: list[nn.Parameter], on_step: Callable[[Step], None]) -> None:
        self._ddp, self._parameters, self._on_step = ddp, parameters, on_step
        self._clock = Clock(parameters[0].device)
        self._handles: list[RemovableHandle] = []
        self._armed = self._queued = False
        self._backward = Backward(self._outer_ended)
        self._output_hook = ddp.register_forward_hook(_Outputs(self._backward))
        self._start: Any = None
        self._forward_end: Any = None
        self._ready: list[tuple[int, Any]] = []
        self._timed = False
        self.watch(every_gradient=False)

    def watch(self, *, every_gradient: bool) -> None:
        """Chooses between stamping every gradient and just noticing that backward runs.

        Noticing takes all parameters too: no single one is sure to get a gradient in every step on every rank.
        """
        self._unhook()
        self._timed = every_gradient
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))

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
        self._output_hook.remove()
        self._armed = self._queued = False

    def _arms(self) -> bool:
        return torch.is_grad_enabled() and bool(self._ddp.require_backward_grad_sync)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # torch's reducer holds the parameters where Python's collector cannot see: a hook that held us, and through us
        # the module, would keep both for ever when the user drops the module before planning ends.
        observer = weakref.ref(self)

        def gradient_ready(_: torch.Tensor) -> None:
            if (us := observer()) is not None:
                us._on_gradient(index)

        return gradient_ready

    def _on_gradient(self, index: int) -> None:
        if not self._armed:
            return
        if self._timed:
            self._ready.append((index, self._clock.stamp()))
        self._queued = True
        self._backward.inside()

    def _outer_ended(self) -> None:
        # The reducer queues its own callback when the last bucket is ready, with a static graph from within another
        # callback: each that queues a further one is behind those of the round before.
        at_end_of_backward(lambda: at_end_of_backward(self._end))

    def _end(self) -> None:
        if not self._queued:  # no parameter got a gradient, or closed, or a new forward began, in the meantime
            return
        self._queued = self._armed = False
        stop = self._clock.stamp()
        seconds = self._clock.seconds([self._start, self._forward_end, stop, *(s for _, s in self._ready)])
        start, forward_end, end, *ready = seconds
        step = Step(
            forward=forward_end - start,
            total=end - start,
            ready=tuple((i, t - forward_end) for (i, _), t in zip(self._ready, ready, strict=True)),
        )
        self._on_step(step)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Outputs:
    """A forward hook that knows of the module's outputs. A copy or a pickle of the module has one that does nothing."""

    def __init__(self, backward: Backward | None = None) -> None:
        self._backward = weakref.ref(backward) if backward is not None else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._backward is not None and (backward := self._backward()) is not None:
            backward.expect(output)

    def __reduce__(self) -> tuple[type[_Outputs], tuple[()]]:
        return _Outputs, ()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    # FSDP2 and DDP's Python side wait for the end of backward in the same way; torch has no public name for it.
    torch.autograd.Variable._execution_engine.queue_callback(callback)

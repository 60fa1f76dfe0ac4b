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
        if self._arms():
            self._start = self._clock.stamp()

    def after_forward(self) -> None:
        if self._arms():
            self._forward_end = self._clock.stamp()
            self._ready.clear()
            self._armed = True

    def close(self) -> None:
        self._unhook()
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
        if not self._queued:
            self._queued = True
            # The reducer queues its own callback when the last bucket is ready, so after this one: a callback that
            # queues another is behind it.
            _at_end_of_backward(lambda: _at_end_of_backward(self._end))

    def _end(self) -> None:
        if not self._queued:  # closed, or a new forward began, in the meantime
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


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    # FSDP2 and DDP's Python side wait for the end of backward in the same way; torch has no public name for it.
    torch.autograd.Variable._execution_engine.queue_callback(callback)

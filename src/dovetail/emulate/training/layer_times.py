"""Gives the layers of a model on the emulated accelerator the times of a profile, in forward and in backward.

The kernels still compute, on the processor; they do so inside the time that the profile gives to their layer. Forward:
a layer ends, in the order of its stream, not before its profiled time has passed since it began; what comes between two
layers belongs to the earlier one, and a layer inside another has its time inside that one's, as `dovetail profile`
measures them. Backward: a gradient is ready not before its profiled time since backward began. Time in which the stream
waits for another one, for parameters that are still on their way for instance, is not part of a layer's time.

A module is found by its name in the profile, a parameter too. Where the processor computes for longer than the profile
says, layers are late: `LayerTimes.stretch` tells by how much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.core.profile import Profile
from dovetail.emulate.accelerator import occupy
from dovetail.measure.passes import tensors_in

REMEMBERED = 64
"""Backward passes, the last ones, whose times are compared with the profile's."""


@dataclass(frozen=True)
class Coverage:
    """How much of a profile a model has."""

    layers: int
    """Layers of the profile that take time and are modules of the model."""
    of_layers: int
    """Layers of the profile that take time."""
    share: float
    """Share of the profile's forward time that they have."""
    absent: tuple[str, ...]
    """Layers of the profile that the model does not have."""
    unknown: tuple[str, ...]
    """Trained parameters of the model that the profile does not have."""

    def mismatch(self) -> str:
        """What does not match, in one line; empty where everything does."""
        said = []
        if self.absent:
            said.append(
                f"{len(self.absent)} of the profile's {self.of_layers} layers are not in the model "
                f"({_some(self.absent)}), with {1 - self.share:.0%} of its forward time"
            )
        if self.unknown:
            said.append(f"{len(self.unknown)} of the model's parameters are not in the profile ({_some(self.unknown)})")
        return "; ".join(said)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


@dataclass
class _OpenLayer:
    """A layer whose kernels are being launched."""

    began: torch.Event
    seconds: float


class LayerTimes:
    """The times of a profile on one model. Its hooks stay for as long as the model lives."""

    def __init__(self, model: nn.Module, profile: Profile) -> None:
        self._profile, self._batch = profile, profile.batch
        self._device = next(model.parameters()).device
        self._inside: list[_OpenLayer] = []
        self._last: _OpenLayer | None = None
        """The layer that was left last, if it was in no other one."""
        self._calls: dict[str, int] = {}
        self._calls_before: dict[str, int] = {}
        self._backward: torch.Event | None = None
        """Begin of the backward pass that is going on."""
        self._come, self._paced = 0, 0
        """Gradients that have come in it, and those whose times the profile has."""
        self._passes: deque[tuple[torch.Event, torch.Event, float]] = deque(maxlen=REMEMBERED)
        modules = {_plain(name): module for name, module in model.named_modules()}
        modules.setdefault(type(model).__name__, model)
        parameters = {_plain(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.coverage = _coverage(profile, modules, parameters)
        self._hook(model, modules, parameters)

    def _hook(self, model: nn.Module, modules: dict[str, nn.Module], parameters: dict[str, nn.Parameter]) -> None:
        model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        for index, layer in enumerate(self._profile.layers):
            if layer.name in modules:
                enter, leave = self._layer_hooks(index)
                modules[layer.name].register_forward_pre_hook(enter)
                # Always left again: recomputing a checkpoint stops in the middle, with an exception.
                modules[layer.name].register_forward_hook(leave, always_call=True)
        model.register_forward_hook(self._end_pass, always_call=True)
        for index, tensor in enumerate(self._profile.tensors):
            if tensor.name in parameters:
                # Before the gradient is accumulated, so before anybody else's hook can send it.
                parameters[tensor.name].register_hook(self._gradient_hook(index))
                self._paced += 1

    def stretch(self) -> float | None:
        """Time that backward passes took over the profile's, 1 where it fits; None where none ran to its end.

        Waits for the device.
        """
        torch.accelerator.synchronize(self._device)
        taken = sum(began.elapsed_time(ended) for began, ended, _ in self._passes) / 1000
        planned = sum(seconds for _, _, seconds in self._passes)
        return taken / planned if planned else None

    def _now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device.index))
        return event

    def _begin_pass(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._backward is not None:
            return  # a checkpoint is computed again: that is a part of backward
        first = next((t for t in tensors_in((args, kwargs)) if t.dim()), None)
        self._batch = len(first) if first is not None and len(first) else self._profile.batch
        self._calls_before, self._calls = self._calls, {}
        self._inside.clear()
        self._last = None

    def _end_pass(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._backward is not None:
            return
        self._close_last()
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._begin_backward)

    def _layer_hooks(self, index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        layer = self._profile.layers[index]

        def enter(*_: Any) -> None:
            if self._backward is not None:
                return
            if not self._inside:
                self._close_last()
            self._calls[layer.name] = self._calls.get(layer.name, 0) + 1
            # The profile has the time of all calls in one pass; the pass before tells how many these are.
            seconds = layer.forward(self._batch) / self._calls_before.get(layer.name, 1)
            self._inside.append(_OpenLayer(self._now(), seconds))

        def leave(*_: Any) -> None:
            if self._backward is not None or not self._inside:
                return
            left = self._inside.pop()
            if self._inside:
                self._inside[-1].seconds += left.seconds
                self._hold(left)
            else:
                self._last = left

        return enter, leave

    def _close_last(self) -> None:
        if self._last is not None:
            self._hold(self._last)
            self._last = None

    def _hold(self, layer: _OpenLayer) -> None:
        occupy(layer.seconds, since=layer.began, device=self._device)

    def _begin_backward(self, _: Tensor) -> None:
        if self._backward is None:
            self._backward, self._come = self._now(), 0
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def hold(_: Tensor) -> None:
            if self._backward is not None:
                self._come += 1
                ready = self._profile.tensors[index].ready * self._backward_seconds() / self._profile.backward_time()
                occupy(ready, since=self._backward, device=self._device)

        return hold

    def _end_backward(self) -> None:
        began, self._backward = self._backward, None
        # A rank that goes back through the last layers only is done when the last of its gradients is ready.
        if began is not None and self._come >= self._paced > 0:
            seconds = self._backward_seconds()
            occupy(seconds, since=began, device=self._device)
            self._passes.append((began, self._now(), seconds))

    def _backward_seconds(self) -> float:
        return self._profile.backward_time(self._batch)


def _plain(name: str) -> str:
    """A module's or parameter's name without what torch.compile puts in front of it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _coverage(profile: Profile, modules: dict[str, nn.Module], parameters: dict[str, nn.Parameter]) -> Coverage:
    timed = [layer for layer in profile.layers if layer.forward(profile.batch) > 0]
    found = [layer for layer in timed if layer.name in modules]
    total = sum(layer.forward(profile.batch) for layer in timed)
    known = {tensor.name for tensor in profile.tensors}
    return Coverage(
        layers=len(found),
        of_layers=len(timed),
        share=sum(layer.forward(profile.batch) for layer in found) / total if total else 1.0,
        absent=tuple(layer.name for layer in timed if layer.name not in modules),
        unknown=tuple(name for name in parameters if name not in known),
    )

"""An emulated device: a model that takes a profile's time and yields a profile's gradients, with hardly any computing.

Real are the parameters (one for each of the profile's tensors, with its name, bytes and dtype), the gradients, and the
autograd hooks through which data parallelism sees them. Emulated is the time: the device waits until each layer's
forward pass would have ended and until each gradient would have been ready. Work that the processor does meanwhile,
such as copying gradients into buckets, happens inside these times, as it does beside a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dovetail.core.errors import Error
from dovetail.core.profile import ParameterTensor, Profile
from dovetail.core.timeline import Span

AHEAD = 0.002
"""Seconds by which the processor may run ahead of the emulated device in forward, as it does with a GPU's queue, so
that hooks which find nothing to wait for cost the device nothing."""


def emulated(profile: Profile, *, batch: int | None = None) -> EmulatedModel:
    """A model that behaves in time as `profile` says, at a local batch of `batch` (the profile's own if None).

    `named_parameters()` gives the profile's names by layer in forward order. `model(x)` calls the modules that own a
    layer's parameters in forward order, so that their hooks run, and returns a scalar whose `backward()` makes the
    gradients ready in the profile's order at the profile's times. The gradient of parameter p is mean(x)·p: real,
    different on every rank with a different x, and one pass over the tensor. The scalar's value is mean(x); it is
    there to start backward and is no loss of anything.
    """
    return EmulatedModel(profile, batch=batch)


class EmulatedModel(nn.Module):
    """See `emulated`. The times of the last iteration are in `forward_span`, `backward_span` and `ready_stamps`."""

    def __init__(self, profile: Profile, *, batch: int | None = None) -> None:
        super().__init__()
        batch = batch or profile.batch
        self.profile = profile
        self.batch = batch
        parameters = {t.name: _parameter(t, i, profile.name) for i, t in enumerate(profile.tensors)}
        self._ready = [
            EmulatedGradient(parameters[tensor.name], at)
            for tensor, at in zip(profile.tensors, profile.ready_times(batch), strict=True)
        ]
        owners: list[dict[str, nn.Module]] = [{} for _ in profile.layers]
        # By layer; within one, what is ready last was defined first.
        for _, tensor in sorted(enumerate(profile.tensors), key=lambda item: (item[1].layer, -item[0])):
            path, owner = _place(self, tensor.name, parameters[tensor.name])
            if owner is not self:
                owners[tensor.layer][path] = owner
        self.passes: list[tuple[tuple[nn.Module, ...], float]] = [
            (tuple(modules.values()), layer.forward(batch))
            for layer, modules in zip(profile.layers, owners, strict=True)
        ]
        """The modules of every layer in forward order, and the layer's seconds of forward."""
        self._backward_seconds = profile.backward_time(batch)
        self._free = 0.0
        self._scale = 0.0
        self._root = torch.zeros((), requires_grad=True)  # where the graph of backward ends; gets no gradient
        self.forward_span = (0.0, 0.0)
        self.backward_span = (0.0, 0.0)
        self.ready_stamps: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Runs the layers on the device's own clock, whose deadlines do not move when the processor is late.

        A module's hooks run before its layer. The time that they take, for instance to wait for the network, is the
        only thing that can delay the device: it starts the layer when it is free and the hooks have returned.
        """
        start = self._free = time.perf_counter()
        out = x.detach().to(torch.float64).mean().to(torch.float32)
        self._scale = float(out)
        training = torch.is_grad_enabled()
        chain = self._graph() if training else out
        for modules, seconds in self.passes:
            before = time.perf_counter()
            chain = self._enter(modules, x, chain)
            after = time.perf_counter()
            self._free = max(self._free, min(after, self._free + after - before)) + seconds
            sleep_until(self._free - AHEAD)
        sleep_until(self._free)
        self.forward_span = (start, time.perf_counter())
        return cast(Tensor, BackwardStart.apply(chain, out, self)) if training else out  # type: ignore[no-untyped-call]

    def _graph(self) -> Tensor:
        """The graph of one iteration without its start. Backward runs it from end to beginning: `BackwardStart`, each
        gradient as it is ready, and `BackwardEnd`."""
        chain = BackwardEnd.apply(self._root, self)  # type: ignore[no-untyped-call]
        for gradient in reversed(self._ready):
            chain = GradientReady.apply(chain, gradient.parameter, gradient, self)  # type: ignore[no-untyped-call]
        return cast(Tensor, chain)

    def _enter(self, modules: tuple[nn.Module, ...], x: Tensor, chain: Tensor) -> Tensor:
        """Calls the modules of a layer, so that their hooks run; returns the graph behind it, here as it is."""
        for module in modules:
            module(x)
        return chain

    def spans(self, *, track: str = "rank 0/compute", origin: float | None = None) -> tuple[Span, Span]:
        """Forward and backward of the last iteration as they really went, in seconds from `origin` (its start)."""
        zero = self.forward_span[0] if origin is None else origin
        (f0, f1), (b0, b1) = self.forward_span, self.backward_span
        return (
            Span(track=track, name="forward", kind="forward", start=f0 - zero, stop=f1 - zero),
            Span(track=track, name="backward", kind="backward", start=b0 - zero, stop=b1 - zero),
        )


class ParameterOwner(nn.Module):
    """A module that owns parameters; the model waits on its behalf."""

    graph: Callable[[Tensor], Tensor] | None = None
    """What the module adds to the graph, where the iteration passes through it (`layered`)."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.graph is None else self.graph(x)


class EmulatedGradient:
    """Hands out one parameter's gradient in a buffer of its own, which saves a fresh allocation at every iteration.

    The buffer is used again as soon as the parameter has given its gradient up: clone a gradient to keep it.
    """

    def __init__(self, parameter: nn.Parameter, ready: float) -> None:
        self.parameter = parameter
        self.ready = ready
        """Seconds from the start of backward."""
        self._buffer = torch.ones_like(
            parameter, requires_grad=False
        )  # touched now, so that no iteration pays for its pages

    def make(self, scale: float) -> Tensor:
        parameter, held = self.parameter.detach(), self.parameter.grad
        buffer = self._buffer
        if held is not None and held.data_ptr() == buffer.data_ptr():
            # The buffer still holds the gradient of an earlier iteration, to which this one is about to be added.
            buffer = self._buffer = torch.empty_like(parameter)
        torch.mul(parameter, scale, out=buffer)
        return buffer.view_as(parameter)  # a tensor of its own over the same memory, which autograd keeps uncopied


class BackwardEnd(torch.autograd.Function):
    """First in forward, so last in backward: waits for the end of backward."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, model: EmulatedModel) -> Tensor:
        ctx.model = model
        return root.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        model = ctx.model
        start = model.backward_span[0]
        sleep_until(start + model._backward_seconds)
        model.backward_span = (start, time.perf_counter())
        return None, None


class GradientReady(torch.autograd.Function):
    """In backward: computes one gradient, and hands it out when the profile says that it is ready.

    autograd accumulates a gradient, and so calls its hooks, before it goes on with the chain.
    """

    @staticmethod
    def forward(ctx: Any, chain: Tensor, parameter: Tensor, gradient: EmulatedGradient, model: EmulatedModel) -> Tensor:
        ctx.gradient, ctx.model = gradient, model
        return chain.view_as(chain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient, model = ctx.gradient, ctx.model
        made = gradient.make(model._scale * float(grad))
        sleep_until(model.backward_span[0] + gradient.ready)
        model.ready_stamps.append(time.perf_counter())
        return grad, made, None, None


class BackwardStart(torch.autograd.Function):
    """Last in forward, so first in backward: starts the clock, not before the device has ended forward."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, out: Tensor, model: EmulatedModel) -> Tensor:
        ctx.model = model
        return out.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        model = ctx.model
        start = max(model._free, time.perf_counter())
        model.backward_span, model.ready_stamps = (start, start), []
        return grad, None, None


def sleep_until(deadline: float) -> None:
    """Sleeps until a moment of time.perf_counter(). Never spins: the cores belong to the network's threads."""
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _parameter(tensor: ParameterTensor, index: int, profile: str) -> nn.Parameter:
    """A flat parameter of the tensor's bytes, filled with values between 0.5 and 1 that are the same on every rank."""
    dtype = getattr(torch, tensor.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise Error(
            f"profile {profile!r}: tensors[{index}].dtype: expected a floating-point dtype, got {tensor.dtype!r}"
        )
    if tensor.bytes % dtype.itemsize:
        raise Error(
            f"profile {profile!r}: tensors[{index}].bytes: expected a multiple of {dtype.itemsize} "
            f"for {tensor.dtype}, got {tensor.bytes}"
        )
    generator = torch.Generator().manual_seed(index)
    values = torch.rand(tensor.bytes // dtype.itemsize, generator=generator).mul_(0.5).add_(0.5)
    return nn.Parameter(values.to(dtype))


def _place(root: nn.Module, name: str, parameter: nn.Parameter) -> tuple[str, nn.Module]:
    """Puts a parameter where its dotted name says, making the modules on the way. Returns the path and the owner.

    Writes torch's own tables: `register_parameter` would refuse names such as "type", which modules of other
    frameworks do have.
    """
    *path, leaf = name.split(".")
    owner = root
    for part in path:
        if part in owner._parameters:
            raise Error(f"tensor {name!r}: {part!r} is a parameter already and cannot be a module too")
        owner = cast(nn.Module, owner._modules.setdefault(part, ParameterOwner()))
    if leaf in owner._modules:
        raise Error(f"tensor {name!r}: {leaf!r} is a module already and cannot be a parameter too")
    owner._parameters[leaf] = parameter
    return ".".join(path), owner

"""Emulated devices for burst jobs: layers that take a profile's time at whatever local batch they get.

Real are the parameters, the gradients and every tensor that crosses a border, with the profile's bytes; emulated is the
time: a layer waits until its forward or backward pass would have ended. The processor may be late by `AHEAD` without
the device noticing, as with a GPU's queue.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dovetail.core.errors import Error
from dovetail.core.profile import Layer, Profile

AHEAD = 0.002
"""Seconds."""


class Device:
    """One emulated device: does one thing after the other."""

    def __init__(self) -> None:
        self._free = 0.0

    def work(self, seconds: float) -> None:
        """Returns when the device has worked for so long, from now or from when it became free just before."""
        now = time.perf_counter()
        start = self._free if 0 <= now - self._free < AHEAD else max(now, self._free)
        self._free = start + seconds
        left = self._free - time.perf_counter()
        if left > 0:
            time.sleep(left)


class EmulatedLayer(nn.Module):
    """One layer of a profile that is a chain: rows of float32 in, rows of the profile's size out."""

    def __init__(self, layer: Layer, device: Device) -> None:
        super().__init__()
        self.layer, self.device = layer, device
        if layer.parameter_bytes:
            self.weight = nn.Parameter(torch.ones(max(1, layer.parameter_bytes // 4)))

    def forward(self, x: Tensor) -> Tensor:
        weight = getattr(self, "weight", None)
        return cast(Tensor, _Wait.apply(x, weight, self))  # type: ignore[no-untyped-call]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, layer: EmulatedLayer) -> Tensor:
        ctx.layer, ctx.shape, ctx.weight = layer, x.shape, weight
        out = x[:, :1].expand(-1, max(1, layer.layer.activation_bytes // 4)).contiguous()
        layer.device.work(layer.layer.forward(len(x)) if len(x) else 0.0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        layer = ctx.layer
        back = grad[:, :1].expand(ctx.shape).contiguous()
        own = None if ctx.weight is None else torch.full_like(ctx.weight, float(grad[:, 0].sum()))
        layer.device.work(layer.layer.backward(len(grad)) if len(grad) else 0.0)
        return back, own, None


def emulated_layers(profile: Profile) -> list[nn.Module]:
    """The profile's layers for `dovetail.Burst`, all on one emulated device of this rank. Chains only."""
    if profile.edges and set(profile.edges) != {(i, i + 1) for i in range(len(profile.layers) - 1)}:
        raise Error(f"profile {profile.name!r}: emulated burst layers need a chain, but its layers branch")
    device = Device()
    return [EmulatedLayer(layer, device) for layer in profile.layers]


def first_column(out: Tensor, labels: Tensor) -> Tensor:
    """Something to start backward with; no loss of anything."""
    return out[:, 0] * 1.0

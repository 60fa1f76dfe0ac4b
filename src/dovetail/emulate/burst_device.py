"""Emulated devices for burst jobs: layers that take a profile's time at whatever local batch they get.

Real are the parameters, the gradients and every tensor between layers, with the profile's bytes; emulated is the time:
a layer waits until its forward or backward pass would have ended. As with a GPU, whose host queues work ahead, a layer
begins when the one before it has ended on the device's own clock, even if the processor runs late. Only input from
other ranks can delay it: behind a re-sharding, and at the start of an iteration, it begins when that has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dovetail.core.errors import Error
from dovetail.core.profile import Layer, Profile


class EmulatedDevice:
    """One emulated device: works on one thing after the other."""

    def __init__(self) -> None:
        self.free = 0.0
        """When all work so far is done, in seconds of time.perf_counter()."""

    def work(self, seconds: float, *, arrived: bool) -> None:
        """Returns when the device has worked for so many seconds: from now if its input has just `arrived` from other
        ranks, else from when it became free."""
        if arrived:
            self.free = max(self.free, time.perf_counter())
        self.free += seconds
        left = self.free - time.perf_counter()
        if left > 0:
            time.sleep(left)


class EmulatedLayer(nn.Module):
    """One layer of a profile that is a chain: rows of float32 in, rows of the profile's size out."""

    def __init__(self, layer: Layer, device: EmulatedDevice, *, arrives: tuple[bool, bool]) -> None:
        super().__init__()
        self.layer, self.device, self.arrives = layer, device, arrives
        """`arrives`: whether its input comes from other ranks, forward and backward."""
        if layer.parameter_bytes:
            self.weight = nn.Parameter(torch.ones(max(1, layer.parameter_bytes // 4)))

    def forward(self, x: Tensor) -> Tensor:
        weight = getattr(self, "weight", None)
        return cast(Tensor, _EmulatedPass.apply(x, weight, self))  # type: ignore[no-untyped-call]


class _EmulatedPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, layer: EmulatedLayer) -> Tensor:
        ctx.layer, ctx.shape, ctx.weight = layer, x.shape, weight
        out = x[:, :1].expand(-1, max(1, layer.layer.activation_bytes // 4)).contiguous()
        layer.device.work(layer.layer.forward(len(x)) if len(x) else 0.0, arrived=layer.arrives[0])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        layer = ctx.layer
        back = grad[:, :1].expand(ctx.shape).contiguous()
        own = None if ctx.weight is None else torch.full_like(ctx.weight, float(grad[:, 0].sum()))
        layer.device.work(layer.layer.backward(len(grad)) if len(grad) else 0.0, arrived=layer.arrives[1])
        return back, own, None


def emulated_layers(profile: Profile, counts: Sequence[int]) -> list[nn.Module]:
    """The profile's layers for `dovetail.Burst` with these device counts, all on one emulated device of this rank.

    Chains only. The next layer's samples come from elsewhere where the count changes; so do the first layer's.
    """
    if profile.edges and set(profile.edges) != {(i, i + 1) for i in range(len(profile.layers) - 1)}:
        raise Error(f"profile {profile.name!r}: emulated burst layers need a chain, but its layers branch")
    assert len(counts) == len(profile.layers)
    device, last = EmulatedDevice(), len(counts) - 1
    return [
        EmulatedLayer(
            layer, device, arrives=(i == 0 or counts[i - 1] != counts[i], i < last and counts[i + 1] != counts[i])
        )
        for i, layer in enumerate(profile.layers)
    ]


def first_column(out: Tensor, labels: Tensor) -> Tensor:
    """A loss per sample that starts backward; its value means nothing."""
    return out[:, 0] * 1.0

"""A clock that stands still unless a model moves it, and layers that move it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dovetail.core import files
from dovetail.core.profile import Profile
from dovetail.measure import profile
from dovetail.measure.clock import Clock


class FakeClock(Clock):
    """Stands still unless a model moves it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0.0

    def stamp(self) -> float:
        return self.now


class Work(torch.autograd.Function):
    """The identity, except that it takes time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: FakeClock, forward: float, backward: float) -> torch.Tensor:
        ctx.clock, ctx.backward = clock, backward
        clock.now += forward
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.clock.now += ctx.backward
        return gradients[0], None, None, None


class Slow(nn.Module):
    """A layer with one weight that takes `forward` and `backward` seconds per sample."""

    def __init__(self, clock: FakeClock, forward: float, backward: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, (forward, backward)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = (seconds * len(x) for seconds in self.seconds)
        return Work.apply(x * self.weight, self.clock, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


def measured(model: nn.Module, batch: Any, *, clock: Clock | None = None, **options: Any) -> Profile:
    """A profile in few steps and no more, checked and stored and read on the way."""
    found = profile(model, batch, steps=options.pop("steps", 3), warmup=1, budget=0, clock=clock, **options)
    found.check()
    assert files.decode(files.encode(found), Profile) == found
    assert found.tensors[-1].ready <= sum(layer.backward(found.batch) for layer in found.layers) + 1e-12
    return found


def times(found: Profile, batch: int | None = None) -> dict[str, tuple[Any, Any]]:
    """Forward and backward of every layer, to be compared approximately."""
    at = batch or found.batch
    return {layer.name: (pytest.approx(layer.forward(at)), pytest.approx(layer.backward(at))) for layer in found.layers}

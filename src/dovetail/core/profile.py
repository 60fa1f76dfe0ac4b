"""Profile: a model's layers and gradients, with sizes and times."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import msgspec

from .files import Bytes, Count, Index, Name, Noun, Record, Seconds

Share = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
"""A part of something, or an addition to it: 0.05 is 5 %."""

Precision = Literal["full", "bf16", "int8"]
"""What the bytes on the wire are: "full" is the tensors' own dtype."""

NOISY = 0.1
"""Noise from which a measurement is doubtful: people are told."""
WORTHLESS = 0.5
"""Noise above which a measurement says nothing: commands refuse it."""


class Quantiles(Record, frozen=True, kw_only=True):
    """A measured quantity: its median, and the tenth and ninetieth percentile.

    Measurements that other processes disturbed are left out of all three, and of `samples`.
    """

    median: Seconds
    low: Seconds
    high: Seconds
    samples: Count

    def __post_init__(self) -> None:
        if not self.low <= self.median <= self.high:
            raise ValueError("expected low <= median <= high")

    def scaled(self, factor: float) -> Quantiles:
        return Quantiles(
            median=self.median * factor, low=self.low * factor, high=self.high * factor, samples=self.samples
        )


def exactly(seconds: float) -> Quantiles:
    """A time without spread: predicted, or measured once."""
    return Quantiles(median=seconds, low=seconds, high=seconds, samples=1)


class LayerTime(Record, frozen=True, kw_only=True):
    """A layer's time at one local batch size, in seconds."""

    batch: Count
    forward: Quantiles
    backward: Quantiles


class Layer(Record, frozen=True, kw_only=True):
    """A module that computes, in execution order. Work between two layers counts to the earlier one."""

    name: Name
    type: Name
    parameter_bytes: Bytes
    activation_bytes: Bytes
    """Bytes of the layer's output for one sample."""
    times: Annotated[tuple[LayerTime, ...], msgspec.Meta(min_length=1)]
    """In ascending order of batch."""

    def forward(self, batch: int) -> float:
        return _at(batch, [(t.batch, t.forward.median) for t in self.times])

    def backward(self, batch: int) -> float:
        return _at(batch, [(t.batch, t.backward.median) for t in self.times])


class ParameterTensor(Record, frozen=True, kw_only=True):
    """A parameter that gets a gradient."""

    name: Name
    layer: Index
    bytes: Bytes
    dtype: Name
    ready: Seconds
    """Seconds from the start of backward until its gradient is ready, at the profile's own batch."""


class Profile(Noun, frozen=True, kw_only=True):
    """Layers in execution order, tensors in gradient-ready order."""

    kind: ClassVar[str] = "profile"

    name: Name
    device: Name
    """What it was measured on, for people: "cpu, 2 threads"."""
    emulated: bool = False
    """True where the times were not measured on `device` itself but scaled or taken from elsewhere."""
    source: str = ""
    batch: Count
    """The local batch at which the ready times were measured."""
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(min_length=1)]
    tensors: Annotated[tuple[ParameterTensor, ...], msgspec.Meta(min_length=1)]
    edges: tuple[tuple[Index, Index], ...] = ()
    """The layer graph where it branches, as (from, to); empty for a chain."""
    noise: Share = 0.0
    """Relative error that repeated measurements leave in the time of a pass, at the worst of the batches."""
    lost: Share = 0.0
    """Share of the measuring time in which the model could not run, because other processes did."""

    def check(self) -> None:
        for i, layer in enumerate(self.layers):
            batches = [t.batch for t in layer.times]
            if batches != sorted(set(batches)):
                raise ValueError(f"layers[{i}].times: expected ascending batches, got {batches}")
        last = 0.0
        for i, tensor in enumerate(self.tensors):
            if tensor.layer >= len(self.layers):
                raise ValueError(f"tensors[{i}].layer: expected below {len(self.layers)}, got {tensor.layer}")
            if tensor.ready < last:
                raise ValueError(f"tensors[{i}].ready: expected ready times in ascending order, got {tensor.ready}")
            last = tensor.ready
        names = [t.name for t in self.tensors]
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"tensors: expected every name once, got {twice!r} twice")
        for i, edge in enumerate(self.edges):
            if max(edge) >= len(self.layers):
                raise ValueError(f"edges[{i}]: expected indices below {len(self.layers)}, got {list(edge)}")

    @property
    def parameter_bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)

    def forward_time(self, batch: int | None = None) -> float:
        return sum(layer.forward(batch or self.batch) for layer in self.layers)

    def backward_time(self, batch: int | None = None) -> float:
        """Seconds of backward; it does not end before the last gradient is ready."""
        here = max(sum(layer.backward(self.batch) for layer in self.layers), self.tensors[-1].ready)
        return here * self._backward_ratio(batch)

    def ready_times(self, batch: int | None = None) -> list[float]:
        """When each tensor's gradient is ready, in seconds from the start of backward; non-decreasing."""
        ratio = self._backward_ratio(batch)
        return [t.ready * ratio for t in self.tensors]

    def _backward_ratio(self, batch: int | None) -> float:
        if batch is None or batch == self.batch:
            return 1.0
        here = sum(layer.backward(self.batch) for layer in self.layers)
        return sum(layer.backward(batch) for layer in self.layers) / here if here else 1.0

    def scaled(self, *, forward: float, backward: float, name: str | None = None) -> Profile:
        """The same proportions with other totals, in seconds: for emulating a faster or slower device."""
        f, b = forward / self.forward_time(), backward / self.backward_time()
        return msgspec.structs.replace(
            self,
            name=name or self.name,
            emulated=True,
            layers=tuple(
                msgspec.structs.replace(
                    layer,
                    times=tuple(
                        LayerTime(batch=t.batch, forward=t.forward.scaled(f), backward=t.backward.scaled(b))
                        for t in layer.times
                    ),
                )
                for layer in self.layers
            ),
            tensors=tuple(msgspec.structs.replace(t, ready=t.ready * b) for t in self.tensors),
        )


def combined_noise(*noises: float) -> float:
    """Relative error of a prediction from inputs with these, such as a profile's and a network's noise."""
    return math.sqrt(sum(noise**2 for noise in noises))


def doubt(gain: float, *noises: float) -> str | None:
    """One line if a predicted gain (0.03 is 3 %) is not above the noise of the measurements behind it, else None."""
    noise = combined_noise(*noises)
    if gain <= 0 or gain > noise:
        return None
    return (
        f"predicted gain {gain:.1%} is within the noise of the measurements ({noise:.1%}): "
        "measure again on a quiet machine"
    ).replace("%", " %")


def _at(batch: int, points: list[tuple[int, float]]) -> float:
    """Linear between measured batches; beyond them along the nearest segment, never below zero."""
    if len(points) == 1:
        return points[0][1] * batch / points[0][0]
    upper = next((i for i, (b, _) in enumerate(points) if b >= batch), len(points) - 1)
    (b0, t0), (b1, t1) = points[max(upper, 1) - 1], points[max(upper, 1)]
    return max(0.0, t0 + (t1 - t0) * (batch - b0) / (b1 - b0))

"""What a burst plan costs: computing a layer, summing its gradients, moving samples between layers. In seconds.

A planner asks five questions of a cost model, with whole arrays, so that a thousand devices are asked at once:

    compute(layer, samples)          forward and backward of one rank that holds these samples
    forward(layer, samples)          the forward part of it; only the gaps of a plan depend on it
    sync(layer, devices)             the all-reduce of the layer's gradients over its devices; nothing of it is hidden
    reshard(layer, before, after)    moving the layer's output from `before` devices to `after`, and its gradient back
    memory(layer, samples)           bytes on a rank: parameters, gradients, optimiser state, output

`ProfileCost` answers from a measured profile and from links: constants (`Links`), a network measured among all ranks
(`NetworkLinks`), or links measured among each number of ranks (`MeasuredLinks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dovetail.core.batch_law import law
from dovetail.core.network import AffineCost, Collective, Cost, FloatArray, Network
from dovetail.core.profile import Profile

IntArray = npt.NDArray[np.int64]


class BurstCost(Protocol):
    """A model of one job at one global batch."""

    @property
    def batch(self) -> int:
        """The global batch."""

    def compute(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray: ...
    def forward(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray: ...
    def sync(self, layer: int, devices: npt.ArrayLike, /) -> FloatArray: ...
    def reshard(self, layer: int, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray: ...
    def memory(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray: ...


class LinkCosts(Protocol):
    """What sending gradients and samples costs, in seconds."""

    def all_reduce(self, nbytes: float, ranks: npt.ArrayLike, /) -> FloatArray: ...

    def reduction(self, ranks: int, /) -> Cost:
        """The cost of an all-reduce among `ranks` ranks, by its bytes."""

    def move(self, nbytes: npt.ArrayLike, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        """Samples go from ranks 0..before−1 to 0..after−1; the busiest rank sends or receives `nbytes` bytes."""

    def crowding(self, ranks: int, /) -> float:
        """How many times longer two all-reduces among `ranks` ranks take at once than one after the other."""

    @property
    def slowing(self) -> float:
        """Share by which computing takes longer while gradients are on their way; 0 where it was not measured."""


def local_batch(batch: int, devices: npt.ArrayLike) -> IntArray:
    """Samples on the fullest of g devices: ⌈B/g⌉."""
    return -(-batch // np.asarray(devices, dtype=np.int64))


def moved_samples(batch: int, before: npt.ArrayLike, after: npt.ArrayLike) -> IntArray:
    """Samples that the busiest rank sends or receives when ranks 0..h−1 hand their samples to ranks 0..g−1.

    With a = ⌈B/h⌉ samples before and b = ⌈B/g⌉ after, every rank that is in both keeps what it may. Growing (g > h), an
    old rank sends a − b and a new one receives b; shrinking, a leaving rank sends a and a staying one receives b − a.
    """
    h, g = np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64)
    a, b = local_batch(batch, h), local_batch(batch, g)
    return np.where(g > h, np.maximum(a - b, b), np.where(g < h, np.maximum(a, b - a), 0))


@dataclass(frozen=True)
class Links:
    """Links by constants; a ring carries the all-reduce. Defaults: NCCL on eight A100 as published with DeepPool."""

    sync_latency: float = 20e-6
    """Seconds per all-reduce, whatever the number of ranks."""
    sync_rate: float = 235e9
    """Bytes per second around the ring."""
    move_latency: float = 40e-6
    """Seconds per re-sharding and direction."""
    move_rate: float = 264e9
    """Bytes per second into or out of one rank."""

    def all_reduce(self, nbytes: float, ranks: npt.ArrayLike, /) -> FloatArray:
        n = np.asarray(ranks, dtype=np.float64)
        return np.where(n > 1, self.sync_latency + 2 * (n - 1) / n * nbytes / self.sync_rate, 0.0)

    def reduction(self, ranks: int, /) -> Cost:
        return AffineCost(self.sync_latency, 2 * (ranks - 1) / ranks / self.sync_rate)

    def move(self, nbytes: npt.ArrayLike, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        return self.move_latency + np.asarray(nbytes, dtype=np.float64) / self.move_rate

    def crowding(self, ranks: int, /) -> float:
        return 1.0

    @property
    def slowing(self) -> float:
        return 0.0


@dataclass(frozen=True)
class NetworkLinks:
    """A measured network or a preset; other numbers of ranks by its ring law.

    Moving samples among n ranks costs what an all-to-all does: (n−1) steps, and the bytes of the busiest rank at the
    rate of a wire. A network without a measured all-to-all lends its all-reduce, which goes around the ring twice.
    """

    network: Network

    def all_reduce(self, nbytes: float, ranks: npt.ArrayLike, /) -> FloatArray:
        n = np.asarray(ranks, dtype=np.int64)
        if isinstance(self.network.cost("all_reduce"), AffineCost):
            fit, own = self.network.affine("all_reduce"), self.network.ranks
            share = (n - 1) / np.maximum(n, 1) / ((own - 1) / own)
            return np.asarray(fit.latency * (n - 1) / (own - 1) + fit.seconds_per_byte * share * nbytes)
        each = {int(m): float(self.reduction(int(m))(nbytes)) for m in np.unique(n)}
        return np.array([each[int(m)] if m > 1 else 0.0 for m in n.ravel()]).reshape(n.shape)

    def reduction(self, ranks: int, /) -> Cost:
        return self.network.cost("all_reduce", ranks=ranks)

    def move(self, nbytes: npt.ArrayLike, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        (step, wire), ranks = self._step, np.maximum(before, after)
        return step * (np.asarray(ranks, dtype=np.float64) - 1) + wire * np.asarray(nbytes, dtype=np.float64)

    def crowding(self, ranks: int, /) -> float:
        return 1.0

    @property
    def slowing(self) -> float:
        return 0.0 if self.network.contention is None else self.network.contention.compute

    @cached_property
    def _step(self) -> tuple[float, float]:
        """Seconds per step of the ring, and per byte on the wire."""
        n = self.network.ranks
        if "all_to_all" in self.network.collectives:
            fit, rounds = self.network.affine("all_to_all"), 1
        else:
            fit, rounds = self.network.affine("all_reduce"), 2
        return fit.latency / (rounds * (n - 1)), fit.seconds_per_byte * n / (rounds * (n - 1))


@dataclass(frozen=True)
class MeasuredLinks:
    """Links measured where a burst job will run: all-reduce and re-sharding among each number of ranks.

    On a network whose ranks share processors, switches or links no law leads from all ranks to some of them, so both
    are measured for each number; `train.burst.measurement` does so from a running job. A number of ranks that was not
    measured follows the ring law from the widest, a re-sharding its nearest pair.
    """

    networks: Mapping[int, Network]
    """By number of ranks, the first ones of the job: what an all-reduce costs."""
    moves: Mapping[tuple[int, int], Collective]
    """By (ranks before, ranks after): what re-sharding costs, one way, by the bytes of the busiest rank."""
    crowded: Mapping[int, float] = field(default_factory=dict)
    """By number of ranks: how many times longer two all-reduces take at once than one after the other."""

    def all_reduce(self, nbytes: float, ranks: npt.ArrayLike, /) -> FloatArray:
        n = np.asarray(ranks, dtype=np.int64)
        each = [float(self.reduction(int(m))(nbytes)) if m > 1 else 0.0 for m in n.ravel()]
        return np.array(each).reshape(n.shape)

    def reduction(self, ranks: int, /) -> Cost:
        return NetworkLinks(self.networks.get(ranks) or self.networks[max(self.networks)]).reduction(ranks)

    def move(self, nbytes: npt.ArrayLike, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        amounts, h, g = np.broadcast_arrays(
            np.asarray(nbytes, dtype=np.float64), np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64)
        )
        each = [
            float(self._move(int(a), int(b))(amount)) if a != b else 0.0
            for amount, a, b in zip(amounts.ravel(), h.ravel(), g.ravel(), strict=True)
        ]
        return np.array(each).reshape(amounts.shape)

    def crowding(self, ranks: int, /) -> float:
        return self.crowded.get(ranks, 1.0)

    @property
    def slowing(self) -> float:
        return NetworkLinks(self.networks[max(self.networks)]).slowing

    def _move(self, before: int, after: int) -> Cost:
        """The cost of the nearest measured pair that goes the same way, shrinking or growing."""
        same = [p for p in self.moves if (p[0] < p[1]) == (before < after)]
        near = min(same, key=lambda p: (abs(p[0] - before) + abs(p[1] - after), p))
        return self.moves[near].cost()


@dataclass(frozen=True)
class ProfileCost:
    """A profile at a global batch.

    Layer times come from the profile's table, linear between measured local batches (`smooth`: from the law
    t0 + t1·b through them). A layer without parameters sums nothing. Memory counts a parameter, its gradient and
    `optimizer_copies` more of it (2: Adam; 1: momentum), and the layer's output for every local sample.
    """

    profile: Profile
    batch: int
    wires: LinkCosts = Links()
    smooth: bool = False
    optimizer_copies: int = 2

    def compute(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self._times(layer, samples, 0) + self._times(layer, samples, 1)

    def forward(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self._times(layer, samples, 0)

    def backward(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self._times(layer, samples, 1)

    def sync(self, layer: int, devices: npt.ArrayLike, /) -> FloatArray:
        nbytes = self.profile.layers[layer].parameter_bytes
        return self.wires.all_reduce(nbytes, devices) if nbytes else np.zeros(np.shape(devices))

    def reshard(self, layer: int, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        nbytes = moved_samples(self.batch, before, after) * self.profile.layers[layer].activation_bytes
        h, g = np.asarray(before), np.asarray(after)
        return np.where(h == g, 0.0, self.wires.move(nbytes, h, g) + self.wires.move(nbytes, g, h))

    def memory(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        found = self.profile.layers[layer]
        state = (2 + self.optimizer_copies) * found.parameter_bytes
        return state + found.activation_bytes * np.asarray(samples, dtype=np.float64)

    def _times(self, layer: int, samples: npt.ArrayLike, part: int) -> FloatArray:
        b = np.asarray(samples, dtype=np.float64)
        batches, seconds = self._tables[layer]
        if self.smooth:
            both = seconds.sum(axis=0)
            share = seconds[part].sum() / both.sum() if both.any() else 0.0
            fixed, per_sample = self._laws[layer]
            return np.asarray(share * (fixed + per_sample * b))
        t = seconds[part]
        if len(batches) == 1:
            return np.asarray(t[0] * b / batches[0])
        # Beyond the measured batches along the nearest segment, as the profile itself does it.
        at = np.clip(np.searchsorted(batches, b), 1, len(batches) - 1)
        slope = (t[at] - t[at - 1]) / (batches[at] - batches[at - 1])
        return np.asarray(np.maximum(0.0, t[at - 1] + slope * (b - batches[at - 1])))

    @cached_property
    def _tables(self) -> list[tuple[FloatArray, FloatArray]]:
        return [
            (
                np.array([t.batch for t in layer.times], dtype=np.float64),
                np.array([[t.forward.median for t in layer.times], [t.backward.median for t in layer.times]]),
            )
            for layer in self.profile.layers
        ]

    @cached_property
    def _laws(self) -> list[tuple[float, float]]:
        return [(found.fixed, found.per_sample) for found in map(law, self.profile.layers)]

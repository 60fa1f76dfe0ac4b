"""Lower bounds on burst plans, however well their gradients hide behind backward.

Rank 0 runs every layer and takes part in every all-reduce and every re-sharding, and gradients come after forward only.
With F and B what rank 0 computes forward and backward, R its re-sharding, and C what its link needs at least for
all-reduces, all in seconds:

    iteration ≥ R + F + max(B, C) ≥ R + F + (B + s·C) / (1 + s)      for every s ≥ 0

The right side is a sum over layers and edges, so its least value over all plans is found exactly by the planner itself,
which is asked about a job with those costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, Cost, FloatArray, TableCost

from .cost import ProfileCost
from .planner import BurstPlanner

WEIGHTS = (0.0, 0.5, 2.0, 8.0)
"""s: 0 counts computing only; the larger, the more the links count."""


def tightest(relaxed: Sequence[BurstPlan]) -> float:
    """Seconds that no plan of a planner beats, by its `relaxations`."""
    return max(plan.prediction.iteration for plan in relaxed)


def relaxations(planner: BurstPlanner) -> list[BurstPlan]:
    """The best relaxed plan for every s, with the bound as its iteration; good plans where links are the limit."""
    assert isinstance(planner.cost, ProfileCost), "all-reduces are bounded by the bytes of layers"
    relaxed = [replace(planner, cost=_Relaxed(planner.cost, s, planner.choices)) for s in WEIGHTS]
    return [job.fastest() for job in relaxed]


def fewest_seconds_per_byte(cost: Cost) -> float:
    """The least time per byte that a collective of any size takes; 0 where nothing is known of the cost."""
    if isinstance(cost, AffineCost):
        return cost.seconds_per_byte
    if not isinstance(cost, TableCost):
        return 0.0
    (x0, x1), (y0, y1) = cost.nbytes[-2:], cost.seconds[-2:]
    each = [t / n for n, t in zip(cost.nbytes, cost.seconds, strict=True) if n]
    return min([*each, max((y1 - y0) / (x1 - x0), 0.0)])


def least_seconds(cost: Cost, nbytes: int, *, buckets: int) -> float:
    """Lower bound on the seconds of `nbytes` bytes in at least `buckets` collectives, one after the other."""
    if isinstance(cost, AffineCost):
        return cost.latency * buckets + cost.seconds_per_byte * nbytes
    quickest = min(cost.seconds) if isinstance(cost, TableCost) else 0.0
    return max(buckets * quickest, fewest_seconds_per_byte(cost) * nbytes)


@dataclass(frozen=True)
class _Relaxed:
    """The costs above for one s.

    Where the batch does not divide, every rank may have one sample less than the fullest. Where layers branch,
    re-sharding is left out: the runtime moves what crosses a cut, and not what goes along an edge.
    """

    cost: ProfileCost
    weight: float
    choices: tuple[int, ...]

    @property
    def batch(self) -> int:
        return self.cost.batch

    @property
    def _even(self) -> bool:
        return all(self.batch % g == 0 for g in self.choices)

    def compute(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        def seconds(n: npt.ArrayLike) -> FloatArray:
            forward = self.cost.forward(layer, n)
            return forward + (self.cost.compute(layer, n) - forward) / (1 + self.weight)

        if self._even:
            return seconds(samples)
        return np.minimum(seconds(samples), seconds(np.maximum(1, np.asarray(samples) - 1)))

    def forward(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.cost.forward(layer, samples)

    def sync(self, layer: int, devices: npt.ArrayLike, /) -> FloatArray:
        nbytes, share = self.cost.profile.layers[layer].parameter_bytes, self.weight / (1 + self.weight)
        counts = np.asarray(devices)
        rates = [fewest_seconds_per_byte(self.cost.wires.reduction(int(g))) if g > 1 else 0.0 for g in counts.ravel()]
        return share * nbytes * np.array(rates).reshape(counts.shape)

    def reshard(self, layer: int, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        h, g = np.broadcast_arrays(np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64))
        if self.cost.profile.edges:
            return np.zeros(h.shape)
        few, many = np.minimum(h, g), np.maximum(h, g)
        # The busiest rank hands over its surplus, or all that it has if it is in the wider stage only.
        samples = np.maximum(self.batch // few + (-self.batch // many), self.batch // many)
        nbytes = samples * self.cost.profile.layers[layer].activation_bytes
        wires = self.cost.wires
        return np.where(h == g, 0.0, wires.move(nbytes, h, g) + wires.move(nbytes, g, h))

    def memory(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.cost.memory(layer, samples)


def least_work(planner: BurstPlanner, within: float = math.inf) -> float:
    """Lower bound on the device-seconds of plans of at most `within` seconds: computing and re-sharding alone."""
    assert isinstance(planner.cost, ProfileCost), "all-reduces are bounded by the bytes of layers"
    relaxed = replace(planner, cost=_Relaxed(planner.cost, 0.0, planner.choices))
    try:
        return relaxed.cheapest(iteration=None if within == math.inf else within).prediction.device_time
    except Error:
        return math.inf  # there is no plan

"""A partition that stays good when the measurements were a little off.

The optimum is flat but fragile: it cuts as finely as the measured latency and ready times just permit, and suffers when
latency is twice that. So the choice is made among many good partitions by their mean over perturbed scenarios.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.core.network import Cost, FloatArray
from dovetail.core.plan import MIB

from .exact import best_per_count, fewest, optimum
from .rules import accumulate_while_busy, by_size, ddp
from .stream import IntArray, Stream, bucket_bytes, latency, objective

Slower = Callable[[Cost, IntArray], FloatArray]
"""(cost, bytes of each bucket) → seconds of their collectives in every scenario (scenarios × buckets)."""

THRESHOLDS_MIB = (1, 2, 5, 10, 25, 50, 100)
_MOST_BUCKETS = 24
"""The best partition is examined for every count of buckets up to this; finer ones come from the other rules."""


def robust(
    stream: Stream,
    cost: Cost,
    *,
    scenarios: int = 40,
    seed: int = 0,
    tolerance: float = 0.005,
    ceiling: float = float("inf"),
) -> list[int]:
    """The partition with the best mean over perturbed scenarios; the same for the same seed.

    Candidates are the optimum, the fewest buckets within 1 % of it, the best for every bucket count, what accumulates
    while the channel is busy, size thresholds and torch's default; of those, the ones that end by `ceiling` without
    any perturbation (seconds from the start of backward; there must be one). Each scenario stretches every gap
    between two ready times by a log-normal factor (sigma 0.3), the latency by 0.5–2 and the time per byte by 0.7–1.4.
    A common stretch of all ready times would add nothing: it equals a stretch of both costs. Among candidates
    whose mean is within `tolerance` of the best, the one with the fewest buckets wins, because every bucket costs a
    little that no measurement of single collectives sees.
    """
    found = [c for c in candidates(stream, cost) if objective(stream, c, cost) <= ceiling]
    means = _mean_objectives(stream, cost, found, scenarios=scenarios, seed=seed)
    return fewest_buckets(found, means, tolerance)


def fewest_buckets(partitions: list[list[int]], means: FloatArray, tolerance: float) -> list[int]:
    """Of the partitions whose mean is within `tolerance` of the best, the one with the fewest buckets."""
    within = [i for i in range(len(partitions)) if means[i] <= means.min() * (1 + tolerance)]
    return partitions[min(within, key=lambda i: (len(partitions[i]), means[i]))]


def candidates(stream: Stream, cost: Cost) -> list[list[int]]:
    """Distinct partitions worth a look, the optimum first."""
    found = [
        optimum(stream, cost),
        fewest(stream, cost),
        *best_per_count(stream, cost, _MOST_BUCKETS).values(),
        accumulate_while_busy(stream, cost),
        *(by_size(stream, mib * MIB) for mib in THRESHOLDS_MIB),
        ddp(stream),
    ]
    return [list(cuts) for cuts in dict.fromkeys(map(tuple, found))]


def _mean_objectives(
    stream: Stream, cost: Cost, partitions: list[list[int]], *, scenarios: int, seed: int
) -> FloatArray:
    """Mean seconds until backward and communication are over, for every partition over the same scenarios."""
    ready, backward, slower = perturbed(stream, scenarios, np.random.default_rng(seed))
    means = np.empty(len(partitions))
    for p, cuts in enumerate(partitions):
        seconds = slower(cost, bucket_bytes(stream, cuts))
        free = np.full(scenarios, -np.inf)
        for bucket, stop in enumerate(cuts):
            free = np.maximum(free, ready[:, stop - 1]) + seconds[:, bucket]
        means[p] = np.maximum(free, backward).mean()
    return means


def perturbed(stream: Stream, scenarios: int, random: np.random.Generator) -> tuple[FloatArray, FloatArray, Slower]:
    """Perturbed ready times (scenarios × tensors), ends of backward, and what collectives take in each scenario."""
    gaps = np.diff(stream.ready_array, prepend=0.0) * random.lognormal(0.0, 0.3, (scenarios, len(stream)))
    ready = np.cumsum(gaps, axis=1)
    backward = ready[:, -1] + max(0.0, stream.backward - stream.ready[-1])
    latency_factor = np.exp(random.uniform(np.log(0.5), np.log(2.0), (scenarios, 1)))
    byte_factor = np.exp(random.uniform(np.log(0.7), np.log(1.4), (scenarios, 1)))

    def slower(cost: Cost, sizes: IntArray) -> FloatArray:
        # What an empty collective takes is latency, what exceeds it are bytes.
        seconds, floor = cost(sizes)[None, :], latency(cost)
        total: FloatArray = latency_factor * np.minimum(seconds, floor) + byte_factor * np.maximum(0.0, seconds - floor)
        return total

    return ready, backward, slower

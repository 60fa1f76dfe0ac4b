"""The best buckets where reduce-scatters hide behind backward and all-gathers behind the next forward.

Both phases have the same buckets (`cycle`), and each alone would be the merging problem of `exact`.
For a fixed last bucket [i, j) both finishes are non-decreasing in what the prefix i has reached:

    F_j = max(F_i, r_j) + S(P_j − P_i),    H_j = max(H_i, t_j) + G(P_j − P_i)

with r_j the ready time of tensor j, t_j the forward time from it to the end, S and G the times of a reduce-scatter and
an all-gather. A prefix that is no better in F and no better in H than another of the same length can be dropped. What
is left of each prefix is a front of labels (F, H), and the best partition grows out of these. Where shards are updated
bucket by bucket the end of the last update, E_j = max(E_i, F_j, backward) + U(P_j − P_i), is a third value of a label.

Two things keep fronts short and change no result: an F below the ready time of the next tensor is as good as that
time (likewise for H), and a label that cannot lead to a period within `limit` is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from dovetail.core.network import Cost, FloatArray
from dovetail.core.plan import MIB

from . import exact, rules
from .cycle import Cycle, period
from .robust import THRESHOLDS_MIB, fewest_buckets, perturbed
from .stream import IntArray, Stream, bucket_bytes, rows

_ROUNDING = 1e-12
_MOST_BUCKETS = 24
_WORTH_A_LOOK = 0.05
"""Partitions with a given count of buckets are sought up to this share above the optimum …"""
_CELL = 0.002
"""… and with this precision, as a share of the optimum for each bucket."""


def optimal(cycle: Cycle) -> list[int]:
    """The partition with the shortest period, for any costs (seconds, not negative)."""
    found = within(cycle, np.inf)
    assert found is not None, "the simple partitions are within their own limit"
    return found


def within(cycle: Cycle, limit: float) -> list[int] | None:
    """The partition with the shortest period if that is within `limit` seconds; a lower limit is faster to answer."""
    limit = min(limit, *(period(cycle, cuts) for cuts in _simple(cycle)))
    fronts = extended(cycle, CompletionBounds.of(cycle, limit), None)
    return walk(cycle, [fronts], 0) if len(fronts[-1]) else None


def fewest(cycle: Cycle, *, tolerance: float = 0.01, best: list[int] | None = None) -> list[int]:
    """The fewest buckets whose period is within `tolerance` of the optimum; of all with that many, the shortest."""
    best = optimal(cycle) if best is None else best
    bounds = CompletionBounds.of(cycle, period(cycle, best) * (1 + tolerance))
    layers = [_nothing(cycle)]
    for count in range(1, len(best)):
        layers.append(extended(cycle, bounds, layers[-1]))
        if len(layers[-1][-1]):
            return walk(cycle, layers, count)
    return best  # no partition of any count is shorter


def best_per_count(cycle: Cycle, most: int, *, limit: float, cell: float = 0.0) -> dict[int, list[int]]:
    """For every number of buckets up to `most`: the shortest period, where one is within `limit` seconds.

    With a `cell` (seconds) above 0, labels that are that near to each other count as one: at most twice `cell` is lost
    for each bucket, and fronts stay short whatever the costs.
    """
    bounds, layers, found = CompletionBounds.of(cycle, limit), [_nothing(cycle)], {}
    for count in range(1, min(most, len(cycle)) + 1):
        layers.append(extended(cycle, bounds, layers[-1], cell=cell))
        if len(layers[-1][-1]):
            found[count] = walk(cycle, layers, count)
    return found


def candidates(cycle: Cycle) -> list[list[int]]:
    """Distinct good partitions, the optimum first."""
    best = optimal(cycle)
    shortest = period(cycle, best)
    # The precision only limits what is found: the choice among these is made by their exact periods.
    most, limit, cell = min(_MOST_BUCKETS, 2 * len(best)), shortest * (1 + _WORTH_A_LOOK), shortest * _CELL
    found = [
        best,
        fewest(cycle, best=best),
        *best_per_count(cycle, most, limit=limit, cell=cell).values(),
        *_simple(cycle),
    ]
    return [list(cuts) for cuts in dict.fromkeys(map(tuple, found))]


def robust(
    cycle: Cycle, *, scenarios: int = 40, seed: int = 0, tolerance: float = 0.005, ceiling: float = float("inf")
) -> list[int]:
    """The partition with the best mean period over perturbed scenarios; the same for the same seed.

    As `robust.robust`, with both phases perturbed: ready times and layers' forward times by log-normal
    factors, latency and time per byte by factors that both collectives share, as they share the network.
    """
    found = [c for c in candidates(cycle) if period(cycle, c) <= ceiling]
    means = _mean_periods(cycle, found, scenarios=scenarios, seed=seed)
    return fewest_buckets(found, means, tolerance)


def safest(cycle: Cycle) -> list[int]:
    """The robust choice among the partitions that are not predicted slower than torch's default buckets."""
    return robust(cycle, ceiling=period(cycle, rules.ddp(cycle.backward)))


def _simple(cycle: Cycle) -> list[list[int]]:
    """Partitions that are cheap to make: each phase's own optimum, size thresholds, torch's default, and one bucket."""
    sized = [rules.by_size(cycle.backward, mib * MIB) for mib in THRESHOLDS_MIB]
    alone = [exact.optimum(cycle.backward, cycle.scatter), exact.optimum(cycle.forward, cycle.gather)]
    return [*alone, *sized, rules.ddp(cycle.backward), rules.fill(cycle.backward)]


def _mean_periods(cycle: Cycle, partitions: list[list[int]], *, scenarios: int, seed: int) -> FloatArray:
    random = np.random.default_rng(seed)
    ready, backward, slower = perturbed(cycle.backward, scenarios, random)
    tails, forward, _ = perturbed(cycle.forward, scenarios, random)
    means = np.empty(len(partitions))
    for p, cuts in enumerate(partitions):
        sizes = bucket_bytes(cycle.backward, cuts)
        scatters, gathers = slower(cycle.scatter, sizes), slower(cycle.gather, sizes)
        updates = cycle.update(sizes) if cycle.update is not None else np.zeros(len(cuts))
        reduced, gathered = np.full(scenarios, -np.inf), np.full(scenarios, -np.inf)
        updated = backward
        for bucket, stop in enumerate(cuts):
            reduced = np.maximum(reduced, ready[:, stop - 1]) + scatters[:, bucket]
            gathered = np.maximum(gathered, tails[:, stop - 1]) + gathers[:, bucket]
            updated = np.maximum(updated, reduced) + updates[bucket]
        means[p] = (updated + cycle.step + np.maximum(gathered, forward)).mean()
    return means


@dataclass(frozen=True)
class _Front:
    """Labels of one prefix that no other of its labels beats."""

    values: FloatArray
    """A row for each label: F, H and, where shards are updated one by one, E."""
    start: IntArray
    """For each label, the prefix after which its last bucket starts."""
    label: IntArray
    """For each label, the index of the label of that prefix which it extends."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class CompletionBounds:
    """Lower bounds on every completion of a prefix, and the limit that they are held against."""

    limit: float
    scatter: tuple[FloatArray, FloatArray]
    """(least total time of the tensors after j, least finish whatever the prefix has reached)."""
    gather: tuple[FloatArray, FloatArray]
    update: FloatArray | None

    @staticmethod
    def of(cycle: Cycle, limit: float) -> CompletionBounds:
        return CompletionBounds(
            limit=limit * (1 + _ROUNDING),
            scatter=_completion(cycle.backward, cycle.scatter),
            gather=_completion(cycle.forward, cycle.gather),
            update=None if cycle.update is None else exact.remaining(cycle.backward, cycle.update)[0],
        )

    def least(self, cycle: Cycle, j: int, values: FloatArray) -> FloatArray:
        """Seconds that every completion of these labels of prefix j takes at least."""
        reduced = np.maximum(values[:, 0] + self.scatter[0][j], self.scatter[1][j])
        gathered = np.maximum(values[:, 1] + self.gather[0][j], self.gather[1][j])
        updated = np.maximum(reduced, cycle.backward.backward) + cycle.step
        if self.update is not None:
            updated = np.maximum(reduced, values[:, 2] + self.update[j])
        total: FloatArray = updated + np.maximum(gathered, cycle.forward.backward)
        return total


def _completion(stream: Stream, cost: Cost) -> tuple[FloatArray, FloatArray]:
    rest, least = exact.remaining(stream, cost)
    ends = stream.ready_array + least[1:]
    return rest, np.concatenate([np.maximum.accumulate(ends[::-1])[::-1], [-np.inf]])


def _nothing(cycle: Cycle) -> list[_Front]:
    """The fronts of partitions without any bucket: only the empty prefix has one."""
    return [_origin(cycle), *[_empty(cycle)] * len(cycle)]


def _origin(cycle: Cycle) -> _Front:
    none = np.zeros(1, dtype=np.int64)
    return _Front(np.full((1, 2 if cycle.update is None else 3), -np.inf), none, none)


def _empty(cycle: Cycle) -> _Front:
    none = np.zeros(0, dtype=np.int64)
    return _Front(np.zeros((0, 2 if cycle.update is None else 3)), none, none)


def extended(cycle: Cycle, bounds: CompletionBounds, before: list[_Front] | None, *, cell: float = 0.0) -> list[_Front]:
    """Fronts of all prefixes: made of one bucket more than `before`, or of any number of buckets if that is None."""
    n, backward, forward = len(cycle), cycle.backward, cycle.forward
    fronts = [_origin(cycle) if before is None else _empty(cycle)]
    source = fronts if before is None else before
    for (j, low, scatter), (_, _, gather) in zip(
        rows(backward, cycle.scatter), rows(forward, cycle.gather), strict=True
    ):
        held = [len(front) for front in source[low:j]]
        if not any(held):
            fronts.append(_empty(cycle))
            continue
        values = np.concatenate([front.values for front in source[low:j]])
        start = np.repeat(np.arange(low, j), held)
        label = np.arange(len(start)) - np.repeat(np.cumsum(held) - held, held)
        reached = np.empty_like(values)
        reached[:, 0] = np.maximum(values[:, 0], backward.ready[j - 1]) + scatter[start - low]
        reached[:, 1] = np.maximum(values[:, 1], forward.ready[j - 1]) + gather[start - low]
        if cycle.update is not None:
            updating = cycle.update(backward.prefix[j] - backward.prefix[start])
            begins = np.maximum(np.maximum(values[:, 2], backward.backward), reached[:, 0])
            reached[:, 2] = begins + updating
        # Nothing happens with these before the next tensor is ready, or before the pass is over.
        reached[:, 0] = np.maximum(reached[:, 0], backward.ready[j] if j < n else backward.backward)
        reached[:, 1] = np.maximum(reached[:, 1], forward.ready[j] if j < n else forward.backward)
        within = np.flatnonzero(bounds.least(cycle, j, reached) <= bounds.limit)
        if cell:
            within = within[_apart(reached[within], cell)]
        kept = within[_undominated(reached[within])]
        fronts.append(_Front(reached[kept], start[kept], label[kept]))
    return fronts


def _apart(values: FloatArray, cell: float) -> IntArray:
    """One row, the one with the least sum, of those in each cube of edge `cell`."""
    cubes = np.floor(values / cell).astype(np.int64)
    order = np.lexsort((values.sum(axis=1), *cubes.T))
    cubes = cubes[order]
    first = np.concatenate([[True], (cubes[1:] != cubes[:-1]).any(axis=1)]) if len(order) else np.zeros(0, dtype=bool)
    found: IntArray = order[first]
    return found


def _undominated(values: FloatArray) -> IntArray:
    """Rows that no other row equals or beats in every column; of equal rows the first."""
    order = np.lexsort(values.T[::-1])
    if values.shape[1] == 2:
        second = values[order, 1]
        least = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]]) if len(order) else second
        best: IntArray = order[second < least]
        return best
    # By ascending first value; a staircase of the (second, third) seen so far, second rising and third falling.
    kept: list[int] = []
    seconds: list[float] = []
    thirds: list[float] = []
    for i in order.tolist():
        _, second, third = values[i].tolist()
        at = bisect_right(seconds, second)
        if at and thirds[at - 1] <= third:
            continue
        kept.append(i)
        first = bisect_left(seconds, second)
        last = first
        while last < len(thirds) and thirds[last] >= third:
            last += 1
        seconds[first:last], thirds[first:last] = [second], [third]
    return np.array(kept, dtype=np.int64)


def walk(cycle: Cycle, layers: list[list[_Front]], count: int) -> list[int]:
    """The cuts of the best label of all tensors: layer by layer from `count` down, or within the only layer."""
    last = layers[count][-1]
    updated = last.values[:, 2] if cycle.update is not None else last.values[:, 0]
    label, at, cuts = int(np.argmin(updated + last.values[:, 1])), len(cycle), []
    while at > 0:
        cuts.append(at)
        front = layers[count][at]
        at, label = int(front.start[label]), int(front.label[label])
        count = max(count - 1, 0)
    return cuts[::-1]

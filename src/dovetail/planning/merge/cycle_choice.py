"""Which of many good bucketings to take: one that stays good, that saves memory, and that needs no fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from dovetail.core.network import FloatArray

from . import rules
from .cycle import Bucketing, Cycle, Way, period, ungrouped, uniform
from .cycle_exact import best_per_count, fewest, grouping, most_split, optimal, simple
from .cycle_labels import lower_bound
from .robust import perturbed
from .stream import Stream, bucket_bytes

Memory = Literal["time", "shard"]
"""What a bucketing is chosen for: "time" is the fastest; "shard" has the most bytes in split buckets, and so the least
optimiser state on a rank, among those that are nearly as fast."""
Choice = Callable[[Cycle], Bucketing]

SHARD_TOLERANCE = 0.02
"""What "shard" may cost, as a share of the shortest period."""
PRECISION_TOLERANCE = 0.005
"""What fewer bits must save, as a share of the period."""
_MOST_BUCKETS = 16
_GROUPS = 44
"""Tensors are grouped into about so many where bucketings are sought by their count of buckets."""
_WORTH_A_LOOK = 0.05
"""Bucketings with a given count of buckets are sought up to this share above the optimum …"""
_CELL = 0.004
"""… and with this precision, as a share of the optimum for each bucket …"""
_FEW_LABELS = 20
"""… or so many labels."""


def candidates(cycle: Cycle) -> list[Bucketing]:
    """Distinct good bucketings, the optimum first."""
    best = optimal(cycle)
    shortest = period(cycle, best)
    few, cuts = grouping(cycle, _GROUPS)
    # The precision only limits what is found: the choice among these is made by their exact periods.
    each = best_per_count(
        few,
        min(_MOST_BUCKETS, 2 * len(best)),
        limit=shortest * (1 + _WORTH_A_LOOK),
        cell=shortest * _CELL,
        most=_FEW_LABELS,
    )
    return list(dict.fromkeys([best, *(ungrouped(bucketing, cuts) for bucketing in each.values()), *simple(cycle)]))


def robust(
    cycle: Cycle, *, scenarios: int = 40, seed: int = 0, tolerance: float = 0.005, ceiling: float = float("inf")
) -> Bucketing:
    """The bucketing with the best mean period over perturbed scenarios; the same for the same seed.

    As `robust.robust`, with both phases perturbed: ready times and layers' forward times by log-normal factors, latency
    and time per byte by factors that all collectives share, as they share the network. Of those that are as good the
    one with the fewest buckets is taken.
    """
    found = [d for d in candidates(cycle) if period(cycle, d) <= ceiling]
    means = _mean_periods(cycle, found, scenarios=scenarios, seed=seed)
    within = np.flatnonzero(means <= means.min() * (1 + tolerance)).tolist()
    return found[min(within, key=lambda i: (len(found[i]), means[i]))]


def safest(cycle: Cycle) -> Bucketing:
    """The robust choice among what is not predicted slower than torch's default buckets, all whole or all split."""
    return robust(cycle, ceiling=min(period(cycle, d) for d in uniform(cycle, rules.ddp(cycle.backward))))


CHOICES: dict[str, Choice] = {"auto": safest, "robust": robust, "fewest": fewest, "optimal": optimal}
"""Policies that know both phases, by name. All others cut by a rule of one phase."""


def choose(cycle: Cycle, choice: Choice, *, memory: Memory = "time") -> Bucketing:
    """What `choice` takes, in full precision where fewer bits save nearly nothing, and split as `memory` says."""
    full = cycle.only(lambda way: way.precision == "full")
    if full is cycle:
        return _split(cycle, choice, memory)
    least = lower_bound(full)
    fullest: Bucketing | None = None
    if least <= (limit := lower_bound(cycle) * (1 + PRECISION_TOLERANCE)):
        fullest = _split(full, choice, memory)
        if period(full, fullest) <= limit:
            return renamed(fullest, full, cycle)
    useful = _useful(cycle)
    found = renamed(_split(useful, choice, memory), useful, cycle)
    limit = period(cycle, found) * (1 + PRECISION_TOLERANCE)
    if fullest is None and least <= limit:
        fullest = _split(full, choice, memory)
    if fullest is not None and period(full, fullest) <= limit:
        return renamed(fullest, full, cycle)
    return _fuller(cycle, found, limit)


def renamed(bucketing: Bucketing, ours: Cycle, theirs: Cycle) -> Bucketing:
    """The same bucketing by the numbers that its ways have in another cycle."""
    return replace(bucketing, ways=tuple(theirs.ways.index(ours.ways[w]) for w in bucketing.ways))


def _split(cycle: Cycle, choice: Choice, memory: Memory) -> Bucketing:
    if memory == "time" or len({way.kind for way in cycle.ways}) == 1:
        return choice(cycle)
    split = cycle.only(lambda way: way.kind == "split")
    limit = period(cycle, optimal(cycle)) * (1 + SHARD_TOLERANCE)
    best = choice(split)
    if period(split, best) <= limit:
        return renamed(best, split, cycle)
    return most_split(cycle, limit) or choice(cycle)


def _useful(cycle: Cycle) -> Cycle:
    """The same without the reduced ways that take no less than another of their kind, whatever the bucket."""
    tables = cycle.tables

    def beaten(w: int) -> bool:
        mine = cycle.ways[w]
        rivals = [v for v, way in enumerate(cycle.ways) if way.kind == mine.kind and v != w]
        return any(all((table[v] <= table[w]).all() for table in tables) for v in rivals)

    return cycle.only(lambda way: way.precision == "full" or not beaten(cycle.ways.index(way)))


def _fuller(cycle: Cycle, bucketing: Bucketing, limit: float) -> Bucketing:
    """The same with full precision in every bucket, the smallest first, that does not need fewer bits for the limit."""
    sizes = bucket_bytes(cycle.backward, list(bucketing.cuts))
    of: dict[tuple[str, str], int] = {(way.kind, way.precision): w for w, way in enumerate(cycle.ways)}
    for bucket in np.argsort(sizes, kind="stable").tolist():
        way: Way = cycle.ways[bucketing.ways[bucket]]
        ways = list(bucketing.ways)
        ways[bucket] = of[way.kind, "full"]
        changed = replace(bucketing, ways=tuple(ways))
        if way.precision != "full" and period(cycle, changed) <= limit:
            bucketing = changed
    return bucketing


def _mean_periods(cycle: Cycle, bucketings: list[Bucketing], *, scenarios: int, seed: int) -> FloatArray:
    random = np.random.default_rng(seed)
    stream = cycle.backward
    ready, backward, slower = perturbed(stream, scenarios, random)
    # Tails as if all-gathers kept the order of all tensors: nearly always they do.
    used = Stream(tuple(np.maximum.accumulate(cycle.tails).tolist()), stream.sizes, backward=cycle.forward)
    tails, forward, _ = perturbed(used, scenarios, random)
    means = np.empty(len(bucketings))
    for d, bucketing in enumerate(bucketings):
        cuts = list(bucketing.cuts)
        sizes = bucket_bytes(stream, cuts)
        taken = {w: cycle.ways[w] for w in sorted(set(bucketing.ways))}
        reduces = {w: slower(way.reduce, sizes) for w, way in taken.items()}
        gathers = {w: slower(way.gather, sizes) for w, way in taken.items() if way.gather is not None}
        updates = {w: way.update(sizes) for w, way in taken.items() if way.update is not None}
        reduced, gathered = np.full(scenarios, -np.inf), np.full(scenarios, -np.inf)
        updated = backward
        for bucket, (stop, w) in enumerate(zip(cuts, bucketing.ways, strict=True)):
            reduced = np.maximum(reduced, ready[:, stop - 1]) + reduces[w][:, bucket]
            updated = np.maximum(updated, reduced) + (updates[w][bucket] if w in updates else 0.0)
            if w in gathers:
                gathered = np.maximum(gathered, tails[:, stop - 1]) + gathers[w][:, bucket]
        means[d] = (updated + np.maximum(gathered, forward)).mean()
    return means

"""The best buckets where each is whole or split: the exact bucketing, the one with the fewest buckets, and good others.

Both phases have the same buckets (`cycle`), and each alone would be the merging problem of `exact`. What is left of
each prefix is a front of labels, and the best bucketing grows out of these (`cycle_labels`).

First a bucketing of few tensors, each made of several, gives a limit; then all tensors are looked at within it. That is
exact for small models, and for large ones wherever no front has more than `_LABELS` / tensors labels. Longer ones are
thinned out, which costs at most two edges of the cubes for each bucket (`cycle_labels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dovetail.core.plan import MIB

from . import exact, rules
from .cycle import Bucketing, Cycle, grouped, period, ungrouped, uniform
from .cycle_labels import CompletionBounds, Fronts, extended, nothing, walk

_ROUNDING = 1e-12
_SMALL = 16
"""Up to so many tensors nothing is thinned out …"""
_LABELS = 6_000
"""… and with more, a front has at most this divided by their number."""
_GROUPS = 64
"""Tensors are grouped until a group has the bytes of one in so many."""
_COARSE = 0.01
"""Edge of the cubes where only a limit is sought, as a share of the limit."""


def optimal(cycle: Cycle) -> Bucketing:
    """The bucketing with the shortest period, for any costs (seconds, not negative)."""
    found = within(cycle, np.inf)
    assert found is not None, "there is no limit"
    return found


def within(cycle: Cycle, limit: float) -> Bucketing | None:
    """The bucketing with the shortest period if that is within `limit` seconds; a lower limit is faster to answer."""
    best = shortest(cycle, simple(cycle))
    few, cuts = grouping(cycle)
    if few is not cycle:
        bounds = CompletionBounds.of(few, min(limit, period(cycle, best)))
        best = shortest(cycle, [best, *_found([extended(bounds, cell=bounds.limit * _COARSE)], cuts)])
    bounds = CompletionBounds.of(cycle, min(limit, period(cycle, best)))
    best = shortest(cycle, [*_found([extended(bounds, most=_most(cycle))]), best])
    return best if period(cycle, best) <= limit * (1 + _ROUNDING) else None


def fewest(cycle: Cycle, *, tolerance: float = 0.01, best: Bucketing | None = None) -> Bucketing:
    """The fewest buckets whose period is within `tolerance` of the optimum; of all with that many, the shortest.

    Of a large model groups of tensors are looked at: few buckets are not cut finely.
    """
    best = optimal(cycle) if best is None else best
    few, cuts = grouping(cycle)
    bounds = CompletionBounds.of(few, period(cycle, best) * (1 + tolerance))
    layers = [nothing(few)]
    for _ in range(1, min(len(best), len(few) + 1)):
        layers.append(extended(bounds, layers[-1], most=_most(few)))
        for bucketing in _found(layers, cuts):
            return bucketing
    return best  # no bucketing of any count is shorter


def best_per_count(
    cycle: Cycle, buckets: int, *, limit: float, cell: float = 0.0, most: int | None = None
) -> dict[int, Bucketing]:
    """For every number of buckets up to `buckets`: the shortest period, where one is within `limit` seconds.

    With a `cell` (seconds) above 0, labels that are that near to each other count as one: at most twice `cell` is lost
    for each bucket. It grows for fronts of more than `most` labels.
    """
    bounds, layers, found = CompletionBounds.of(cycle, limit), [nothing(cycle)], {}
    for count in range(1, min(buckets, len(cycle)) + 1):
        layers.append(extended(bounds, layers[-1], cell=cell, most=most))
        if layers[-1].last.size:
            found[count] = walk(layers)
    return found


def most_split(cycle: Cycle, limit: float) -> Bucketing | None:
    """The most bytes in split buckets with a period within `limit` seconds; of those bucketings, the shortest.

    The optimiser's state of a split bucket takes 1/n of the memory on every rank.
    """
    few, cuts = grouping(cycle)
    fronts = extended(CompletionBounds.of(few, limit), most=_most(few), weigh=True)
    return next(_found([fronts], cuts), None)


def ways_for(cycle: Cycle, cuts: list[int]) -> Bucketing:
    """The best ways of given buckets."""
    few, same = grouped(cycle, cuts, forced=True), uniform(cycle, cuts)
    bounds = CompletionBounds.of(few, min(period(cycle, bucketing) for bucketing in same))
    return shortest(cycle, [*_found([extended(bounds, most=_most(few))], cuts), *same])


def simple(cycle: Cycle) -> list[Bucketing]:
    """Bucketings that are cheap to make: each way's own best, sizes, torch's default and one bucket, all of one way."""
    cuts = [rules.by_size(cycle.backward, mib * MIB) for mib in (5, 10, 25)]
    cuts += [rules.ddp(cycle.backward), rules.fill(cycle.backward)]
    alone = [exact.optimum(cycle.backward, way.reduce) for way in cycle.ways]
    found = [bucketing for partition in cuts for bucketing in uniform(cycle, partition)]
    return [*found, *(Bucketing(tuple(own), (w,) * len(own)) for w, own in enumerate(alone))]


def grouping(cycle: Cycle, groups: int = _GROUPS) -> tuple[Cycle, list[int]]:
    """The same with about `groups` tensors, each made of several neighbours, and their cuts; a small cycle itself."""
    if len(cycle) <= _SMALL:
        return cycle, list(range(1, len(cycle) + 1))
    cuts = rules.by_size(cycle.backward, sum(cycle.backward.sizes) / groups)
    return grouped(cycle, cuts), cuts


def shortest(cycle: Cycle, bucketings: Iterable[Bucketing]) -> Bucketing:
    return min(bucketings, key=lambda bucketing: period(cycle, bucketing))


def _most(cycle: Cycle) -> int | None:
    return None if len(cycle) <= _SMALL else max(_LABELS // len(cycle), 8)


def _found(layers: list[Fronts], cuts: list[int] | None = None) -> Iterator[Bucketing]:
    if layers[-1].last.size:
        bucketing = walk(layers)
        yield bucketing if cuts is None else ungrouped(bucketing, cuts)

"""Which rank updates which parameter, where an optimiser needs parameters whole.

Such a parameter cannot be cut, so every one has an owner. The ranks wait for the one whose updates take longest:
choose owners so that the largest load is the smallest possible, and among those so that the largest number of bytes of
state is. This is scheduling on identical machines, hard in general and easy in practice: models repeat a few shapes.

1. Longest first: every parameter goes to the rank with the least load so far. Its largest load is at most 4/3 − 1/(3n)
   of the best one (Graham's bound), and it is never more than the mean load plus the largest cost.
2. Exchanges: the rank with the largest load gives one parameter away, or swaps one, while that lowers it; then likewise
   for bytes, where the largest load stays what it is.
3. Unless the lower bounds are reached, a search through all assignments, cut off where neither criterion can improve.
   It looks at `NODES` of them at most; when it ends before that, the result is the best there is.

Everything is integers and ties go to the first, so that all ranks find the same owners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

NODES = 50_000
"""Partial assignments that the search looks at: about half a second."""
MOST = 300
"""Parameters up to which it searches: it is as deep as there are parameters."""
EXCHANGES = 200
"""Exchanges for each criterion."""


@dataclass(frozen=True)
class Ownership:
    """The owner of every parameter."""

    owners: tuple[int, ...]
    load: int
    """Largest cost of a rank's parameters."""
    bytes: int
    """Largest number of bytes of a rank's parameters."""
    bound: int
    """No owners have a smaller largest load than this."""
    optimal: bool
    """Whether (load, bytes) is proved to be the smallest there is, compared in this order."""


def update_cost(shape: Sequence[int], *, matrices: bool) -> int:
    """What the update of one parameter costs, relative to others.

    With `matrices` the optimiser multiplies matrices, as Muon does to orthogonalise: with m rows or columns, whichever
    are fewer, and M of the other, a step of Newton-Schulz takes m²·M multiplications for the Gram matrix, m³ for its
    square and m²·M for the product with the matrix. Otherwise, and for vectors, it is one operation for each element.
    """
    elements = math.prod(shape)
    if not matrices or len(shape) < 2 or not elements:
        return elements
    small = min(shape[0], elements // shape[0])
    return 2 * elements * small + small**3


def own(costs: Sequence[int], sizes: Sequence[int], ranks: int) -> Ownership:
    """Owners of parameters with these costs of an update and these bytes of state, none negative."""
    assert len(costs) == len(sizes) and ranks >= 1 and min([*costs, *sizes], default=0) >= 0
    # Those that cost the same differ in bytes only: the larger ones first.
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], -sizes[i], i))
    ordered = [(costs[i], sizes[i]) for i in order]
    bounds = _lower_bound([c for c, _ in ordered], ranks), _lower_bound(sorted(sizes, reverse=True), ranks)
    chosen = _exchanged(ordered, _longest_first(ordered, ranks), ranks)
    best = _largest(ordered, chosen, ranks)
    finished = best == bounds
    if not finished and len(ordered) <= MOST:
        chosen, finished = _searched(ordered, chosen, ranks, bounds)
        best = _largest(ordered, chosen, ranks)
    owners = [0] * len(costs)
    for i, owner in zip(order, chosen, strict=True):
        owners[i] = owner
    return Ownership(tuple(owners), *best, bound=best[0] if finished else bounds[0], optimal=finished)


def _lower_bound(falling: Sequence[int], ranks: int) -> int:
    """Of the n·k + 1 largest, k + 1 share a rank, whose sum is at least that of the smallest among them."""
    crowded = (sum(falling[ranks * k - k : ranks * k + 1]) for k in range(1, (len(falling) - 1) // ranks + 1))
    return max(-(-sum(falling) // ranks), max(falling, default=0), max(crowded, default=0))


def _longest_first(ordered: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    loads, chosen = [(0, 0)] * ranks, []
    for cost, size in ordered:
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] = loads[rank][0] + cost, loads[rank][1] + size
        chosen.append(rank)
    return chosen


def _loads(ordered: Sequence[tuple[int, int]], chosen: Sequence[int], ranks: int) -> list[list[int]]:
    """Costs and bytes by rank."""
    loads = [[0] * ranks, [0] * ranks]
    for (cost, size), rank in zip(ordered, chosen, strict=True):
        loads[0][rank] += cost
        loads[1][rank] += size
    return loads


def _largest(ordered: Sequence[tuple[int, int]], chosen: Sequence[int], ranks: int) -> tuple[int, int]:
    loads = _loads(ordered, chosen, ranks)
    return max(loads[0]), max(loads[1])


def _exchanged(ordered: Sequence[tuple[int, int]], chosen: list[int], ranks: int) -> list[int]:
    """Lowers the largest load by moves and swaps, then the largest bytes without raising the largest load."""
    for criterion in (0, 1):
        for _ in range(EXCHANGES):
            loads = _loads(ordered, chosen, ranks)
            found = _better(ordered, chosen, loads, criterion)
            if found is None:
                break
            for k, rank in found:
                chosen[k] = rank
    return chosen


def _better(
    ordered: Sequence[tuple[int, int]], chosen: Sequence[int], loads: Sequence[Sequence[int]], criterion: int
) -> list[tuple[int, int]] | None:
    """The move or swap after which the rank with the most, and the rank it deals with, have least; None if none helps.

    No load may exceed the largest there is.
    """
    best, limit = max(loads[criterion]), max(loads[0])
    source = loads[criterion].index(best)
    least = loads[criterion].index(min(loads[criterion]))
    # Parameters of one rank that are alike are the same choice.
    alike = {(rank, *ordered[k]): k for k, rank in reversed(list(enumerate(chosen)))}
    mine = [k for (rank, _, _), k in alike.items() if rank == source]
    others = [None, *(k for (rank, _, _), k in alike.items() if rank != source)]
    found = None
    for k, other in product(mine, others):
        rank = least if other is None else chosen[other]
        if rank == source:
            continue
        back = (0, 0) if other is None else ordered[other]
        given = [ordered[k][c] - back[c] for c in (0, 1)]
        if max(loads[0][rank] + given[0], loads[0][source] - given[0]) > limit:
            continue
        after = max(loads[criterion][rank] + given[criterion], loads[criterion][source] - given[criterion])
        if after < best:
            best, found = after, [(k, rank)] if other is None else [(k, rank), (other, source)]
    return found


def _searched(
    ordered: Sequence[tuple[int, int]], chosen: list[int], ranks: int, bounds: tuple[int, int]
) -> tuple[list[int], bool]:
    """Branch and bound from the best assignment so far: (the best found, whether all others are ruled out)."""
    best, nodes = _largest(ordered, chosen, ranks), 0
    trail, loads, result = [0] * len(ordered), [(0, 0)] * ranks, list(chosen)

    def search(k: int) -> bool:
        """Whether all assignments of parameters k, k + 1, … were tried or ruled out."""
        nonlocal best, nodes, result
        if best == bounds:
            return True
        if k == len(ordered):
            best, result = (max(c for c, _ in loads), max(b for _, b in loads)), list(trail)
            return True
        tried: set[tuple[int, int]] = set()
        cost, size = ordered[k]
        twin = k > 0 and ordered[k] == ordered[k - 1]
        # Parameters that are alike go to ranks in rising order. Otherwise of ranks with equal loads the first is tried.
        for rank in range(trail[k - 1], ranks) if twin else sorted(range(ranks), key=lambda r: (loads[r], r)):
            before = loads[rank]
            if before in tried and not twin:
                continue
            tried.add(before)
            nodes += 1
            if nodes > NODES:
                return False
            loads[rank], trail[k] = (before[0] + cost, before[1] + size), rank
            over = _can_improve(loads, best, bounds) and not search(k + 1)
            loads[rank] = before
            if over:
                return False
        return True

    finished = search(0)
    return result, finished


def _can_improve(loads: Sequence[tuple[int, int]], best: tuple[int, int], bounds: tuple[int, int]) -> bool:
    """Whether some way to assign what is left may be below `best`, by load and then by bytes."""
    load = max(bounds[0], max(c for c, _ in loads))
    return (load, max(bounds[1], max(b for _, b in loads))) < best

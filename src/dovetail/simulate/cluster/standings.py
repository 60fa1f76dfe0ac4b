"""Who stands before whom among jobs that share devices, and for how long: some orders change while the jobs run.

First come first served stays as it is. Least remaining work: who runs more overtakes once, and stays ahead. Least
attained service and the longest critical path: who stands first falls back by running, until it meets the next; from
then on the two take turns. Such jobs tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

from dovetail.core.job import Shape
from dovetail.planning.sharing.priority import Order, Standing, rank

CHANGING: frozenset[Order] = frozenset({"srpt", "las", "cp"})
TIED: frozenset[Order] = frozenset({"las", "cp"})
CLOSE = 2
"""Jobs tie that are at most so many iterations apart in what they are ranked by."""


def ranked(order: Order, standings: Iterable[Standing]) -> tuple[list[Standing], tuple[int, ...]]:
    """Best first, and a number for each such that those with the same number tie; no numbers where nobody does."""
    found = sorted(standings, key=lambda s: rank(order, s))
    if order not in TIED:
        return found, ()
    numbers = [0]
    for a, b in pairwise(found):
        near = CLOSE * max(_step(order, a.shape), _step(order, b.shape))
        apart = a.background != b.background or rank(order, b)[1] - rank(order, a)[1] > near
        numbers.append(numbers[-1] + apart)
    # Those that tie in an order of their shapes, so that equal groups look equal.
    both = sorted(
        zip(numbers, found, strict=True), key=lambda x: (x[0], x[1].shape.tasks, x[1].shape.off_device, x[1].serial)
    )
    return [s for _, s in both], tuple(numbers)


def overtaken(
    order: Order,
    standings: Sequence[Standing],
    ties: Sequence[int],
    rates: Sequence[float],
    devices: Iterable[Sequence[int]],
) -> float:
    """Seconds until, on some device, a job has come up with one before it; infinite if none will.

    `devices` lists each one's residents, as places in `standings`. Never sooner than an iteration of the slowest:
    until then nobody notices.
    """
    figures = [rank(order, s)[1] for s in standings]
    slopes = [_step(order, s.shape) * rate / s.shape.progress for s, rate in zip(standings, rates, strict=True)]
    soonest = float("inf")
    for i, j in {pair for residents in devices for pair in combinations(residents, 2)}:
        if (ties and ties[i] == ties[j]) or standings[i].background != standings[j].background:
            continue
        if slopes[i] > slopes[j]:
            soonest = min(soonest, (figures[j] - figures[i]) / (slopes[i] - slopes[j]))
    return max(soonest, max(s.shape.period for s in standings))


def _step(order: Order, shape: Shape) -> float:
    """What one iteration adds to the figure by which the job is ranked."""
    return shape.period if order == "cp" else shape.work if order == "las" else -shape.work

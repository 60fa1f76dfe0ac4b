"""The statistics of a contest: whether one plan is faster than another, with a stated chance of being wrong.

Two plans take turns in pairs, and a coin decides which of them begins a pair. Which iterations count is fixed
beforehand and does not depend on the coin. So if both plans are equally fast, whatever the machine does meanwhile
(drift, bursts, correlated noise, another job that starts), swapping the two turns of a pair would only have swapped
their times: each difference is as likely to be positive as negative, independently of the others. That is all that the
test assumes. It counts, among all ways in which the coins could have fallen, those that would have looked as good for
the challenger as what was seen (Wilcoxon's signed ranks, where these are equal the sums of the differences).

Looking after every pair and stopping at the first good moment would make more errors than one look. So the error is
spent in parts: at each look the ways in which the coins could have fallen that stop there, together with those that
would have stopped at an earlier look, are at most the share that may be spent by then. Over all looks together that is
ERROR. The interval of the gain goes with the same looks: it holds what the test would not have refuted by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

ERROR = 0.04
"""Chance, at most, of keeping a plan that is no faster than the first one, over all plans and looks of a contest."""
DOUBTED = 0.01
"""The same for a plan that is predicted to be slower than the first one: it must prove more."""
LEAST_PAIRS = 5
"""With fewer even a plan that wins every pair could have been lucky."""
LONGEST = 2
"""How many times the planned pairs a duel may take while it is undecided."""
MAIN = 0.79
"""Share of the error that is spent on the planned pairs; the rest is left for the pairs beyond."""
HASTE = 4
"""Power of the pairs seen so far at which the error is spent: a high one saves it for the later looks."""
ALL_SIGNS = 12
"""Pairs up to which all ways in which the coins could have fallen are counted; of more, a sample of as many."""

ROUNDING = 1e-9
"""Sums that differ by less are equal."""

Array = npt.NDArray[np.float64]
Spending = Callable[[int], float]
"""From a number of pairs to the error that may be spent by then."""


@dataclass(frozen=True)
class PairedGain:
    """How much faster one plan is than another, from pairs of turns; shares of the slower one's time: 0.1 is 10 %."""

    gain: float
    low: float
    high: float
    """Ends of the interval that holds the true gain in at least nine of ten contests, however many looks they took."""
    chance: float
    """Chance that a plan that gains nothing would have been kept by now, with a result as good as this or better."""
    pairs: int


@dataclass(frozen=True)
class Verdict:
    """What a contest has decided."""

    kept: int
    """Index of the plan to keep."""
    challenger: int = 0
    """Index of the plan that was compared with the first in the duel; 0 if none was."""
    duel: PairedGain | None = None
    error: float = ERROR
    """Chance, at most, of keeping the challenger if it gains nothing."""


def spending(pairs: int, error: float = ERROR) -> Spending:
    """The error that may be spent by the end of each pair of a duel that is planned to have `pairs` of them."""

    def spent(pair: int) -> float:
        done = pair / pairs
        return error * (MAIN * done**HASTE if done <= 1 else MAIN + (1 - MAIN) * (done - 1) / (LONGEST - 1))

    return spent


def turn_time(seconds: Sequence[float]) -> float:
    """Logarithm of what an iteration of one turn took; of three or more the slowest does not count.

    Others' work only ever adds time, and so does the iteration in which torch puts buckets into ready order.
    """
    ordered = sorted(seconds)
    return float(np.mean(np.log(ordered[:-1] if len(ordered) > 2 else ordered)))


def estimated(differences: Sequence[float]) -> float:
    """The gain by some pairs; `differences` are logarithms of how many times as long the first plan took, by pair.

    The estimate is that of Hodges and Lehmann, the median of the means of any two differences, which one disturbed pair
    does not move.
    """
    return _share(float(np.median(_means(differences))))


def judged(differences: Sequence[float], pairs: int, error: float = ERROR) -> PairedGain:
    """Judges a duel that was planned to have `pairs` pairs, by the `differences` seen, with this error.

    The interval is the test's own, at ERROR on either side: it ends at the gains that the test would just refute.
    """
    means, seen, spent = _means(differences), np.asarray(differences, dtype=np.float64), spending(pairs)
    return PairedGain(
        gain=estimated(differences),
        low=_share(_bound(seen, means, spent)),
        high=_share(-_bound(-seen, -means[::-1], spent)),
        chance=chance(differences, spending(pairs, error)),
        pairs=len(differences),
    )


def chance(differences: Sequence[float] | Array, spent: Spending) -> float:
    """Share of the ways in which the coins could have fallen that would have stopped the duel by now.

    Those count that would have stopped it at an earlier look, and those that look as good now as what was seen.
    """
    seen = np.asarray(differences, dtype=np.float64)
    pairs = len(seen)
    coins = _coins(pairs) if pairs <= ALL_SIGNS else np.vstack([_coins(pairs), seen > 0])
    stopped = np.zeros(len(coins), dtype=bool)
    for look in range(LEAST_PAIRS, pairs):
        may = int(spent(look) * len(coins) + 1e-9) - int(stopped.sum())
        if may > 0:
            sums = coins[:, :look] @ weights(seen[:look])
            going = np.sort(sums[~stopped])[::-1]
            stopped |= sums > going[may] + ROUNDING if may < len(going) else True
    of_pairs = weights(seen)
    return float(np.mean(stopped | (coins @ of_pairs >= of_pairs[seen > 0].sum() - ROUNDING)))


def weights(differences: Array) -> Array:
    """What a positive difference counts: the rank of its size, doubled, and less than one for the size itself.

    Equal sizes share their mean rank; a difference of zero counts for nobody. A sum of sizes only tells apart what
    ranks alone would not: with few pairs many ways in which coins can fall have the same sum of ranks.
    """
    sizes = np.abs(differences)
    ordered = np.sort(sizes)
    first, last = np.searchsorted(ordered, sizes, "left"), np.searchsorted(ordered, sizes, "right")
    return np.where(sizes > 0, first + last + 1.0 + sizes / (1.01 * max(float(sizes.sum()), ROUNDING)), 0.0)


@lru_cache(maxsize=64)
def _coins(pairs: int) -> Array:
    """Ways in which the coins could have fallen, one in each row: 1 where the difference of a pair is then positive.

    Of many pairs it is a random sample. It is the same on all ranks, which must come to the same verdict.
    """
    if pairs <= ALL_SIGNS:
        return ((np.arange(2**pairs)[:, None] >> np.arange(pairs)) & 1).astype(np.float64)
    return np.random.default_rng(pairs).integers(0, 2, (2**ALL_SIGNS, pairs)).astype(np.float64)


def _means(differences: Sequence[float]) -> Array:
    """Means of any two differences, a difference and itself included, in ascending order."""
    return np.sort([(a + b) / 2 for a, b in combinations_with_replacement(differences, 2)])


def _bound(differences: Array, means: Array, spent: Spending) -> float:
    """The largest gain, as a logarithm, of which the test says that there is more; the least mean if of none.

    The test's decision can only change at one of the `means`, which are in ascending order.
    """
    few, many = 0, len(means)  # of so many of the smallest means it is known, not known
    while few < many:
        middle = (few + many) // 2
        shifted = differences - means[middle] + 1e-9
        if chance(shifted, spent) <= spent(len(differences)):
            few = middle + 1
        else:
            many = middle
    return float(means[max(0, few - 1)])


def _share(logarithm: float) -> float:
    return float(-np.expm1(-logarithm))

"""Estimates from repeated measurements on a machine that others use too.

Other processes only ever add time: a repeat that they disturbed is longer, never shorter. So what lies far above the
tenth percentile is left out, and the median of the rest is the estimate. On a quiet machine nothing is left out, and
the estimate is the plain median; a bare low quantile would be too low there by the natural spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dovetail.core.network import FloatArray as FloatArray
from dovetail.core.profile import Quantiles

LOW = 0.1
"""Quantile that disturbances are told by; so few undisturbed repeats suffice."""
NEAR = 0.5
"""Repeats are taken as undisturbed up to so much above the low quantile."""
SETTLED = 0.03
"""Noise at which measuring ends: more repeats would say the same."""
UNKNOWN = 0.5
"""Noise of what was measured only once."""

RESAMPLES = 60
"""How often rounds are drawn again to see what an estimate varies by."""
NORMAL_90 = 1.645
"""Standard deviations to either side that hold 90 % of a normal distribution."""


def quantiles(samples: npt.ArrayLike) -> Quantiles:
    """Median, tenth and ninetieth percentile of some durations in seconds, none below zero."""
    durations = np.maximum(np.asarray(samples, dtype=np.float64), 0.0)
    low, median, high = (float(q) for q in np.quantile(durations, [0.1, 0.5, 0.9]))
    # Interpolation may round the three apart by a last digit.
    return Quantiles(median=median, low=min(low, median), high=max(high, median), samples=durations.size)


def undisturbed(samples: npt.ArrayLike, *, near: float = NEAR) -> FloatArray:
    """The durations that are at most a share `near` above the tenth percentile, in ascending order."""
    ordered = np.sort(np.maximum(np.asarray(samples, dtype=np.float64), 0.0))
    return ordered[ordered <= _limit(ordered, near)]


def typical(samples: npt.ArrayLike, *, near: float = NEAR) -> FloatArray:
    """Median of the undisturbed durations along the last axis."""
    ordered = np.sort(np.maximum(np.asarray(samples, dtype=np.float64), 0.0), axis=-1)
    kept = np.sum(ordered <= _limit(ordered, near), axis=-1, keepdims=True)
    middle = np.take_along_axis(ordered, (kept - 1) // 2, -1) + np.take_along_axis(ordered, kept // 2, -1)
    return np.asarray(middle[..., 0] / 2, dtype=np.float64)


def noise(rows: npt.ArrayLike, *, near: float = NEAR) -> float:
    """Relative error that is left in the sum of the typical durations of some rows, each of which was repeated.

    rows[i][k] is what row i took in round k. Rounds are drawn again and again with replacement (the bootstrap), and the
    half-width of the interval that holds 90 % of the sums is given as a share of the sum, at most 1. One round tells
    nothing of its own error, which then counts as UNKNOWN.
    """
    table = np.atleast_2d(np.asarray(rows, dtype=np.float64))
    rounds = table.shape[1]
    total = float(typical(table, near=near).sum())
    if total <= 0:
        return 0.0
    if rounds < 2:
        return UNKNOWN
    rng = np.random.default_rng(rounds)  # the same figure for the same measurements
    drawn = rng.integers(0, rounds, (RESAMPLES, rounds))
    sums = typical(table[:, drawn], near=near).sum(axis=0)
    # A draw from n repeats varies less than n new repeats would, by (n − 1) / n of the variance.
    spread = float(np.std(sums)) * math.sqrt(rounds / (rounds - 1))
    return min(1.0, NORMAL_90 * spread / total)


def lost_of_all(rows: Iterable[npt.ArrayLike], *, near: float = NEAR) -> float:
    """Share of the time of all repeats of some things that the disturbed ones took beyond typical ones."""
    total = beyond = 0.0
    for samples in rows:
        durations = np.maximum(np.asarray(samples, dtype=np.float64), 0.0)
        usual = float(typical(durations, near=near))
        total += float(durations.sum())
        beyond += float(np.sum(durations - usual, where=durations > usual * (1 + near)))
    return beyond / total if total > 0 else 0.0


def never_less(times: list[Quantiles]) -> list[Quantiles]:
    """The same quantity for ascending sizes, none longer than that of a larger size.

    What a larger batch or message took is an upper limit for the smaller ones, since disturbances only add time.
    """
    found: list[Quantiles] = []
    limit = math.inf
    for time in reversed(times):
        if time.median > limit:
            less = time.scaled(limit / time.median)  # which may miss the limit by a last digit
            time = Quantiles(median=limit, low=min(less.low, limit), high=max(less.high, limit), samples=time.samples)
        limit = time.median
        found.append(time)
    return found[::-1]


def _limit(ordered: FloatArray, near: float) -> FloatArray:
    """The longest undisturbed duration, along the last axis of sorted ones."""
    low = int(LOW * (ordered.shape[-1] - 1))
    return ordered[..., low : low + 1] * (1 + near)

"""Collectives of many sizes, measured round by round within a time budget: which sizes, how often, when it is enough.

A busy moment of the machine should hit all sizes alike, so a round has one call of each, and an estimate rests on calls
from the whole time. Everything here is decided by the seconds that `run` and `elapsed` return: where these are the same
on all ranks, all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from dovetail.core.network import CostSample

from . import stats

SMALLEST = 1024
"""Bytes of the smallest message: below it, time is latency."""
LEAST = 3
"""Repeats that every size gets at least: a median needs them."""
WARMUP = 2
"""Untimed calls before the timed ones; the first of a size pays for buffers and connections."""
STAGES = 3
"""At most so many times the repeats asked for are made where times have not settled."""

K = TypeVar("K", bound=Hashable)
Run: TypeAlias = Callable[[Sequence[tuple[K, int]]], list[float]]
"""Makes one call for each (what, bytes), in this order, and returns the seconds of each."""


@dataclass(frozen=True)
class Table:
    """What one collective costs by its size."""

    samples: tuple[CostSample, ...]
    noise: float
    """Relative error that is left, at the median of the larger half of the sizes: these are the sizes of buckets."""
    lost: float
    """Share of the time that disturbed calls took beyond typical ones."""


def round_up(nbytes: int, ranks: int) -> int:
    """Every rank's part is a whole number of four-byte elements."""
    part = 4 * ranks
    return -(-nbytes // part) * part


def sizes(max_bytes: int, ranks: int, *, factor: int) -> list[int]:
    """Message sizes from 1 KiB to `max_bytes`, each `factor` times the one before; the last is `max_bytes` itself."""
    grid = []
    size = SMALLEST
    while size < max_bytes:
        grid.append(round_up(size, ranks))
        size *= factor
    return sorted({*grid, round_up(max_bytes, ranks)})


def tables(
    run: Run[K],
    elapsed: Callable[[], float],
    keys: Sequence[K],
    *,
    max_bytes: int,
    ranks: int,
    repeats: int,
    budget: float,
) -> dict[K, Table]:
    """Measures each of `keys` at sizes up to `max_bytes`, in about `budget` seconds.

    First a survey: which sizes can be paid for, and what a call of each takes. Then rounds: each size is called up to
    `repeats` times, at least three times, at even distances over the whole time; the larger a message, the fewer calls
    fit into its share. If the times have not settled then, more rounds follow, up to three times as many, while the
    budget lasts.
    """
    survey = _Survey(run, elapsed, max_bytes=max_bytes, ranks=ranks)
    start, estimates = elapsed(), dict[tuple[K, int], float]()
    for left, key in zip(range(len(keys), 0, -1), keys, strict=True):
        promised = LEAST * sum(estimates.values())
        share = max(0.0, budget - (elapsed() - start) - promised) / left
        estimates |= {(key, size): seconds for size, seconds in survey.of(key, share).items()}
    found: dict[tuple[K, int], list[float]] = {item: [] for item in estimates}
    for _ in range(STAGES):
        left_over = budget - (elapsed() - start)
        if left_over <= 0 and all(found.values()):
            break
        # All sizes again, not only those that differ: what came before a message is part of what it takes.
        calls = allowances(estimates, left_over, least=0 if all(found.values()) else LEAST, most=repeats)
        _rounds(run, found, calls, lambda: elapsed() - start > budget)
        if all(_noise(_of(found, key)) <= stats.SETTLED for key in keys):
            break
    while short := [item for item, seconds in found.items() if len(seconds) < LEAST]:
        for item, seconds in zip(short, run(short), strict=True):
            found[item].append(seconds)
    return {key: _table(_of(found, key)) for key in keys}


def allowances(estimates: Mapping[K, float], seconds: float, *, least: int, most: int) -> dict[K, int]:
    """How often each call is repeated in so many seconds: all get `least`, then the shortest get `most` first.

    What short calls leave of their equal shares of the time goes to longer ones.
    """
    spare = seconds - least * sum(estimates.values())
    given: dict[K, int] = {}
    for left, (item, each) in zip(
        range(len(estimates), 0, -1), sorted(estimates.items(), key=lambda e: e[1]), strict=True
    ):
        share = max(0.0, spare) / left
        given[item] = least + max(0, min(most - least, int(share / each) if each > 0 else most))
        spare -= (given[item] - least) * each
    return {item: given[item] for item in estimates}


def _rounds(
    run: Run[K], found: dict[tuple[K, int], list[float]], calls: Mapping[tuple[K, int], int], late: Callable[[], bool]
) -> None:
    """Makes the calls, those of one item at even distances over the rounds; ends when it is late.

    In a round the largest message is the first. Links that let a burst pass faster than their rate, as shaped ones do,
    save up for it while little is sent; behind a larger message the burst is spent, as it is in training.
    """
    rounds = max(calls.values(), default=0)
    calls = dict(sorted(calls.items(), key=lambda call: -call[0][1]))
    for k in range(rounds):
        items = [item for item, count in calls.items() if (k + 1) * count // rounds > k * count // rounds]
        for item, seconds in zip(items, run(items), strict=True):
            found[item].append(seconds)
        if late():
            return


class _Survey(Generic[K]):
    """Finds out which sizes fit into a time, and what a call of each takes."""

    def __init__(self, run: Run[K], elapsed: Callable[[], float], *, max_bytes: int, ranks: int) -> None:
        self._run, self._elapsed, self._max_bytes, self._ranks = run, elapsed, max_bytes, ranks

    def of(self, key: K, seconds: float) -> dict[int, float]:
        """Seconds of a call by bytes: powers of two where their fewest repeats fit well, or else powers of four.

        Sizes that cannot be paid for are left out, but for the first two.
        """
        begin = self._elapsed()
        middle = min(self._max_bytes, 2**20)
        self._fastest(key, SMALLEST, WARMUP)
        t0, t1 = self._fastest(key, SMALLEST, LEAST), self._fastest(key, middle, LEAST)
        slope = max(0.0, t1 - t0) / max(1, middle - SMALLEST)
        fine = sizes(self._max_bytes, self._ranks, factor=2)
        fewest = sum((WARMUP + LEAST) * (t0 + slope * size) for size in fine)
        grid = fine if fewest <= seconds / 2 else sizes(self._max_bytes, self._ranks, factor=4)
        found: dict[int, float] = {}
        for size in grid:
            left = seconds - (self._elapsed() - begin) - LEAST * sum(found.values())
            if len(found) >= 2 and (WARMUP + LEAST) * (t0 + slope * size) > left:
                break
            found[size] = self._fastest(key, size, WARMUP)
            if size > middle:  # a small message tells nothing of bandwidth: a hiccup there would forbid all large ones
                slope = max(0.0, found[size] - t0) / size
        return found

    def _fastest(self, key: K, size: int, count: int) -> float:
        return min(self._run([(key, size)] * count))


def _of(found: Mapping[tuple[K, int], list[float]], key: K) -> dict[int, list[float]]:
    """The seconds of one collective's calls, by ascending bytes."""
    return {size: seconds for (of, size), seconds in sorted(found.items(), key=lambda f: f[0][1]) if of == key}


def _noise(found: Mapping[int, list[float]]) -> float:
    larger = list(found.values())[len(found) // 2 :]
    return float(np.median([stats.noise(seconds) for seconds in larger])) if all(larger) else 1.0


def _table(found: Mapping[int, list[float]]) -> Table:
    """The points of one collective; no message takes longer than a larger one."""
    seconds = stats.never_less([stats.quantiles(stats.undisturbed(calls)) for calls in found.values()])
    return Table(
        samples=tuple(CostSample(bytes=size, seconds=s) for size, s in zip(found, seconds, strict=True)),
        noise=_noise(found),
        lost=stats.lost_of_all(found.values()),
    )

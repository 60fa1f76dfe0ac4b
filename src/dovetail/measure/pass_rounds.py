"""Measured passes of a model, round by round: what each layer takes, how sure that is, what others took away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.profile import LayerTime, Quantiles

from . import stats
from .stats import NEAR, FloatArray

if TYPE_CHECKING:
    from .passes import Pass


_TASKS = Path("/proc/self/task")

CLEAN_LOSS = 0.02
"""A pass that lost at most this share of its time to others is clean."""
CLEAN_PASSES = 5
"""So many clean passes suffice to leave all others out."""
CLEAN_NEAR = 1.0
"""Clean passes differ by their own nature (memory that is fresh or used before), so nearly all of them count."""


class Rounds:
    """Passes by local batch size. `watched`: the clocks of a Moment tell what was lost in a pass."""

    def __init__(self, layers: Sequence[str], *, watched: bool) -> None:
        self.passes: dict[int, list[Pass]] = {}
        self._layers, self._watched = layers, watched
        self._spans: dict[int, list[tuple[float, float]]] = {}

    def add(self, samples: int, done: Pass, begin: Moment, end: Moment) -> None:
        self.passes.setdefault(samples, []).append(done)
        self._spans.setdefault(samples, []).append((end.wall - begin.wall, lost_between(begin, end)))

    def drop(self, samples: int) -> None:
        self.passes.pop(samples, None)
        self._spans.pop(samples, None)

    def times(self, layer: str) -> tuple[LayerTime, ...]:
        """What a layer takes at each local batch, in ascending order; no batch takes longer than a larger one."""
        batches = sorted(self.passes)
        forward, backward = list[Quantiles](), list[Quantiles]()
        for batch in batches:
            kept, near = self._kept(batch)
            forward.append(_usual([p.forward.get(layer, 0.0) for p in kept], near))
            backward.append(_usual([p.backward.get(layer, 0.0) for p in kept], near))
        both = zip(batches, stats.never_less(forward), stats.never_less(backward), strict=True)
        return tuple(LayerTime(batch=batch, forward=f, backward=b) for batch, f, b in both)

    def noise(self) -> float:
        """Relative error that is left in the time of a pass, at the worst of the batches.

        Two things make it: what repeated rounds still differ by, and what the estimate lies above a pass from which
        the time lost to others has been taken away. The second is seen only where even the best passes were disturbed.
        Few rounds are doubtful, but tell too little to call them worthless: these count as UNKNOWN at most.
        """
        found = (
            min(max(self._spread(b), self._excess(b)), 1.0 if len(done) >= CLEAN_PASSES else stats.UNKNOWN)
            for b, done in self.passes.items()
        )
        return max(found, default=0.0)

    def lost(self) -> float:
        """Share of the time of all passes in which other processes kept this one from running."""
        spans = np.array([span for own in self._spans.values() for span in own])
        wall, lost = spans.sum(axis=0) if len(spans) else (0.0, 0.0)
        return float(lost / wall) if self._watched and wall > 0 else 0.0

    def _kept(self, samples: int) -> tuple[list[Pass], float]:
        """(the clean passes, or all where these are too few; how far above the low quantile their times may lie)."""
        done = self.passes[samples]
        if self._watched:
            spans = zip(done, self._spans[samples], strict=True)
            clean = [p for p, (wall, lost) in spans if lost <= CLEAN_LOSS * wall]
            if len(clean) >= min(CLEAN_PASSES, len(done)):
                return clean, CLEAN_NEAR
        return done, NEAR

    def _spread(self, samples: int) -> float:
        kept, near = self._kept(samples)
        return stats.noise(self._table(kept), near=near)

    def _excess(self, samples: int) -> float:
        """Share of the estimate above the time of a pass without what it lost to others."""
        if not self._watched:
            return 0.0
        kept, near = self._kept(samples)
        estimate = float(stats.typical(self._table(kept), near=near).sum())
        without = float(stats.typical([wall - lost for wall, lost in self._spans[samples]], near=CLEAN_NEAR))
        return max(0.0, 1 - without / estimate) if estimate > 0 else 0.0

    def _table(self, passes: Sequence[Pass]) -> FloatArray:
        """Seconds by layer and direction (rows) and pass (columns)."""
        rows = [[p.forward.get(layer, 0.0) for p in passes] for layer in self._layers]
        rows += [[p.backward.get(layer, 0.0) for p in passes] for layer in self._layers]
        return np.array(rows, dtype=np.float64)


def _usual(samples: Sequence[float], near: float) -> Quantiles:
    return stats.quantiles(stats.undisturbed(samples, near=near))


@dataclass(frozen=True)
class Moment:
    """Clocks of the calling thread and its process, in seconds.

    Two clocks together tell how long this process could not run because others did. What the thread's processor time
    lacks to the wall's is time in which it did not run; but it may have waited of its own will. Where the kernel says
    how long this process's threads stood in line for a processor (Linux: /proc/PID/task/TID/schedstat), the smaller of
    the two counts: a thread that sleeps stands in no line, and one that waits for another of this process loses what
    that one loses.
    """

    wall: float
    processor: float
    queued: float | None
    """How long all threads have stood in line for a processor; None where the kernel does not say."""


def now() -> Moment:
    return Moment(wall=time.perf_counter(), processor=time.thread_time(), queued=_queued())


def lost_between(begin: Moment, end: Moment) -> float:
    """Seconds in which the calling thread could not go on because other processes ran."""
    idle = max(0.0, (end.wall - begin.wall) - (end.processor - begin.processor))
    if begin.queued is None or end.queued is None:
        return idle
    return min(idle, max(0.0, end.queued - begin.queued))


def _queued() -> float | None:
    """Seconds on run queues, of all threads together; threads that have ended are not counted any more."""
    found: list[int] = []
    try:
        for task in _TASKS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                found.append(int((task / "schedstat").read_text().split()[1]))
    except (OSError, ValueError, IndexError):
        return None
    return sum(found) * 1e-9 if found else None

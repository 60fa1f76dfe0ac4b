"""What the last iterations used: how long the link was idle, what codecs took, saved and lost."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

ITERATIONS = 20
"""Iterations over which medians are taken."""


class UsageLog:
    """Seconds of use of the link and of the codecs, iteration by iteration."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float, float]] = deque(maxlen=ITERATIONS)
        self._last = (time.perf_counter(), 0.0, 0.0)
        """When the last iteration ended, and the seconds of use of link and codecs by then."""

    def end_iteration(self, link: float, codecs: float) -> None:
        """An iteration ends now; the arguments are the seconds of use since the start of the process."""
        before, self._last = self._last, (time.perf_counter(), link, codecs)
        took, used, spent = (b - a for a, b in zip(before, self._last, strict=True))
        self._taken.append((took, used, spent))

    def forget(self) -> None:
        """Buckets have changed: what was before says nothing of what comes."""
        self._taken.clear()

    @property
    def idle(self) -> float:
        """Share of an iteration in which nothing was on its way."""
        return max(0.0, statistics.median(1 - used / took for took, used, _ in self._taken)) if self._taken else 0.0

    @property
    def codec(self) -> float:
        """Processor seconds of the codecs in an iteration."""
        return statistics.median(spent for _, _, spent in self._taken) if self._taken else 0.0


@dataclass(frozen=True)
class PrecisionUse:
    """What buckets in lower precisions save and cost on this rank."""

    buckets: int
    share: float
    """Bytes on the wire, of what full precision would send."""
    codec: float
    """Processor seconds of the codecs in an iteration."""
    error: float
    """Norm of what encoding loses, relative to that of the gradients, when last looked at; 0 before."""

    def __str__(self) -> str:
        error = f"; it loses {self.error:.1%}, which is added to what is sent next" if self.error else ""
        return (
            f"{self.buckets} buckets in fewer bytes: {self.share:.2f} of the bytes for "
            f"{self.codec * 1e3:.1f} ms of processor time a step{error}"
        )

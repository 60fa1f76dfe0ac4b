"""Workers that are slow for a while, and how deep they may still go. Pure: every rank comes to the same answer.

A worker's slowness is the time per sample that its own computation took, over what its depth should take, over the
median of that among all workers. A worker that was slow in each of the last few iterations gets the deepest depth with
which it keeps up with a healthy worker at full depth; once it was healthy in each of the last few iterations, it gets
its own depth back.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.errors import Error


@dataclass(frozen=True)
class Stragglers:
    """When a worker counts as slow."""

    slow: float = 1.5
    """A worker is slow above this many times the median worker's time for the same work."""
    patience: int = 5
    """Iterations in a row after which a worker counts as slow, and after which it counts as healthy again."""

    def __post_init__(self) -> None:
        if not self.slow > 1:
            raise Error(f"Stragglers.slow: expected above 1, got {self.slow}")
        if self.patience < 1:
            raise Error(f"Stragglers.patience: expected at least 1, got {self.patience}")

    @property
    def well(self) -> float:
        """Below this a slow worker is healthy again; lower than `slow`, so that no worker alternates."""
        return (1 + self.slow) / 2


class Pace:
    """The last iterations of all workers, and the depth limits that follow from them."""

    def __init__(self, options: Stragglers, *, workers: int, segments: int, forward: float, backward: float) -> None:
        """`forward` and `backward`: what the whole passes should take, in any unit."""
        self._options, self._segments = options, segments
        self._forward, self._backward = forward, backward
        self._last: list[deque[float]] = [deque(maxlen=options.patience) for _ in range(workers)]
        self.limits: tuple[int, ...] = (segments,) * workers

    def update(self, seconds: Sequence[float], depths: Sequence[int]) -> list[str]:
        """Adds the seconds per sample of each worker in an iteration at these depths; returns one line per change."""
        relative = [t / self._cost(d) for t, d in zip(seconds, depths, strict=True)]
        # The lower median: with two workers, one of which is slow, the healthy one is the measure.
        usual = statistics.median_low(relative)
        if usual <= 0:
            return []
        for history, value in zip(self._last, relative, strict=True):
            history.append(value / usual)
        lines = []
        limits = list(self.limits)
        for worker, history in enumerate(self._last):
            if len(history) < self._options.patience:
                continue
            free = limits[worker] == self._segments
            if free and min(history) > self._options.slow:
                limits[worker] = self._deepest(statistics.median(history))
                lines.append(
                    f"worker {worker} takes {statistics.median(history):.2g} times the usual time: "
                    f"depth at most {limits[worker]} of {self._segments} until it keeps up again"
                )
            elif not free and max(history) < self._options.well:
                limits[worker] = self._segments
                lines.append(f"worker {worker} keeps up again: any depth")
        self.limits = tuple(limits)
        return lines

    def _cost(self, depth: int) -> float:
        return self._forward + self._backward * depth / self._segments

    def _deepest(self, slowness: float) -> int:
        full = self._cost(self._segments)
        keeps_up = [d for d in range(1, self._segments) if slowness * self._cost(d) <= full]
        return max(keeps_up, default=1)

"""The tasks of one iteration: which are ready, who runs which, what each is predicted to take. Pure bookkeeping.

A task is handed out with a claim's number. When its holder is lost it is ready again, and what the holder may still
say about it no longer counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dovetail.planning.dispatch import SMOOTHING

from .division import Division
from .messages import Done, Released, Task, TaskFailed


@dataclass(frozen=True)
class Held:
    """A task that runs."""

    worker: int
    claim: int
    since: float
    until: float
    """When it is predicted to have ended."""


class Iteration:
    """Of one job; the same object for all its iterations."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._learnt: dict[tuple[int, int], float] = {}
        self._claims = 0
        self.number = -1
        self.depths: tuple[int, ...] = ()
        """Of each worker, in segments."""
        self.ready: list[int] = []
        """Workers whose tasks nobody has, the longest last."""
        self.held: dict[Hashable, Held] = {}
        self.done: dict[int, Done] = {}
        self.released = 0.0

    @property
    def complete(self) -> bool:
        return self.number >= 0 and len(self.done) == len(self._division.batches)

    @property
    def begun(self) -> bool:
        return bool(self.held or self.done)

    def release(self, number: int, depths: Sequence[int], now: float) -> None:
        assert not self.held, "a barrier comes between"
        self.number, self.depths, self.released = number, tuple(depths), now
        self.done = {}
        self.ready = sorted(range(len(depths)), key=self._order)

    def predicted(self, worker: int) -> float:
        """Seconds; 0 while nothing is known."""
        depth, samples = self.depths[worker], self._division.batches[worker]
        known = self._learnt.get((depth, samples))
        if known is not None:
            return known
        return self._division.seconds(worker, depth) if self._division.timed else 0.0

    def claim(self, holder: Hashable, now: float) -> Task | None:
        """The longest ready task. A holder that asks again has given up what it had."""
        self.lose(holder)
        if not self.ready:
            return None
        worker = self.ready.pop()
        self._claims += 1
        seconds = self.predicted(worker)
        self.held[holder] = Held(worker, self._claims, now, now + seconds)
        return Task(
            iteration=self.number,
            worker=worker,
            depth=self._depth(worker),
            samples=self._division.samples(worker),
            seconds=seconds,
            claim=self._claims,
        )

    def has(self, holder: Hashable, said: Done | TaskFailed) -> bool:
        """Whether the holder has the task that it speaks of."""
        held = self.held.get(holder)
        return held is not None and (said.iteration, said.worker) == (self.number, held.worker)

    def end(self, holder: Hashable, done: Done) -> bool:
        """Whether this is the end of a task that the holder has; anything else is late or twice."""
        if not self.has(holder, done):
            return False
        del self.held[holder]
        self.done[done.worker] = done
        key = self.depths[done.worker], self._division.batches[done.worker]
        seconds = max(0.0, done.stop - done.start)
        before = self._learnt.get(key, seconds)
        self._learnt[key] = before + SMOOTHING * (seconds - before)
        return True

    def lose(self, holder: Hashable) -> int | None:
        """The holder is gone: the worker whose task is ready again, if it had one."""
        held = self.held.pop(holder, None)
        if held is None:
            return None
        self.ready = sorted([*self.ready, held.worker], key=self._order)
        return held.worker

    def overdue(self, now: float, limit: float) -> list[Hashable]:
        """Holders whose tasks have been running for longer than that."""
        return [holder for holder, held in self.held.items() if now - held.since > limit]

    def until(self, now: float) -> float:
        """When all that run are predicted to have ended."""
        return max((held.until for held in self.held.values()), default=now)

    def left(self) -> Released:
        """What nobody has taken."""
        return Released(
            iteration=self.number,
            workers=tuple(self.ready),
            seconds=tuple(self.predicted(worker) for worker in self.ready),
            depths=tuple(self._depth(worker) for worker in self.ready),
            at=self.released,
            width=len(self.depths),
            until=self.until(0.0),
        )

    def _depth(self, worker: int) -> int:
        depth = self.depths[worker]
        return 0 if depth == self._division.segments else depth

    def _order(self, worker: int) -> tuple[float, int, int, int]:
        """Longest last; where nothing is known, by depth and samples; then the first worker first."""
        return self.predicted(worker), self.depths[worker], self._division.batches[worker], -worker

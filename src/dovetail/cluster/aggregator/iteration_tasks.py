"""The tasks of one iteration: which are ready, who runs which, what each is predicted to take. Pure bookkeeping.

A task is offered under a number, and whoever locks the number has it (see `arena`). When its holder is lost it is
offered again under a new one, and what the holder may still say about it no longer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from dovetail.cluster.job.division import Division
from dovetail.cluster.transport.messages import Done, Offered, Released, Task, TaskFailed, Took
from dovetail.planning.sharing.dispatch import SMOOTHING


@dataclass(frozen=True)
class Held:
    """A task that somebody has."""

    worker: int
    since: float
    seconds: float
    """What it is predicted to take."""


class Iteration:
    """Of one job; the same object for all its iterations."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._learnt: dict[tuple[int, int], float] = {}
        self._offers = 0
        self.number = -1
        self.depths: tuple[int, ...] = ()
        """Of each worker, in segments."""
        self.ready: list[Task] = []
        """What nobody has, as far as we know, the longest last."""
        self.held: dict[Hashable, Held] = {}
        self.done: dict[int, Done] = {}
        self.released = 0.0
        self.first = 1
        """The smallest number under which a task of this iteration was offered."""

    @property
    def complete(self) -> bool:
        return self.number >= 0 and len(self.done) == len(self._division.batches)

    def prepare(self, number: int, depths: Sequence[int]) -> None:
        """The next one: its tasks are known."""
        assert not self.held, "a barrier comes between"
        self.number, self.depths, self.first = number, tuple(depths), self._offers + 1
        self.done = {}
        self.ready = self._offered(range(len(depths)))

    def predicted(self, worker: int) -> float:
        """Seconds; 0 while nothing is known."""
        depth, samples = self.depths[worker], self._division.batches[worker]
        known = self._learnt.get((depth, samples))
        if known is not None:
            return known
        return self._division.seconds(worker, depth) if self._division.timed else 0.0

    def took(self, holder: Hashable, said: Took) -> bool:
        """Whether the holder has it now: it may have locked a number that counts no more."""
        for task in self.ready:
            if (task.iteration, task.worker, task.claim) == (said.iteration, said.worker, said.claim):
                self._hold(holder, task, said.at)
                return True
        return False

    def claim(self, holder: Hashable, now: float, lock: Callable[[Task], bool]) -> Task | None:
        """The longest ready task that can be locked for the holder."""
        for task in reversed(self.ready):
            if lock(task):
                self._hold(holder, task, now)
                return task
        return None

    def _hold(self, holder: Hashable, task: Task, now: float) -> None:
        assert holder not in self.held, "one at a time"
        self.ready.remove(task)
        self.held[holder] = Held(task.worker, now, task.seconds)

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

    def lose(self, holder: Hashable) -> None:
        """The holder is gone, or has given up what it had: that is ready again.

        It may have locked another number and not lived to say so: whatever is ready gets a new one.
        """
        held = self.held.pop(holder, None)
        self.ready = self._offered([*(task.worker for task in self.ready), *([held.worker] if held else [])])

    def overdue(self, now: float, limit: float) -> list[Hashable]:
        """Holders whose tasks have been running for longer than that."""
        return [holder for holder, held in self.held.items() if now - self._began(held) > limit]

    def until(self, now: float) -> float:
        """When all that run are predicted to have ended."""
        return max((self._began(held) + held.seconds for held in self.held.values()), default=now)

    def _began(self, held: Held) -> float:
        return max(held.since, self.released)

    def offered(self) -> Offered:
        """What nobody has taken."""
        return Offered(iteration=self.number, tasks=tuple(self.ready), width=len(self.depths))

    def release(self, now: float) -> None:
        """Its tasks may start; those that are taken do."""
        self.released = now

    def going(self) -> Released:
        gone = tuple(held.worker for held in self.held.values())
        return Released(iteration=self.number, at=self.released, gone=gone, until=self.until(0.0))

    def _offered(self, workers: Iterable[int]) -> list[Task]:
        return [self._offer(worker) for worker in sorted(workers, key=self._order)]

    def _offer(self, worker: int) -> Task:
        self._offers += 1
        depth = self.depths[worker]
        return Task(
            iteration=self.number,
            worker=worker,
            depth=0 if depth == self._division.segments else depth,
            samples=self._division.samples(worker),
            seconds=self.predicted(worker),
            claim=self._offers,
        )

    def _order(self, worker: int) -> tuple[float, int, int, int]:
        """Longest last; where nothing is known, by depth and samples; then the first worker first."""
        return self.predicted(worker), self.depths[worker], self._division.batches[worker], -worker

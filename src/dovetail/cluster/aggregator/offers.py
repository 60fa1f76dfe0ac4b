"""An iteration's tasks on their way from the aggregator to executors and back: offered, taken, done, or offered again.

`IterationTasks` keeps the books: which tasks are ready, which executor runs which, what each is predicted to take. A
task is offered under a number, and the executor that locks the number in the arena has it (see `job.arena`). When that
executor is lost, the task is offered again under a new number, and messages about the old one no longer count.

`Offers` talks to the members, the executors that serve the job. Tasks are offered as soon as they are known and may
start when they are released. A member that shares the arena takes tasks by itself and says so; one that does not sends
a Claim. The task of a member that is lost, or gives up, is offered to the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from dovetail.cluster.job.arena import Arena
from dovetail.cluster.job.division import Division
from dovetail.cluster.transport.messages import Claim, Done, Message, Offered, Released, Taken, Task, TaskFailed, Took
from dovetail.planning.sharing.dispatch import SMOOTHING

from .members import Member, Members

log = logging.getLogger("dovetail")
QUIET, LONGEST_QUIET = 0.01, 0.001
"""Pause after a release before messages are read: a share of the shortest task, and at most so many seconds."""


@dataclass(frozen=True)
class AssignedTask:
    """A task that an executor has."""

    worker: int
    since: float
    seconds: float
    """Predicted seconds."""


class IterationTasks:
    """The tasks of a job's present iteration; one object for all its iterations. Pure bookkeeping."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._learnt: dict[tuple[int, int], float] = {}
        self._offers = 0
        self.number = -1
        self.depths: tuple[int, ...] = ()
        """Depth of each worker, in segments."""
        self.ready: list[Task] = []
        """Tasks that no executor has, as far as we know, the longest last."""
        self.assigned: dict[Hashable, AssignedTask] = {}
        """The task of each executor that has one."""
        self.done: dict[int, Done] = {}
        self.released = 0.0
        self.first = 1
        """The smallest number under which a task of this iteration was offered."""

    @property
    def complete(self) -> bool:
        return self.number >= 0 and len(self.done) == len(self._division.batches)

    def prepare(self, number: int, depths: Sequence[int]) -> None:
        """Begins the next iteration: its tasks are ready."""
        assert not self.assigned, "the iteration before has ended"
        self.number, self.depths, self.first = number, tuple(depths), self._offers + 1
        self.done = {}
        self.ready = self._offered(range(len(depths)))

    def predicted(self, worker: int) -> float:
        """Predicted seconds of a worker's task; 0 while nothing is known."""
        depth, samples = self.depths[worker], self._division.batches[worker]
        known = self._learnt.get((depth, samples))
        if known is not None:
            return known
        return self._division.seconds(worker, depth) if self._division.timed else 0.0

    def took(self, executor: Hashable, said: Took) -> bool:
        """Whether the executor now has the task; not if it locked a number that no longer counts."""
        for task in self.ready:
            if (task.iteration, task.worker, task.claim) == (said.iteration, said.worker, said.claim):
                self._assign(executor, task, said.at)
                return True
        return False

    def claim(self, executor: Hashable, now: float, lock: Callable[[Task], bool]) -> Task | None:
        """Assigns the longest ready task that can be locked for the executor."""
        for task in reversed(self.ready):
            if lock(task):
                self._assign(executor, task, now)
                return task
        return None

    def _assign(self, executor: Hashable, task: Task, now: float) -> None:
        assert executor not in self.assigned, "one at a time"
        self.ready.remove(task)
        self.assigned[executor] = AssignedTask(task.worker, now, task.seconds)

    def has(self, executor: Hashable, said: Done | TaskFailed) -> bool:
        """Whether the executor has the task that its message is about."""
        assigned = self.assigned.get(executor)
        return assigned is not None and (said.iteration, said.worker) == (self.number, assigned.worker)

    def end(self, executor: Hashable, done: Done) -> bool:
        """Whether this ended a task that the executor has; otherwise the message is late or repeated."""
        if not self.has(executor, done):
            return False
        del self.assigned[executor]
        self.done[done.worker] = done
        key = self.depths[done.worker], self._division.batches[done.worker]
        seconds = max(0.0, done.stop - done.start)
        before = self._learnt.get(key, seconds)
        self._learnt[key] = before + SMOOTHING * (seconds - before)
        return True

    def lose(self, executor: Hashable) -> None:
        """The executor is lost, or has given up its task: that is ready again.

        It may have locked another number and died before it said so: every ready task gets a new number.
        """
        assigned = self.assigned.pop(executor, None)
        self.ready = self._offered([*(task.worker for task in self.ready), *([assigned.worker] if assigned else [])])

    def overdue(self, now: float, limit: float) -> list[Hashable]:
        """Executors whose tasks have been running for longer than `limit` seconds."""
        return [executor for executor, task in self.assigned.items() if now - self._began(task) > limit]

    def until(self, now: float) -> float:
        """Predicted end of all tasks that run; `now` if none does."""
        return max((self._began(task) + task.seconds for task in self.assigned.values()), default=now)

    def _began(self, task: AssignedTask) -> float:
        return max(task.since, self.released)

    def offered(self) -> Offered:
        """The message with the ready tasks."""
        return Offered(iteration=self.number, tasks=tuple(self.ready), width=len(self.depths))

    def release(self, now: float) -> None:
        """Releases the iteration: its tasks may start, and those that are taken start now."""
        self.released = now

    def release_message(self) -> Released:
        taken = tuple(task.worker for task in self.assigned.values())
        return Released(iteration=self.number, at=self.released, taken=taken, until=self.until(0.0))

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
        """Sort key: longest last; where nothing is known, by depth and samples; then the first worker first."""
        return self.predicted(worker), self.depths[worker], self._division.batches[worker], -worker


class Offers:
    """Offers the tasks of a job's present iteration; one object for all its iterations."""

    def __init__(self, tasks: IterationTasks, arena: Arena, members: Members) -> None:
        self._tasks, self._arena, self._members = tasks, arena, members
        self._workers = tuple(range(arena.workers))
        self._released = self._withdrawn = False
        self._offered_at = 0.0

    def prepare(self, number: int, depths: Sequence[int]) -> None:
        """Offers the next iteration. A member that serves no other job may take a task before it is released."""
        self._released = False
        self._tasks.prepare(number, depths)
        self._offer()
        self._arena.forget(self._tasks.first)

    def release(self, now: float) -> None:
        self._released, self._offered_at = True, now
        self._tasks.release(now)
        self._members.send_all(self._tasks.release_message())
        self._pause()

    def _pause(self) -> None:
        """Leaves the cores to the members that take tasks now; after the pause one read gets all their messages."""
        if not any(member.peer for member in self._members.joined):
            time.sleep(min(LONGEST_QUIET, QUIET * min(map(self._tasks.predicted, self._workers))))

    def withdraw(self) -> None:
        """No more tasks may be taken: the job is to stop."""
        self._withdrawn = True
        self._arena.withdraw([task.worker for task in self._tasks.ready])

    # -- messages of members --

    def joined(self, member: Member) -> None:
        self._members.send(member, *self._messages())

    def heard(self, member: Member, message: Message) -> None:
        if isinstance(message, Took):
            self._took(member, message)
        elif isinstance(message, Claim):
            self._claimed(member)
        elif isinstance(message, Done):
            self._done(member, message)

    def lost(self, member: Member) -> None:
        self._tasks.lose(member)
        self._offer()

    def check_overdue(self, now: float, limit: float) -> None:
        """Drops members whose task has been running for longer than `limit` seconds. To be called now and then."""
        if not self._released:
            return
        for member in self._tasks.overdue(now, limit):
            assert isinstance(member, Member)
            log.warning("device %d did not end its task within %.0f s", member.device, limit)
            self._members.drop(member)
        if now - self._offered_at > limit:  # a member may have locked a task and been stuck since
            self._tasks.lose(None)
            self._offer()

    def _took(self, member: Member, message: Took) -> None:
        self._given_up(member)
        if not self._withdrawn and self._tasks.took(member, message):
            self._taken(message.at)

    def _claimed(self, member: Member) -> None:
        self._given_up(member)
        if member not in self._members.connected:
            return
        now, task = time.monotonic(), None
        if self._released:
            task = self._tasks.claim(member, now, lambda task: self._arena.claim(task.worker, task.claim))
        if task is None:
            self._members.send(member, Task(iteration=self._tasks.number))
        elif self._members.send(member, self._members.prepare(member, task)):
            self._taken(now)

    def _done(self, member: Member, message: Done) -> None:
        if self._tasks.has(member, message) and self._members.collect(member, message.worker):
            self._arena.withdraw([message.worker])
            self._tasks.end(member, message)

    def _given_up(self, member: Member) -> None:
        """A member that takes another task, or none, has given up the one it had, if any."""
        if member in self._tasks.assigned:
            self.lost(member)

    # -- messages to members --

    def _offer(self) -> None:
        """Offers the ready tasks under their present numbers; older numbers no longer count."""
        self._offered_at = time.monotonic()
        if self._tasks.ready and not self._withdrawn:
            self._arena.offer(self._tasks.ready)
            self._members.send_all(*self._messages())

    def _messages(self) -> list[Message]:
        """The messages that tell a member of the present iteration."""
        return [self._tasks.offered(), *([self._tasks.release_message()] if self._released else [])]

    def _taken(self, at: float) -> None:
        if self._released and not self._tasks.ready:
            number, until = self._tasks.number, self._tasks.until(at)
            self._members.send_all(Taken(iteration=number, workers=self._workers, until=until, at=at))

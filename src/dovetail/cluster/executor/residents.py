"""A job on this device, as its aggregator's messages tell of it: a `planning.dispatch.Resident` that lives.

Offered tells of an iteration's tasks and Released lets them start; Taken and what we take ourselves make them fewer;
Barrier says when the next ones will come. `pick` then decides as it does in the simulator. What a live job adds: its
aggregator may be away, its clock another machine's, its predictions missing or late, a task may be gone before we hear
of it, and an answer may take its time.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from dovetail.cluster.output import Log
from dovetail.cluster.transport.messages import Barrier, Grant, Message, Offered, Released, Taken, Task, Took, Welcome
from dovetail.cluster.transport.wire import Connection
from dovetail.core.job import Shape
from dovetail.planning.sharing.dispatch import Resident

from .gaps import PATIENCE, TOLERANCE, Filled, Promise
from .loader import Runs

UNKNOWN = 1e-9
"""Seconds of a task that nobody has seen yet, for want of better: it may run once anywhere."""
_keys = itertools.count()


@dataclass(frozen=True)
class Offer:
    """An iteration's tasks as this device would take them."""

    iteration: int = -1
    tasks: dict[int, Task] = field(default_factory=dict)
    """By worker, the one to take first last."""
    shape: Shape = field(default_factory=lambda: empty_shape())
    width: int = 1


class Live(Resident):
    """One granted job. Times are of this machine's time.monotonic()."""

    def __init__(self, grant: Grant, device: int, filled: Filled, *, node: str) -> None:
        super().__init__(next(_keys), empty_shape(), (device,), grant.rank)
        self.filled, self._node = filled, node
        self.promise: Promise | None = None
        self.since = time.monotonic()
        self.runner: Runs | None = None
        self.log: Log | None = None
        self._nominal: dict[int, float] = {}  # depth: the figure under which `learnt` has its seconds
        self._fillers = filled.count
        self._pause, self._width = 0.0, 1
        self.regrant(grant)
        self.disconnected(drop=True)

    def regrant(self, grant: Grant) -> None:
        """The same start of the job with another rank, or its next start."""
        self.grant, self.rank, self.background = grant, grant.rank, grant.rank[0]
        self._elsewhere = bool(grant.node and self._node and grant.node != self._node)  # with another clock
        if not grant.foreground:
            self.promise = None
        elif self.promise is None:
            self.promise = Promise(grant.bound / self._width, time.monotonic())
        else:
            self.promise.bound = grant.bound / self._width

    def disconnected(self, *, drop: bool) -> None:
        """No tasks until the aggregator, or the next one, says so. `drop`: its tensors are gone with it."""
        self.connection: Connection | None = None
        self.welcome: Welcome | None = None
        self.iteration = -1
        self.unsaid: list[Message] = []
        """What the aggregator is to hear, soon (`Tenants.speak`)."""
        self.claimed = False
        """An answer to a Claim is due."""
        self.assigned: Task | None = None
        """A task that is ours and has not begun."""
        self.reserved: Task | None = None
        """One of the next iteration, which begins with its release."""
        self.failed = False
        """Its code cannot be loaded here; only another start can change that."""
        self.retry_at, self._pause = time.monotonic() + self._pause, min(2.0, max(0.1, 2 * self._pause))
        self._queue: list[int] = []
        self._offer, self._tried = Offer(), True
        self._tasks: dict[int, Task] = {}
        self._locked = False
        self._offset = float("inf")  # what to add to another machine's clock
        self._off_device, self._joined_at = 0.0, time.monotonic()
        self.ready_at = 0.0
        """Since when there has been a task to take, as far as we know."""
        self.released_at = 0.0
        """When the aggregator released the iteration, whoever was there to hear it."""
        self.left, self.eta, self.next_release = 0, 0.0, float("inf")
        self._show()
        if drop and self.runner is not None:
            self.runner.close()
            self.runner = None

    def fail(self) -> None:
        """Its code cannot be loaded here."""
        self.failed = True
        self._show()

    @property
    def job(self) -> str:
        return self.grant.job

    # -- what the aggregator says --

    def hear(self, message: Message, now: float) -> None:
        if isinstance(message, Released):
            self._released(message, now)
        elif isinstance(message, Offered):
            self._offer = self._offered(message)
        elif isinstance(message, Taken):
            if message.iteration == self.iteration:
                self._gone(message.workers, self._past(message.at, now))
                self.eta = self._coming(message.until, now)
        elif isinstance(message, Barrier):
            if message.iteration == self.iteration:
                at = self._past(message.at, now)
                self._count(at)
                self._queue, self.left = [], 0
                self.next_release = max(at, self._coming(message.until, now))
                self._off_device = self.next_release - at
        elif isinstance(message, Task):
            self.answered(message, now)
        elif isinstance(message, Welcome):
            self.welcome, self._pause, self._joined_at = message, 0.0, now
        self._show()

    def _offered(self, message: Offered) -> Offer:
        """Longest last; among equals every device begins with another, so that they rarely want the same."""
        width = max(1, message.width, len(message.tasks))
        queue = sorted(message.tasks, key=lambda t: (*_length(t), -((t.worker - self.devices[0]) % width)))
        self._tried = False
        self.assigned, self.reserved = self._still(self.assigned, message), self._still(self.reserved, message)
        if self._locked and message.tasks and message.iteration > max(self.iteration, self._offer.iteration):
            assert self.runner is not None
            self.runner.forget(min(task.claim for task in message.tasks))  # the iteration before is over
            self._locked = False
        seconds = [UNKNOWN] * (1 + max((task.worker for task in queue), default=-1))
        for task in queue:
            seconds[task.worker] = self._profiled(task.depth, task.seconds)
        shape = _shape(tuple(seconds), self._off_device)
        return Offer(message.iteration, {task.worker: task for task in queue}, shape, width)

    def _still(self, ours: Task | None, message: Offered) -> Task | None:
        """A task of ours that has not begun, unless it is over by now, or offered to all under a new number."""
        if ours is None or not ours.claim:
            return ours
        again = any(task.worker == ours.worker and task.claim != ours.claim for task in message.tasks)
        return None if again or ours.iteration < message.iteration else ours

    def _released(self, message: Released, now: float) -> None:
        again = message.iteration == self.iteration  # somebody who had a task is lost
        at = now if again else max(self._joined_at, self._past(message.at, now))
        self._count(at)
        if self.iteration < 0 and self.promise is not None and not self.promise.delay:
            self.promise.since = at
        if not again:
            self.released_at = self._past(message.at, now)
        offer = self._offer
        assert offer.iteration == message.iteration, "it was offered before"
        self.iteration = message.iteration
        self.assigned, self.reserved = self.reserved or self.assigned, None
        own = self.assigned.worker if self.assigned is not None else -1
        self._tasks = offer.tasks
        self._queue = [worker for worker in offer.tasks if worker not in message.gone and worker != own]
        if self.promise is not None and offer.width > self._width:
            # Whichever device is late, the whole iteration is: each has its share of what the job accepts.
            self._width = offer.width
            self.promise.bound = self.grant.bound / self._width
        self.shape, self.stage = offer.shape, 0
        eta = max(at, self._coming(message.until, now)) if message.until else at
        self.left, self.eta, self.next_release = max(1, len(self._queue)), eta, 0.0
        self.ready_at = at

    def _profiled(self, depth: int, seconds: float) -> float:
        """The figure that stands for the depth: what was said last, until a task of it has been seen here."""
        known = self._nominal.get(depth)
        if known is None or known not in self.learnt:
            known = self._nominal[depth] = seconds if seconds > 0 else UNKNOWN * (1 + depth)
        return known

    def _past(self, theirs: float, now: float) -> float:
        """A moment that the aggregator has seen, on our clock. Another machine's is known from its quickest message."""
        if not theirs:
            return now
        if not self._elsewhere:
            return min(theirs, now)
        self._offset = min(self._offset, now - theirs)
        return theirs + self._offset

    def _coming(self, theirs: float, now: float) -> float:
        """A moment that it predicts; now, which makes it late, where its clock is not known yet."""
        if not self._elsewhere:
            return theirs
        return theirs + self._offset if self._offset < float("inf") else now

    # -- what we take --

    @property
    def open(self) -> bool:
        """Whether there may be a task that can be taken without a question."""
        return bool(self._queue) and self._shares(self._tasks[self._queue[-1]])

    def _shares(self, task: Task) -> bool:
        return bool(task.claim and self.runner is not None and self.welcome is not None and self.welcome.memory)

    def lock(self, now: float) -> None:
        """Takes the longest task, if there is one: what others have meanwhile is found out on the way."""
        while self.open:
            task = self._tasks[self._queue[-1]]
            if self._ours(task, now):
                self.answered(task, now)
                return
            self._gone((task.worker,), now)
        self._show()

    def reserve(self) -> None:
        """Takes the longest task of an iteration that is not released yet: only where nobody else is served."""
        if self._tried or self.runner is None or self._offer.iteration <= self.iteration or self.reserved is not None:
            return
        self._tried, now = True, time.monotonic()
        tasks = reversed(self._offer.tasks.values())
        self.reserved = next((task for task in tasks if self._shares(task) and self._ours(task, now)), None)

    def _ours(self, task: Task, now: float) -> bool:
        assert self.runner is not None
        if not self.runner.claim(task):
            return False
        self._locked = True
        self.unsaid.append(Took(iteration=task.iteration, worker=task.worker, claim=task.claim, at=now))
        return True

    def give_up(self) -> None:
        """Others go first here: whoever is idle may have what was taken and has not begun."""
        ours = self.assigned or self.reserved
        if ours is not None and self._shares(ours):
            self.assigned = self.reserved = None
            self.unsaid.append(Took(iteration=ours.iteration))
            self._show()

    def claiming(self) -> None:
        """A Claim is on its way: until it is answered nothing more is asked for."""
        self.claimed = True
        self._show()

    def answered(self, task: Task, now: float) -> None:
        """The task is ours, or there was none left."""
        self.claimed = False
        if task.worker >= 0:
            self._gone((task.worker,), now)
            self.assigned = task
        elif task.iteration == self.iteration:
            self._count(now)
            self._queue = []
        self._show()

    def begin(self, now: float) -> tuple[Task, float]:
        """The assigned task starts now: with it, the figure to `observe` it under."""
        task = self.assigned
        assert task is not None
        self._count(now)
        self.assigned = None
        profiled = self._profiled(task.depth, task.seconds)
        self.eta = max(self.eta, now + self.predicted(profiled))
        self._show()
        return task, profiled

    def _gone(self, workers: tuple[int, ...], at: float) -> None:
        """Somebody has these tasks."""
        self._count(at)
        self._queue = [worker for worker in self._queue if worker not in workers]

    def _count(self, at: float) -> None:
        """Where tasks were ready since `ready_at`: whatever a filler took of the time until `at` was this job's."""
        if self.promise is None or not (self._queue or self.assigned):
            return
        lost = self.filled.overlap(self.ready_at, at)
        if lost > 0:
            self.promise.delayed(time.monotonic(), lost)
        if self.filled.count > self._fillers:
            self._fillers = self.filled.count
            if lost <= TOLERANCE:
                self.promise.clean(time.monotonic())
        self.ready_at = max(self.ready_at, at)

    def _show(self) -> None:
        """What `pick` sees: an assigned task first; nothing while an answer is due."""
        if self.assigned is None:
            self.ready = [] if self.claimed or self.failed else self._queue
            return
        worker, tasks = self.assigned.worker, self.shape.tasks[0]
        profiled = self._profiled(self.assigned.depth, self.assigned.seconds)
        if worker >= len(tasks) or tasks[worker] != profiled:
            longer = [*tasks, *[UNKNOWN] * (worker + 1 - len(tasks))]
            longer[worker] = profiled
            self.shape = _shape(tuple(longer), self._off_device)
        self.ready = [worker]

    # -- what others may do meanwhile --

    def spares(self, device: int, now: float, seconds: float) -> bool:
        """As in the simulator, with the promise's margin; and a job that is late may be late for long."""
        if self.claimed or self.assigned is not None:
            return False
        room = self.wanted(device) - now
        if room <= 0 and not self.ready:
            room = PATIENCE * -room
        if self.promise is not None:
            return self.promise.allows(now, seconds, room)
        return seconds - 1e-9 <= room


def _length(task: Task) -> tuple[float, bool, int, int]:
    """By what is predicted; where nothing is known yet, by depth and samples."""
    return task.seconds, not task.depth, task.depth, task.samples[1] - task.samples[0]


def empty_shape() -> Shape:
    """Of a job that offers nothing yet."""
    return _shape((), 0.0)


def _shape(tasks: tuple[float, ...], off_device: float) -> Shape:
    """One stage by worker, any of which any device may run. What admission needs to know is not known here."""
    return Shape(
        tasks=(tasks,),
        off_device=off_device,
        persistent_bytes=0,
        ephemeral_bytes=0,
        pinned=False,
        progress=1.0,
        width=len(tasks),
        work=0.0,
        period=0.0,
        duty=0.0,
    )

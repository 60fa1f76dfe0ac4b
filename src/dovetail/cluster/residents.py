"""A job on this device, as its aggregator's messages tell of it: a `planning.dispatch.Resident` that lives.

Released makes tasks ready, Taken and the answers to our own Claims take them away, Barrier says when the next ones
will come. `pick` then decides as it does in the simulator. What a live job adds: its aggregator may be away, its
clock another machine's, its predictions missing or late, and an answer to a Claim may take its time.
"""

from __future__ import annotations

import itertools
import time

from dovetail.core.job import Shape
from dovetail.planning.dispatch import Resident

from .gaps import PATIENCE, TOLERANCE, Filled, Promise
from .messages import Barrier, Grant, Message, Released, Taken, Task, Welcome
from .opening import Runs
from .output import Log
from .wire import Connection

UNKNOWN = 1e-9
"""Seconds of a task that nobody has seen yet, for want of better: it may run once anywhere."""
_keys = itertools.count()


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
        self.claimed = False
        """An answer to a Claim is due."""
        self.assigned: Task | None = None
        """A task that is ours and has not begun."""
        self.failed = False
        """Its code cannot be loaded here; only another start can change that."""
        self.retry_at, self._pause = time.monotonic() + self._pause, min(2.0, max(0.1, 2 * self._pause))
        self._queue: list[int] = []
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
        elif isinstance(message, Taken):
            if message.iteration == self.iteration:
                self._gone(message.worker, self._past(message.at, now))
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

    def _released(self, message: Released, now: float) -> None:
        again = message.iteration == self.iteration  # somebody who had a task is lost
        at = now if again else max(self._joined_at, self._past(message.at, now))
        self._count(at)
        if self.iteration < 0 and self.promise is not None and not self.promise.delay:
            self.promise.since = at
        if not again:
            self.released_at = self._past(message.at, now)
        self.iteration, self._queue = message.iteration, list(message.workers)
        width = max(message.width, len(message.workers))
        if self.promise is not None and width > self._width:
            # Whichever device is late, the whole iteration is: each has its share of what the job accepts.
            self._width = width
            self.promise.bound = self.grant.bound / self._width
        depths = message.depths or (0,) * len(message.workers)
        tasks = [UNKNOWN] * (1 + max(message.workers, default=-1))
        for worker, depth, seconds in zip(message.workers, depths, message.seconds, strict=False):
            tasks[worker] = self._profiled(depth, seconds)
        self.shape, self.stage = _shape(tuple(tasks), self._off_device), 0
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

    # -- our own Claims --

    @property
    def between(self) -> bool:
        """Whether an iteration is over and the next one not released: nothing to ask for but that one's tasks."""
        return self.iteration >= 0 and not self.left and not self.claimed and self.assigned is None

    def claiming(self) -> None:
        """A Claim is on its way: until it is answered nothing more is asked for."""
        self.claimed = True
        self._show()

    def answered(self, task: Task, now: float) -> None:
        """The task is ours, or there was none left."""
        self.claimed = False
        if task.worker >= 0:
            self._gone(task.worker, now)
            self.assigned = task
        elif task.iteration == self.iteration:
            self._count(now)
            self._queue = []
        self._show()

    def begin(self, now: float) -> tuple[Task, float]:
        """The assigned task starts now: with it, the figure to `observe` it under."""
        task = self.assigned
        assert task is not None
        self.assigned = None
        profiled = self._profiled(task.depth, task.seconds)
        self.eta = max(self.eta, now + self.predicted(profiled))
        self._show()
        return task, profiled

    def _gone(self, worker: int, at: float) -> None:
        """Somebody has the task."""
        self._count(at)
        if worker in self._queue:
            self._queue.remove(worker)

    def _count(self, at: float) -> None:
        """Where tasks were ready since `ready_at`: whatever a filler took of the time until `at` was this job's."""
        if self.promise is None or not self._queue:
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

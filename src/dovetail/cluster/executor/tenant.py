"""One tenant: a job that this device serves, as its aggregator's messages describe it.

It is a `planning.sharing.dispatch.Resident`, so that `pick` decides for live jobs as it does in the simulator. Offered
brings an iteration's tasks and Released lets them start; Taken, and the tasks that we take ourselves, make them fewer;
Barrier announces the next ones. Unlike in the simulator the aggregator may be lost, its clock may be another
machine's, predictions may be missing or late, a task may be taken before we hear of it, and answers take time.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Protocol

from dovetail.cluster.output import Log
from dovetail.cluster.transport.messages import (
    Barrier,
    Done,
    GrantLease,
    Message,
    Offered,
    Released,
    Taken,
    Task,
    Took,
    Welcome,
)
from dovetail.cluster.transport.wire import Connection
from dovetail.core.job import Shape
from dovetail.planning.sharing.dispatch import Resident

from .gaps import PATIENCE, TOLERANCE, LastBackgroundTask, Promise

UNKNOWN = 1e-9
"""Assumed seconds of a task that has never run: so short that it may run once anywhere."""
_keys = itertools.count()


class JobRunner(Protocol):
    """A job that is loaded into this process."""

    def claim(self, task: Task) -> bool:
        """Locks the task in the job's shared memory; False if another executor has it."""
        ...

    def forget(self, number: int) -> None:
        """Unlocks all claims below `number`."""
        ...

    def run(self, task: Task) -> Done | None:
        """Runs the task; None if its result is no longer wanted."""
        ...

    def prefetch(self, iteration: int) -> None:
        """Begins to bring the iteration's parameters to the device, while another job's task computes there."""
        ...

    def close(self) -> None:
        """Gives the job's memory back."""
        ...


@dataclass(frozen=True)
class Offer:
    """An iteration's tasks in the order in which this device would take them."""

    iteration: int = -1
    tasks: dict[int, Task] = field(default_factory=dict)
    """Tasks by worker; the last one is taken first."""
    shape: Shape = field(default_factory=lambda: empty_shape())
    width: int = 1


class Tenant(Resident):
    """One job with a lease of this device. Times are of this machine's time.monotonic()."""

    def __init__(self, lease: GrantLease, device: int, last_background: LastBackgroundTask, *, node: str) -> None:
        super().__init__(next(_keys), empty_shape(), (device,), lease.priority)
        self.last_background, self._node = last_background, node
        self.promise: Promise | None = None
        self.since = time.monotonic()
        self.runner: JobRunner | None = None
        self.log: Log | None = None
        self._nominal: dict[int, float] = {}  # by depth: the prediction under which `learnt` has the measured seconds
        self._background_seen = last_background.count
        self._pause, self._width = 0.0, 1
        self.renew(lease)
        self.disconnected(drop=True)

    def renew(self, lease: GrantLease) -> None:
        """Sets the lease: of the same attempt with another priority, or of the job's next attempt."""
        self.lease, self.precedence, self.background = lease, lease.priority, lease.priority[0]
        self._other_clock = bool(lease.node and self._node and lease.node != self._node)
        if not lease.foreground:
            self.promise = None
        elif self.promise is None:
            self.promise = Promise(lease.bound / self._width, time.monotonic())
        else:
            self.promise.bound = lease.bound / self._width

    def disconnected(self, *, drop: bool) -> None:
        """There are no tasks until the aggregator, or its successor, offers some. `drop`: its tensors are lost too."""
        self.connection: Connection | None = None
        self.welcome: Welcome | None = None
        self.iteration = -1
        self.unsent: list[Message] = []
        """Messages for the aggregator, which `Tenants.send` sends soon."""
        self.claimed = False
        """A Claim has been sent and not answered."""
        self.assigned: Task | None = None
        """A task that is ours and has not started."""
        self.reserved: Task | None = None
        """A task of the next iteration that is ours and starts with its release."""
        self.failed = False
        """The job's code cannot be loaded here; only another attempt can change that."""
        self.retry_at, self._pause = time.monotonic() + self._pause, min(2.0, max(0.1, 2 * self._pause))
        self._queue: list[int] = []
        self._offer, self._tried = Offer(), True
        self._tasks: dict[int, Task] = {}
        self._locked = False
        self._offset = float("inf")  # seconds to add to another machine's clock
        self._off_device, self._joined_at = 0.0, time.monotonic()
        self.ready_at = 0.0
        """Since when there has been a task to take, as far as we know."""
        self.released_at = 0.0
        """When the aggregator released the iteration, which may be before we joined."""
        self.left, self.eta, self.next_release = 0, 0.0, float("inf")
        self._update_ready()
        if drop and self.runner is not None:
            self.runner.close()
            self.runner = None

    def fail(self) -> None:
        """The job's code cannot be loaded here."""
        self.failed = True
        self._update_ready()

    @property
    def job(self) -> str:
        return self.lease.job

    # -- messages of the aggregator --

    def hear(self, message: Message, now: float) -> None:
        if isinstance(message, Released):
            self._released(message, now)
        elif isinstance(message, Offered):
            self._offer = self._offered(message)
        elif isinstance(message, Taken):
            if message.iteration == self.iteration:
                self._taken(message.workers, self._past(message.at, now))
                self.eta = self._coming(message.until, now)
        elif isinstance(message, Barrier):
            if message.iteration == self.iteration:
                at = self._past(message.at, now)
                self._count_delay(at)
                self._queue, self.left = [], 0
                self.next_release = max(at, self._coming(message.until, now))
                self._off_device = self.next_release - at
        elif isinstance(message, Task):
            self.answered(message, now)
        elif isinstance(message, Welcome):
            self.welcome, self._pause, self._joined_at = message, 0.0, now
        self._update_ready()

    def _offered(self, message: Offered) -> Offer:
        """Longest last; among equals every device begins with another one, so that they rarely want the same."""
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
        """A task of ours that has not started; None if its iteration is over or it is offered under a new number."""
        if ours is None or not ours.claim:
            return ours
        again = any(task.worker == ours.worker and task.claim != ours.claim for task in message.tasks)
        return None if again or ours.iteration < message.iteration else ours

    def _released(self, message: Released, now: float) -> None:
        again = message.iteration == self.iteration  # an executor that had a task is lost
        at = now if again else max(self._joined_at, self._past(message.at, now))
        self._count_delay(at)
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
        self._queue = [worker for worker in offer.tasks if worker not in message.taken and worker != own]
        if self.promise is not None and offer.width > self._width:
            # The iteration is late when any of its devices is: each gets its share of the bound.
            self._width = offer.width
            self.promise.bound = self.lease.bound / self._width
        self.shape, self.stage = offer.shape, 0
        eta = max(at, self._coming(message.until, now)) if message.until else at
        self.left, self.eta, self.next_release = max(1, len(self._queue)), eta, 0.0
        self.ready_at = at

    def _profiled(self, depth: int, seconds: float) -> float:
        """The prediction that stands for a depth: the newest one, until a task of that depth has run here."""
        known = self._nominal.get(depth)
        if known is None or known not in self.learnt:
            known = self._nominal[depth] = seconds if seconds > 0 else UNKNOWN * (1 + depth)
        return known

    def _past(self, theirs: float, now: float) -> float:
        """A past time of the aggregator on our clock. The clocks' offset is estimated from the quickest message."""
        if not theirs:
            return now
        if not self._other_clock:
            return min(theirs, now)
        self._offset = min(self._offset, now - theirs)
        return theirs + self._offset

    def _coming(self, theirs: float, now: float) -> float:
        """A time that the aggregator predicts, on our clock; `now` while the clocks' offset is unknown."""
        if not self._other_clock:
            return theirs
        return theirs + self._offset if self._offset < float("inf") else now

    # -- tasks that we take --

    @property
    def lockable(self) -> bool:
        """Whether there may be a task that can be taken by a lock, without a Claim."""
        return bool(self._queue) and self._shares_memory(self._tasks[self._queue[-1]])

    def _shares_memory(self, task: Task) -> bool:
        return bool(task.claim and self.runner is not None and self.welcome is not None and self.welcome.memory)

    def lock(self, now: float) -> None:
        """Takes the longest task, if one is left; tasks that others have taken meanwhile are dropped on the way."""
        while self.lockable:
            task = self._tasks[self._queue[-1]]
            if self._claim(task, now):
                self.answered(task, now)
                return
            self._taken((task.worker,), now)
        self._update_ready()

    def reserve(self) -> None:
        """Takes the longest task of an iteration that is not released yet. Only where no other job is served."""
        if self._tried or self.runner is None or self._offer.iteration <= self.iteration or self.reserved is not None:
            return
        self._tried, now = True, time.monotonic()
        tasks = reversed(self._offer.tasks.values())
        self.reserved = next((task for task in tasks if self._shares_memory(task) and self._claim(task, now)), None)

    def _claim(self, task: Task, now: float) -> bool:
        assert self.runner is not None
        if not self.runner.claim(task):
            return False
        self._locked = True
        self.unsent.append(Took(iteration=task.iteration, worker=task.worker, claim=task.claim, at=now))
        return True

    def give_up(self) -> None:
        """Another job goes first here: an idle executor may have the task that was taken and has not started."""
        ours = self.assigned or self.reserved
        if ours is not None and self._shares_memory(ours):
            self.assigned = self.reserved = None
            self.unsent.append(Took(iteration=ours.iteration))
            self._update_ready()

    def claiming(self) -> None:
        """A Claim has been sent: there is no other one until it is answered."""
        self.claimed = True
        self._update_ready()

    def answered(self, task: Task, now: float) -> None:
        """The task is ours, or no task was left (worker -1)."""
        self.claimed = False
        if task.worker >= 0:
            self._taken((task.worker,), now)
            self.assigned = task
        elif task.iteration == self.iteration:
            self._count_delay(now)
            self._queue = []
        self._update_ready()

    def begin(self, now: float) -> tuple[Task, float]:
        """The assigned task starts now; returned with it is the prediction to `observe` its seconds under."""
        task = self.assigned
        assert task is not None
        self._count_delay(now)
        self.assigned = None
        profiled = self._profiled(task.depth, task.seconds)
        self.eta = max(self.eta, now + self.predicted(profiled))
        self._update_ready()
        return task, profiled

    def _taken(self, workers: tuple[int, ...], at: float) -> None:
        """Executors, perhaps this one, have taken these workers' tasks."""
        self._count_delay(at)
        self._queue = [worker for worker in self._queue if worker not in workers]

    def _count_delay(self, at: float) -> None:
        """If tasks were ready since `ready_at`, charges what a background task took of the time until `at`."""
        if self.promise is None or not (self._queue or self.assigned):
            return
        delay = self.last_background.overlap(self.ready_at, at)
        if delay > 0:
            self.promise.delayed(time.monotonic(), delay)
        if self.last_background.count > self._background_seen:
            self._background_seen = self.last_background.count
            if delay <= TOLERANCE:
                self.promise.clean(time.monotonic())
        self.ready_at = max(self.ready_at, at)

    def _update_ready(self) -> None:
        """Sets what `pick` sees: an assigned task first; nothing while an answer is due."""
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
        """As in the simulator, but with the promise's margin, and a job that is late is expected to stay late."""
        if self.claimed or self.assigned is not None:
            return False
        room = self.wanted(device) - now
        if room <= 0 and not self.ready:
            room = PATIENCE * -room
        if self.promise is not None:
            return self.promise.allows(now, seconds, room)
        return seconds - 1e-9 <= room


def _length(task: Task) -> tuple[float, bool, int, int]:
    """Sort key: predicted seconds; where nothing is known yet, depth and samples."""
    return task.seconds, not task.depth, task.depth, task.samples[1] - task.samples[0]


def empty_shape() -> Shape:
    """The shape of a job that offers nothing yet."""
    return _shape((), 0.0)


def _shape(tasks: tuple[float, ...], off_device: float) -> Shape:
    """One stage with a task per worker, each of which any device may run. What only admission needs is left 0."""
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

"""Task level: every task of every iteration is an event.

A device that falls idle takes the task that `planning.sharing.dispatch.pick` chooses. When a job's last task of an
iteration has ended, the job is off its devices for a while, and then its next iteration is released. Only at such a
boundary does the engine return control to the controller, for jobs that have reached `until` or were interrupted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dovetail.core.job import Shape, TaskRun
from dovetail.planning.sharing.dispatch import Resident, pick
from dovetail.planning.sharing.policies import SchedulingPolicy
from dovetail.planning.sharing.priority import Precedence, Standing, precedence

TOGETHER = 1e-9
"""Events closer than this (seconds) happen at the same time: all of them, then dispatch."""
BOUNDARY, RELEASE = -1, -2
"""Events other than the end of a task on a device."""


@dataclass(frozen=True)
class Overheads:
    """What machines add to the jobs' own times."""

    jitter: float = 0.04
    """Coefficient of variation of a task's duration; real workers show 0.035–0.09."""
    switch: float = 0.002
    """Seconds that a device needs to turn to another job's task."""
    restart: float = 5.0
    """Seconds from the moment a preempted job gets devices again to its first task."""
    move: float = 1.0
    """Seconds for which a job pauses at an iteration boundary when its devices change: its weights are copied."""
    seed: int = 0


EXACT = Overheads(jitter=0.0, switch=0.0, restart=0.0, move=0.0)
NEVER = float("inf")
NOISE = 8191
"""Factors of jitter that are drawn once and then used in turn."""


@lru_cache(maxsize=64)
def noise(jitter: float, seed: int) -> tuple[float, ...]:
    """Factors on tasks' durations: max(0.3, N(1, jitter))."""
    drawn = np.random.default_rng(seed).normal(1.0, jitter, NOISE)
    return tuple(np.maximum(0.3, drawn).tolist())


def _by_rank(r: Resident) -> Precedence:
    return r.precedence


class Active(Resident):
    """A resident with its standing, and the iteration at which the engine returns control for it."""

    __slots__ = ("interrupted", "since", "standing", "until")

    def __init__(
        self, standing: Standing, shape: Shape, devices: Sequence[int], policy: SchedulingPolicy, until: float
    ) -> None:
        super().__init__(
            standing.serial, shape, devices, precedence(policy.order, standing, thresholds=policy.thresholds)
        )
        self.standing, self.until, self.interrupted = standing, until, False
        self.since = 0.0  # when its last iteration ended


class TaskEngine:
    """Devices, residents and the queue of events."""

    def __init__(
        self,
        devices: int,
        policy: SchedulingPolicy,
        overheads: Overheads,
        *,
        window: tuple[float, float] | None = None,
        drawn: int = 0,
    ) -> None:
        self.policy, self.overheads, self.now = policy, overheads, 0.0
        self.active: dict[int, Active] = {}
        self.residents: list[list[Active]] = [[] for _ in range(devices)]
        self.idle = [True] * devices
        self.last = [-1] * devices
        self.busy, self.window_busy = 0.0, 0.0  # device-seconds in tasks
        self.watched = window
        self.tasks = 0
        self.record: list[TaskRun] | None = None
        self.names: Sequence[str] = ()
        self._queue: list[tuple[float, int, int, Active]] = []
        self._touched: list[int] = []
        self._serial = 0
        self.noise = noise(overheads.jitter, overheads.seed) if overheads.jitter else ()
        self._drawn = drawn % NOISE  # how many of them have been used
        self._dynamic = policy.order in ("srpt", "las", "cp")
        self._learns = policy.rules.guard != "off"
        self._running = [(0.0, 0.0)] * devices  # the task on each device: seconds by its profile, and with jitter

    # What the controller calls, always between events.

    def start(
        self, standing: Standing, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0
    ) -> None:
        r = Active(standing, shape, devices, self.policy, until)
        self.active[r.key] = r
        self._enter(r)
        r.next_release = self.now + delay
        self._push(r.next_release, RELEASE, r)

    def interrupt(self, key: int) -> None:
        """Returns control at the job's next iteration boundary."""
        self.active[key].interrupted = True

    def resume(self, key: int, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0) -> None:
        """Goes on after a boundary with the next iteration, perhaps in another shape or on other devices."""
        r = self.active[key]
        r.interrupted, r.until = False, until
        if tuple(devices) != r.devices or shape is not r.shape:
            self._exit(r)
            r.place(shape, devices)
            self._enter(r)
        r.next_release = self.now + delay
        self._push(r.next_release, RELEASE, r)

    def remove(self, key: int) -> None:
        """Takes the job off its devices, after a boundary."""
        self._exit(self.active.pop(key))

    def sync(self, key: int) -> None:
        """Brings the job's standing up to date: at this level it always is, at every boundary."""

    def run(self, limit: float) -> list[int]:
        """Handles events until `limit`, or until jobs come to a boundary at which control returns: those jobs."""
        queue, touched, idle, pop = self._queue, self._touched, self.idle, heapq.heappop
        back: list[int] = []
        while not back:
            if touched and (not queue or queue[0][0] > self.now + TOGETHER):
                # All events of this moment are handled, and the controller has decided on the jobs returned.
                self._dispatch(touched)
                touched.clear()
                continue
            if not queue or queue[0][0] > limit + TOGETHER:
                break
            together = queue[0][0] + TOGETHER
            while queue and queue[0][0] <= together:
                now, _, device, r = pop(queue)
                if now > self.now:
                    self.now = now
                if device >= 0:  # a task has ended
                    idle[device] = True
                    touched.append(device)
                    if self._learns:
                        r.observe(*self._running[device])
                    stage = r.stage
                    if r.ended():
                        r.next_release = now + r.shape.off_device
                        self._push(r.next_release, BOUNDARY, r)
                    elif r.stage != stage:
                        touched.extend(r.devices)
                elif device == BOUNDARY and self._boundary(r):
                    back.append(r.key)
                else:
                    r.release()
                    touched.extend(r.devices)
        if not back and limit < float("inf"):
            self.now = max(self.now, limit)
        return back

    # Inside.

    def _enter(self, r: Active) -> None:
        for d in r.devices:
            self.residents[d].append(r)
            self.residents[d].sort(key=_by_rank)

    def _exit(self, r: Active) -> None:
        for d in r.devices:
            self.residents[d].remove(r)
        self._touched.extend(r.devices)  # a guarded task may have waited for this job

    def _boundary(self, r: Active) -> bool:
        s = r.standing
        s.done += r.shape.progress
        s.rounds += 1
        s.attained += r.shape.work if self.policy.shares else r.shape.held
        r.since = self.now
        if self._dynamic:
            r.precedence = precedence(self.policy.order, s)
            for d in r.devices:
                if len(self.residents[d]) > 1:
                    self.residents[d].sort(key=_by_rank)
        return r.interrupted or s.done >= r.until - 1e-9

    def _dispatch(self, touched: list[int]) -> None:
        guard, switch, idle, last, now = self.policy.rules.guard, self.overheads.switch, self.idle, self.last, self.now
        residents, noise, queue, push = self.residents, self.noise, self._queue, heapq.heappush
        for d in touched:
            if not idle[d]:
                continue
            r = pick(residents[d], d, now, guard)
            if r is None:
                continue
            profiled = seconds = r.offers(d)
            worker = r.take(d)
            if noise:
                self._drawn = (self._drawn + 1) % NOISE
                seconds *= noise[self._drawn]
            begin = now
            if last[d] != r.key:
                if last[d] >= 0:
                    begin += switch
                last[d] = r.key
            idle[d] = False
            if self._learns:
                r.eta = max(r.eta, now + r.predicted(profiled))
                self._running[d] = profiled, seconds
            self.tasks += 1
            self.busy += seconds
            if self.watched is not None:
                self._watch(r, worker, d, begin, begin + seconds)
            self._serial += 1
            push(queue, (begin + seconds, self._serial, d, r))

    def _watch(self, r: Active, worker: int, device: int, begin: float, end: float) -> None:
        assert self.watched is not None
        low, high = self.watched
        if begin < high and end > low:
            self.window_busy += min(end, high) - max(begin, low)
        if self.record is not None:
            self.record.append(
                TaskRun(
                    job=self.names[r.key],
                    iteration=r.standing.rounds,
                    stage=r.stage,
                    worker=worker,
                    device=device,
                    start=begin,
                    stop=end,
                )
            )

    def _push(self, time: float, device: int, r: Active) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (time, self._serial, device, r))

"""Fluid level: between two changes every job runs at a constant rate, so ten million iterations cost one event.

The engine has the methods of the task level's. A job's rate is looked up when the group of jobs that share devices with
it changes. As long as a group stays together it is reviewed: when it has been together for as long as its rates were
measured, they are measured for longer; and when a job has run so much more than another that their order changes, they
change places.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from dovetail.core.job import Shape
from dovetail.planning.sharing.policies import SchedulingPolicy
from dovetail.planning.sharing.priority import Standing

from .rates import CHANGING, GroupRun, SharingGroup, alone, in_order, overtaken, together
from .tasks import NEVER, Overheads

DOUBLINGS = 4
"""How often the measurement of a group that stays together is made twice as long."""
AFFORDED = 60_000
"""Tasks that one simulation spends on longer measurements. Where there are few groups, one rate may decide which job
ends last; where there are many, errors of single rates cancel out."""


class GroupHistory:
    """Since when a group has been together, and how often its measurement was doubled."""

    __slots__ = ("doublings", "group", "since")

    def __init__(self, group: SharingGroup, since: float, doublings: int) -> None:
        self.group, self.since, self.doublings = group, since, doublings


class Flow:
    """One admitted job."""

    __slots__ = (
        "devices",
        "here",
        "history",
        "paused",
        "rate",
        "review",
        "shape",
        "since",
        "standing",
        "until",
        "version",
    )

    def __init__(self, standing: Standing, shape: Shape, devices: Sequence[int], until: float) -> None:
        self.standing, self.shape, self.devices, self.until = standing, shape, tuple(devices), until
        self.rate = 0.0  # iterations per second
        self.since = 0.0
        self.version = self.review = 0  # valid events of the queue: its boundary, its group's next review
        self.here = False  # whether it is on its devices; not while its weights are copied
        self.paused = False  # at a boundary, not yet resumed
        self.history: GroupHistory | None = None


class FluidEngine:
    """Jobs at constant rates, the residents of every device, and a queue of predicted boundaries."""

    def __init__(
        self, devices: int, policy: SchedulingPolicy, overheads: Overheads, *, window: tuple[float, float] | None = None
    ) -> None:
        self.policy, self.overheads, self.now = policy, overheads, 0.0
        self.flows: dict[int, Flow] = {}
        self.residents: list[list[int]] = [[] for _ in range(devices)]
        self.busy, self.window, self.window_busy = 0.0, window or (0.0, NEVER), 0.0
        self._queue: list[tuple[float, int, int]] = []  # (time, version, job); ~job for a review of its group
        self._serial = 0
        self._dirty: set[int] = set()
        self._returned: list[int] = []
        self._afforded = AFFORDED
        self._doublings: dict[SharingGroup, int] = {}

    # What the controller calls.

    def start(
        self, standing: Standing, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0
    ) -> None:
        f = self.flows[standing.serial] = Flow(standing, shape, devices, until)
        self._settle(standing.serial, f, delay)

    def interrupt(self, key: int) -> None:
        """Returns control at the end of the iteration under way; one that begins now is under way."""
        f = self.flows[key]
        if not f.paused:
            self.sync(key)
            rounds = f.standing.done / f.shape.progress
            f.until = min(f.until, (math.floor(rounds + 1e-9) + 1) * f.shape.progress)
            self._predict(key, f)

    def resume(self, key: int, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0) -> None:
        f = self.flows[key]
        f.paused, f.until = False, until
        if delay or shape is not f.shape or tuple(devices) != f.devices:
            self._leave(key, f)
            f.shape, f.devices = shape, tuple(devices)
            self._settle(key, f, delay)
            return
        f.since = self.now
        self._predict(key, f)

    def remove(self, key: int) -> None:
        self.sync(key)
        self._leave(key, self.flows.pop(key))

    def sync(self, key: int) -> None:
        """Brings the job's standing up to date."""
        f = self.flows[key]
        if self.now > f.since and f.rate and not f.paused:
            done = f.rate * (self.now - f.since)
            f.standing.done = min(f.standing.done + done, f.until)
            rounds = done / f.shape.progress
            used = rounds * f.shape.work
            f.standing.attained += used if self.policy.shares else rounds * f.shape.held
            self.busy += used
            overlap = min(self.now, self.window[1]) - max(f.since, self.window[0])
            if overlap > 0:
                self.window_busy += used * overlap / (self.now - f.since)
        f.since = self.now

    def run(self, limit: float) -> list[int]:
        while not self._returned:
            time = self._next()
            if time > limit or time == NEVER:
                self.now = max(self.now, limit) if limit < NEVER else self.now
                return []
            self.now = max(self.now, time)
            while self._next() <= self.now:
                self._handle(heapq.heappop(self._queue)[2])
        found, self._returned = self._returned, []
        return found

    # Inside.

    def _next(self) -> float:
        self._rerate()
        while self._queue:
            time, version, key = self._queue[0]
            f = self.flows.get(key if key >= 0 else ~key)
            if f is not None and (version == f.version and not f.paused if key >= 0 else version == f.review):
                return time
            heapq.heappop(self._queue)
        return NEVER

    def _handle(self, key: int) -> None:
        if key < 0:
            self._dirty.add(self.flows[~key].devices[0])
            return
        f = self.flows[key]
        if not f.here:
            self._enter(key, f)
            return
        self.sync(key)
        f.standing.done = f.until
        f.paused = True
        self._returned.append(key)

    def _settle(self, key: int, f: Flow, delay: float) -> None:
        """Puts the job on its devices after the delay; until then its neighbours have them to themselves."""
        if delay:
            f.version = self._push(self.now + delay, key)
        else:
            self._enter(key, f)

    def _enter(self, key: int, f: Flow) -> None:
        f.since, f.here = self.now, True
        for d in f.devices:
            self.residents[d].append(key)
            self._dirty.add(d)

    def _leave(self, key: int, f: Flow) -> None:
        if f.here:
            for d in f.devices:
                self.residents[d].remove(key)
                if self.residents[d]:
                    self._dirty.add(d)
        f.here, f.rate, f.history = False, 0.0, None
        f.version = f.review = -1

    def _push(self, time: float, key: int) -> int:
        """Queues an event and returns its version: never used before, not even by an earlier lease of the same job."""
        self._serial += 1
        heapq.heappush(self._queue, (time, self._serial, key))
        return self._serial

    def _predict(self, key: int, f: Flow) -> None:
        if not f.here:
            return  # it gets a rate when it is on its devices
        f.version = -1
        if f.rate and not f.paused:
            f.version = self._push(self.now + (f.until - f.standing.done) / f.rate, key)

    def _set(self, key: int, value: float) -> None:
        f = self.flows[key]
        f.rate, f.review = value, -1
        self._predict(key, f)

    def _rerate(self) -> None:
        while self._dirty:
            group = self._group(self._dirty.pop())
            for key in group:
                self.sync(key)
            if len(group) == 1:
                f = self.flows[group[0]]
                if len(f.devices) >= f.shape.width:
                    f.history = None
                    self._set(group[0], f.shape.progress / alone(f.shape, self.overheads.jitter))
                    continue
            if group:
                self._share(group)

    def _group(self, device: int) -> list[int]:
        """The jobs that share devices with this device's residents, directly or through others."""
        keys, found, todo = set(self.residents[device]), [], list(self.residents[device])
        seen = {device}
        while todo:
            key = todo.pop()
            found.append(key)
            for d in self.flows[key].devices:
                if d not in seen:
                    seen.add(d)
                    for other in self.residents[d]:
                        if other not in keys:
                            keys.add(other)
                            todo.append(other)
        self._dirty -= seen
        return found

    def _share(self, keys: list[int]) -> None:
        standings, ties = in_order(self.policy.order, [self.flows[k].standing for k in keys])
        flows = [self.flows[s.serial] for s in standings]
        patterns: dict[int, list[tuple[int, int]]] = {}
        for i, f in enumerate(flows):
            for place, d in enumerate(f.devices):
                patterns.setdefault(d, []).append((i, place if f.shape.pinned else -1))
        # Devices with the same residents are alike, only their number matters: number them in sorted order.
        alike = sorted(tuple(p) for p in patterns.values())
        count: dict[int, int] = {}
        numbered = []
        for pattern in alike:
            row = []
            for i, place in pattern:
                if place < 0:
                    place = count[i] = count.get(i, -1) + 1
                row.append((i, place))
            numbered.append(tuple(row))
        group = SharingGroup(
            tuple([f.shape for f in flows]), tuple([f.standing.background for f in flows]), ties, tuple(numbered)
        )
        run = together(group, self.policy, self.overheads)
        history = self._history(flows, group, run)
        measured = run.after(history.doublings)
        for f, rate in zip(flows, measured.rates, strict=True):
            f.history = history
            self._set(f.standing.serial, rate)
        review = NEVER
        if history.doublings < DOUBLINGS and self._afforded > 0:
            review = history.since + measured.seconds
        if self.policy.order in CHANGING:
            sharing = [[i for i, _ in pattern] for pattern in alike]
            review = min(review, self.now + overtaken(self.policy.order, standings, ties, measured.rates, sharing))
        if review < NEVER:
            flows[0].review = self._push(review, ~standings[0].serial)

    def _history(self, flows: list[Flow], group: SharingGroup, run: GroupRun) -> GroupHistory:
        """The group's history, its rates measured for as long as it has been together, as far as can be afforded."""
        history = flows[0].history
        if history is None or history.group != group or any(f.history is not history for f in flows):
            return GroupHistory(group, self.now, self._doublings.get(group, 0))
        while history.doublings < DOUBLINGS and self._afforded > 0:
            if self.now < history.since + run.after(history.doublings).seconds - 1e-9:
                break
            history.doublings += 1
            self._doublings[group] = max(history.doublings, self._doublings.get(group, 0))
            self._afforded -= run.after(history.doublings).tasks // 2  # the measurement goes on where it stopped
        return history

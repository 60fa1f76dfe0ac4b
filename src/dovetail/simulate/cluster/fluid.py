"""Fluid level: between two changes every job runs at a constant rate, so ten million iterations cost one event.

The same calls as the task level. A rate is looked up when the group of jobs that share devices with a job changes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from dovetail.core.job import Shape
from dovetail.planning.priority import Standing, rank
from dovetail.planning.schedulers import Policy

from .rates import CAREFUL, FEW, QUICK, alone, together
from .tasks import Costs

NEVER = float("inf")


class Flow:
    """One admitted job."""

    __slots__ = ("begin", "devices", "paused", "rate", "shape", "since", "standing", "until", "version")

    def __init__(self, standing: Standing, shape: Shape, devices: Sequence[int], until: float) -> None:
        self.standing, self.shape, self.devices, self.until = standing, shape, tuple(devices), until
        self.rate = 0.0  # iterations per second
        self.since = self.begin = 0.0
        self.version = 0
        self.paused = False  # handed back, not yet resumed


class FluidEngine:
    """Flows, who shares what with whom, and a queue of predicted boundaries."""

    def __init__(
        self, devices: int, policy: Policy, costs: Costs, *, window: tuple[float, float] | None = None
    ) -> None:
        self.policy, self.costs, self.now = policy, costs, 0.0
        self.flows: dict[int, Flow] = {}
        self.residents: list[list[int]] = [[] for _ in range(devices)]
        self.busy, self.window, self.window_busy = 0.0, window or (0.0, NEVER), 0.0
        self._queue: list[tuple[float, int, int]] = []
        self._serial = 0
        self._dirty: set[int] = set()
        self._back: list[int] = []
        self._measured = 0  # rates looked up so far

    # -- what the controller calls --

    def start(
        self, standing: Standing, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0
    ) -> None:
        f = self.flows[standing.serial] = Flow(standing, shape, devices, until)
        self._settle(standing.serial, f, delay)

    def interrupt(self, key: int) -> None:
        """Hand control back at the end of the iteration under way."""
        f = self.flows[key]
        if not f.paused:
            self.sync(key)
            rounds = f.standing.done / f.shape.progress
            f.until = min(f.until, math.ceil(rounds - 1e-9) * f.shape.progress)
            self._predict(key, f)

    def resume(self, key: int, shape: Shape, devices: Sequence[int], *, until: float, delay: float = 0.0) -> None:
        f = self.flows[key]
        if shape is not f.shape or tuple(devices) != f.devices:
            self._leave(key, f)
            f.shape, f.devices = shape, tuple(devices)
            f.paused, f.until = False, until
            self._settle(key, f, delay)
            return
        f.paused, f.until = False, until
        f.since, f.begin = self.now, self.now + delay
        self._predict(key, f)

    def remove(self, key: int) -> None:
        self.sync(key)
        self._leave(key, self.flows.pop(key))

    def sync(self, key: int) -> None:
        """Brings the job's standing up to now."""
        f = self.flows[key]
        start = max(f.since, f.begin)
        if self.now > start and f.rate and not f.paused:
            done = f.rate * (self.now - start)
            f.standing.done = min(f.standing.done + done, f.until)
            rounds = done / f.shape.progress
            used = rounds * f.shape.work
            f.standing.attained += used if self.policy.shares else rounds * f.shape.held
            self.busy += used
            overlap = min(self.now, self.window[1]) - max(start, self.window[0])
            if overlap > 0:
                self.window_busy += used * overlap / (self.now - start)
        f.since = self.now

    def _next(self) -> float:
        self._rerate()
        while self._queue:
            time, version, key = self._queue[0]
            f = self.flows.get(key)
            if f is not None and f.version == version and not f.paused:
                return time
            heapq.heappop(self._queue)
        return NEVER

    def run(self, limit: float) -> list[int]:
        if self._back:
            back, self._back = self._back, []
            return back
        time = self._next()
        if time > limit:
            self.now = max(self.now, limit) if limit < NEVER else self.now
            return []
        self.now = max(self.now, time)
        while self._next() <= self.now:
            key = heapq.heappop(self._queue)[2]
            self.sync(key)
            f = self.flows[key]
            f.standing.done = f.until
            self._pause(key, f)
        back, self._back = self._back, []
        return back

    # -- inside --

    def _pause(self, key: int, f: Flow) -> None:
        f.paused = True
        self._back.append(key)

    def _settle(self, key: int, f: Flow, delay: float) -> None:
        f.since, f.begin = self.now, self.now + delay
        for d in f.devices:
            self.residents[d].append(key)
            self._dirty.add(d)

    def _leave(self, key: int, f: Flow) -> None:
        for d in f.devices:
            self.residents[d].remove(key)
            if self.residents[d]:
                self._dirty.add(d)
        f.version = -1

    def _predict(self, key: int, f: Flow) -> None:
        # Never used before, not even by an earlier lease of the same job.
        self._serial += 1
        f.version = self._serial
        if f.rate and not f.paused:
            time = max(self.now, f.begin) + (f.until - f.standing.done) / f.rate
            heapq.heappush(self._queue, (time, f.version, key))

    def _rerate(self) -> None:
        while self._dirty:
            group = self._group(self._dirty.pop())
            for key in group:
                self.sync(key)
            if len(group) == 1:
                f = self.flows[group[0]]
                if len(f.devices) >= f.shape.width:
                    self._set(group[0], f.shape.progress / alone(f.shape, self.costs.jitter))
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

    def _share(self, group: list[int]) -> None:
        flows = self.flows
        ranked = sorted(group, key=lambda k: rank(self.policy.order, flows[k].standing))
        if self.policy.order == "las":  # all tie: let equal groups look equal
            ranked.sort(
                key=lambda k: (flows[k].standing.background, flows[k].shape.tasks, flows[k].shape.off_device, k)
            )
        patterns: dict[int, list[tuple[int, int]]] = {}
        for i, key in enumerate(ranked):
            f = flows[key]
            for place, d in enumerate(f.devices):
                patterns.setdefault(d, []).append((i, place if f.shape.pinned else -1))
        # Devices with the same residents are alike, so only how many there are matters: number them in sorted order.
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
        self._measured += 1
        rates = together(
            tuple(flows[k].shape for k in ranked),
            tuple(flows[k].standing.background for k in ranked),
            tuple(numbered),
            self.policy,
            self.costs,
            CAREFUL if self._measured <= FEW else QUICK,
        )
        for key, value in zip(ranked, rates, strict=True):
            self._set(key, value)

    def _set(self, key: int, value: float) -> None:
        f = self.flows[key]
        f.rate = value
        self._predict(key, f)

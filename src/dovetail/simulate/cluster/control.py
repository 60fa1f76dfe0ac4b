"""The controller: jobs arrive, wait, run, change, finish. It is the same at both levels; `planning.sharing` decides."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dovetail.core.errors import Error
from dovetail.core.job import Job, Shape
from dovetail.planning.sharing.baselines import Reservation, may_pass, part_of, partition, reserve
from dovetail.planning.sharing.pack import ClusterSize, Devices, Mask, admit, waiting_reason
from dovetail.planning.sharing.policies import SchedulingPolicy
from dovetail.planning.sharing.priority import Precedence, Standing, chosen, precedence
from dovetail.planning.sharing.repack import crowded, narrow, relocate, widen

from .fluid import FluidEngine
from .job_progress import JobProgress
from .tasks import NEVER, Overheads, TaskEngine

WORTH_MOVING = 20
"""A job moves only if the time that is left to it is at least so many times the cost of a move."""
MOST_TRIED = 4
"""Most residents for which better devices are sought after each departure."""
Engine = TaskEngine | FluidEngine
DemandClass = tuple[float, int, int, int, int, bool, int]
"""What a waiting job needs: duty, width, persistent and ephemeral bytes, partition, background or not, fewest workers.
Where one job of a class is refused, all are."""


class Controller:
    """Runs a list of jobs, ordered by arrival, on an engine."""

    def __init__(
        self, jobs: Sequence[Job], cluster: ClusterSize, policy: SchedulingPolicy, overheads: Overheads, engine: Engine
    ) -> None:
        self.cluster, self.policy, self.overheads, self.engine = cluster, policy, overheads, engine
        self.devices = Devices(cluster)
        self.parts = partition(jobs, cluster) if policy.partition else {}
        names = list(self.parts)
        self.masks: list[Mask | None] = list(self.parts.values()) if self.parts else [None]
        self.progress = [
            JobProgress(
                job=job,
                standing=Standing(
                    serial=i, arrival=job.arrival, total=job.iterations, shape=job.shape(), background=job.background
                ),
                part=names.index(part_of(job, self.parts)) if self.parts else 0,
                phase_end=job.phases[0].iterations,
            )
            for i, job in enumerate(jobs)
        ]
        self.waiting: dict[DemandClass, list[tuple[Precedence, int]]] = {}
        self.queue: list[tuple[Precedence, int]] = []  # waiting jobs, where more than each class's first matters
        self.num_waiting = 0
        self.refused: set[DemandClass] = set()
        self.freed: set[int] = set()
        self.elastic: set[int] = set()
        self.leases: list[tuple[int, tuple[int, ...], float, float]] = []
        self.tick = NEVER  # when a preemptive policy decides again
        self.drained: tuple[float, float] | None = None
        """When the last job was admitted, and the work done by then, in device-seconds of gangs at full depth."""

    def run(self) -> None:
        engine, at = self.engine, 0
        left = len(self.progress)
        while left:
            arrival = self.progress[at].job.arrival if at < len(self.progress) else NEVER
            back = engine.run(min(arrival, self.tick))
            for key in back:
                left -= self._boundary(key)
            if not back and arrival == NEVER and self.tick == NEVER:
                raise Error(self._stuck())
            while at < len(self.progress) and self.progress[at].job.arrival <= engine.now + 1e-9:
                self._wait(at)
                at += 1
            if self.policy.preempt:
                self._preempt()
                if not self.num_waiting or not self.policy.quantum:
                    self.tick = NEVER
                elif self.tick == NEVER or self.tick <= engine.now:
                    self.tick = engine.now + self.policy.quantum
            elif self.policy.backfill == "easy":
                self._admit_reserving()
            else:
                self._admit_waiting()
                if self.policy.repack:
                    self._repack()
            if self.drained is None and not self.num_waiting and at == len(self.progress):
                self.drained = engine.now, self._work_done()

    # A job's life.

    def _wait(self, key: int) -> None:
        t = self.progress[key]
        self.num_waiting += 1
        order_key = precedence(self.policy.order, t.standing, thresholds=self.policy.thresholds)
        if self.policy.preempt or self.policy.backfill == "easy":
            heapq.heappush(self.queue, (order_key, key))
        else:
            shape, fewest = t.standing.shape, t.job.phases[t.phase].min_workers
            duty = shape.duty if self.policy.shares else 1.0  # does not matter to gangs
            memory = shape.persistent_bytes, shape.ephemeral_bytes
            group = (duty, shape.width, *memory, t.part, t.job.background, fewest)
            heapq.heappush(self.waiting.setdefault(group, []), (order_key, key))

    def _start(self, key: int, shape: Shape, devices: list[int]) -> None:
        t, now = self.progress[key], self.engine.now
        self.num_waiting -= 1
        self.devices.add(key, shape, devices, background=t.job.background)
        t.devices, t.running, t.lease_start = tuple(devices), True, now
        t.standing.shape = shape
        t.standing.slice_end = self._slice_end()
        again = self.overheads.move if self.policy.suspend else self.overheads.restart
        delay = again if t.first_start < NEVER else 0.0
        t.first_start = min(t.first_start, now)
        if t.job.phases[t.phase].min_workers:
            self.elastic.add(key)
        self.engine.start(t.standing, shape, devices, until=t.phase_end, delay=delay)

    def _slice_end(self) -> float:
        """Slices end together, when the policy decides again; one below half a quantum lasts a quantum longer."""
        now, quantum = self.engine.now, self.policy.quantum
        if self.tick == NEVER:
            return now + quantum
        return self.tick if self.tick >= now + quantum / 2 else self.tick + quantum

    def _leave(self, key: int) -> None:
        t = self.progress[key]
        self.engine.remove(key)
        self.freed.update(self.devices.remove(key))
        self.refused.clear()
        self.elastic.discard(key)
        self._close_lease(key)
        t.running = t.leaving = False
        t.change = None

    def _close_lease(self, key: int) -> None:
        t, now = self.progress[key], self.engine.now
        if now > t.lease_start:
            self.leases.append((key, t.devices, t.lease_start, now))
        t.lease_start = now

    def _boundary(self, key: int) -> bool:
        """Decides how a job goes on that is at an iteration boundary. True if it has finished."""
        t = self.progress[key]
        s = t.standing
        if s.done >= s.total - 1e-9:
            self._leave(key)
            t.finish = self.engine.now
            return True
        if t.leaving:
            self._leave(key)
            if s.done >= t.phase_end - 1e-9:
                t.phase += 1
                t.phase_end += t.job.phases[t.phase].iterations
                s.shape = t.job.shape(t.phase)
            s.turn, s.slice_end = self.engine.now, -NEVER
            t.restarts += 1
            self._wait(key)
            return False
        shape, devices = s.shape, list(t.devices)
        if t.change is not None:
            more, devices = t.change
            t.change = None
            if more:
                shape = t.job.shape(t.phase, shape.width + more)
        if s.done >= t.phase_end - 1e-9:
            shape, devices = self._next_phase(key, t, devices)
        delay = 0.0
        if tuple(devices) != t.devices:
            delay = self.overheads.move
            self._close_lease(key)
            self.freed.update(set(t.devices) - set(devices))
        if tuple(devices) != t.devices or shape is not s.shape:
            self.refused.clear()
            self.devices.replace(key, shape, devices)
            t.devices, s.shape = tuple(devices), shape
        self.engine.resume(key, shape, devices, until=t.phase_end, delay=delay)
        return False

    def _next_phase(self, key: int, t: JobProgress, devices: list[int]) -> tuple[Shape, list[int]]:
        """A phase of fewer workers frees devices; one of more takes open ones, or shares its own if none is open."""
        t.phase += 1
        phase = t.job.phases[t.phase]
        t.phase_end += phase.iterations
        width = max(phase.min_workers, min(len(devices), phase.workers)) if phase.min_workers else phase.workers
        shape = t.job.shape(t.phase, width)
        (self.elastic.add if phase.min_workers else self.elastic.discard)(key)
        if t.job.stages:
            return shape, devices
        del devices[width:]
        self.devices.replace(key, shape, devices)
        while len(devices) < width:
            extra = widen(self.devices, key, shape, self.policy.rules)
            if extra is None:
                break
            devices.append(extra)
            self.devices.replace(key, shape, devices)
        return shape, devices

    # Decisions.

    def _try(self, key: int, group: DemandClass) -> bool:
        t = self.progress[key]
        # A policy that cannot widen a job again does not start it with fewer workers.
        shape, part, fewest = t.standing.shape, t.part, group[-1] if self.policy.repack else 0
        found = admit(self.devices, shape, self.policy.rules, allowed=self.masks[part], background=t.job.background)
        width = shape.width
        while found is None and 0 < fewest < width:
            width -= 1
            shape = t.job.shape(t.phase, width)
            found = admit(self.devices, shape, self.policy.rules, allowed=self.masks[part], background=t.job.background)
        if found is None:
            return False
        self._start(key, shape, found)
        return True

    def _admit_waiting(self) -> None:
        """Admits in order of precedence, each class until a job of it is refused: devices only get fuller."""
        heads = [(jobs[0], group) for group, jobs in self.waiting.items() if group not in self.refused]
        heads.sort(key=lambda h: h[0])
        if self.policy.backfill == "none" and self.num_waiting:
            first = min(jobs[0] for jobs in self.waiting.values())
            if not heads or heads[0][0] != first:
                return
        # A heap by precedence; the counter keeps classes from being compared.
        todo = [(head, i, group) for i, (head, group) in enumerate(heads)]
        while todo:
            (_, key), i, group = todo[0]
            if self._try(key, group):
                heapq.heappop(self.waiting[group])
                if self.waiting[group]:
                    heapq.heapreplace(todo, (self.waiting[group][0], i, group))
                    continue
                del self.waiting[group]
            else:
                self.refused.add(group)
                if self.policy.backfill == "none":
                    return
            heapq.heappop(todo)

    def _admit_reserving(self) -> None:
        """First come first served; while the first does not fit, jobs that do not delay it may pass (EASY)."""
        free = int((self.devices.exists & (self.devices.count == 0)).sum())
        if not self.queue or not free:
            return
        held: Reservation | None = None
        still: list[tuple[Precedence, int]] = []
        for order_key, key in sorted(self.queue):
            shape, end = self.progress[key].standing.shape, self.engine.now + self.progress[key].seconds_left()
            if held is None and shape.width > free:
                held = reserve(shape.width, free, self._predicted_ends())
            elif shape.width <= free and (held is None or may_pass(held, shape.width, end)):
                if held is not None and end > held.time:
                    held = Reservation(held.time, held.spare - shape.width)
                found = admit(self.devices, shape, self.policy.rules)
                assert found is not None, "any free devices will do"
                self._start(key, shape, found)
                free -= shape.width
                continue
            still.append((order_key, key))
        self.queue = still

    def _predicted_ends(self) -> list[tuple[float, int]]:
        ends = []
        for key, residency in self.devices.residencies.items():
            self.engine.sync(key)
            ends.append((self.engine.now + self.progress[key].seconds_left(), len(residency.devices)))
        return ends

    def _preempt(self) -> None:
        """The first gangs in the order should run: others are preempted at their next iteration boundary, and
        waiting ones start as devices become free."""
        if not self.num_waiting:
            return
        now, order, thresholds = self.engine.now, self.policy.order, self.policy.thresholds
        running = []
        for key in self.devices.residencies:
            self.engine.sync(key)
            running.append((precedence(order, self.progress[key].standing, thresholds=thresholds, now=now), key))
        running.sort()
        ordered = list(heapq.merge(running, sorted(self.queue)))
        target = chosen([(key, self.progress[key].job.shape(self.progress[key].phase).width) for _, key in ordered],
                        self.cluster.devices)  # fmt: skip
        for _, key in running:
            t = self.progress[key]
            if (key not in target) and not t.leaving:
                t.leaving = True
                self.engine.interrupt(key)
            elif key in target and t.leaving:
                t.leaving = False  # it is not preempted after all
        still = []
        for order_key, key in sorted(self.queue):
            shape = self.progress[key].standing.shape
            found = admit(self.devices, shape, self.policy.rules) if key in target else None
            if found is None:
                still.append((order_key, key))
            else:
                self._start(key, shape, found)
        self.queue = still

    def _repack(self) -> None:
        """After admission: crowded residents move to freed devices, and elastic jobs change width."""
        if self.num_waiting and self.elastic:
            self._narrow()
        if not self.freed:
            return
        self.freed.clear()
        if self.num_waiting:
            return
        for key in sorted(self.elastic):
            self._widen(key)
        tried = 0
        for key in crowded(self.devices):
            t = self.progress[key]
            self.engine.sync(key)
            left = (t.standing.total - t.standing.done) * t.standing.shape.period
            if t.change is not None or left < WORTH_MOVING * self.overheads.move:
                continue
            devices = relocate(self.devices, key, self.policy.rules)
            if devices is not None:
                self._plan(key, 0, devices)
            tried += 1
            if tried == MOST_TRIED:
                return

    def _widen(self, key: int) -> None:
        t = self.progress[key]
        width, most = t.standing.shape.width, t.job.phases[t.phase].workers
        extra: list[int] = []
        while t.change is None and width + len(extra) < most:
            shape = t.job.shape(t.phase, width + len(extra) + 1)
            found = widen(self.devices, key, shape, self.policy.rules)
            if found is None:
                break
            self.devices.reserve(key, found)
            extra.append(found)
        if extra:
            self._plan(key, len(extra), [*t.devices, *extra])

    def _plan(self, key: int, more: int, devices: list[int]) -> None:
        """The job changes at its next iteration boundary; devices that it gains are its own from now on."""
        t = self.progress[key]
        t.change = more, devices
        for d in devices:
            if d not in self.devices.residencies[key].devices:
                self.devices.reserve(key, d)
        self.engine.interrupt(key)

    def _narrow(self) -> None:
        """Lets an elastic job give up workers if the first job in the queue can start then."""
        if any(self.progress[key].change is not None for key in self.elastic):
            return  # a job is about to give up workers
        _, head = min(jobs[0] for jobs in self.waiting.values())
        offers = []
        for key in sorted(self.elastic, reverse=True):
            t = self.progress[key]
            fewest, width = t.job.phases[t.phase].min_workers, t.standing.shape.width
            if t.change is None and width > fewest and len(t.devices) == width:
                offers.append((key, [t.job.shape(t.phase, width - c) for c in range(1, width - fewest + 1)]))
        first = self.progress[head]
        found = narrow(self.devices, first.standing.shape, offers, self.policy.rules, background=first.job.background)
        if found is not None:
            key, fewer = found
            self._plan(key, -fewer, list(self.progress[key].devices[:-fewer]))

    # Accounts.

    def _work_done(self) -> float:
        total = 0.0
        for key, t in enumerate(self.progress):
            if t.first_start == NEVER:
                continue
            if t.running:
                self.engine.sync(key)
            done, s = 0.0, t.standing.done
            for phase in t.job.phases:
                part = min(s, phase.iterations)
                done, s = done + part * phase.workers, s - part
            total += done * t.job.gang_period
        return total

    def _stuck(self) -> str:
        t = next(t for t in self.progress if t.finish == NEVER and not t.running)
        reason = waiting_reason(
            self.devices, t.standing.shape, self.policy.rules, allowed=self.masks[t.part], background=t.job.background
        )
        return f"{self.policy.name}: job {t.job.name!r} can never run: {reason}"

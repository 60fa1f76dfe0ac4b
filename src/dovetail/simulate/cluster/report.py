"""Reports: completion times, use of devices and fairness under a policy, and the bounds that no schedule can beat."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.core.job import Job

from .run import ClusterOutcome, FloatArray

GROWING, NOTICED = 0.05, 1.5
"""A queue is unbounded if the backlog grows by more than this share of the arriving work and jobs take this many times
as long as alone. The second keeps one very long job in a short trace from looking like a queue."""
UNFAIR = 1.1
"""Finish-time fairness from which a job counts as treated unfairly: jitter alone makes wide jobs a little late."""
SAMPLES = 16
"""Moments per quarter of the arrivals at which the backlog is sampled."""
Mask = npt.NDArray[np.bool_]
SIZES: tuple[tuple[str, int, int], ...] = (
    ("1 worker", 1, 1), ("2-4", 2, 4), ("5-8", 5, 8), ("9+", 9, 10**9),
)  # fmt: skip


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds in seconds that hold for every policy."""

    area: float
    """max over t of t + (work that arrives at or after t) / devices."""
    critical_path: float
    """max over jobs of arrival + time on devices of their own."""
    completion: float
    """On the mean completion time: the larger of that under least remaining work first, on one device as fast as all
    together, and the mean time of jobs on devices of their own."""

    @property
    def makespan(self) -> float:
        return max(self.area, self.critical_path)


@dataclass(frozen=True)
class SizeClass:
    """Jobs of one size, or all of them. Times in seconds."""

    name: str
    jobs: int
    mean: float
    """Mean completion time, from arrival to finish; `median` and `p99` are of the same."""
    median: float
    p99: float
    queueing: float
    """Mean time from arrival to the first device."""
    slowdown: float
    """Mean of completion time / time of a gang at full depth on devices of its own."""
    unfair: float
    """Share of jobs that finish a tenth or more later than on an equal share of the cluster."""
    worst_fairness: float
    """The 99th percentile of finish-time fairness."""


@dataclass(frozen=True)
class ClusterReport:
    """One policy on one workload."""

    policy: str
    level: str
    devices: int
    jobs: int
    load: float
    """Offered load: work of gangs at full depth over devices × span of arrivals; infinite if all arrive at once."""
    makespan: float
    bound: LowerBounds
    busy: float
    """Share of device time that tasks took, from first arrival to last finish."""
    window_busy: float
    """Share of device time that tasks took within the steady-state window."""
    throughput: float
    """Work done per second until the queue emptied for good (until the last finish where no job ever waited); 1.0: all
    devices full of gangs at full depth. The measure under backlog."""
    drift: float
    """How fast the backlog grew, as a share of the arriving work."""
    restarts: int
    groups: tuple[SizeClass, ...]
    """All jobs that arrived in the window, then by size."""

    @property
    def all(self) -> SizeClass:
        return self.groups[0]

    @property
    def bounded(self) -> bool:
        """Whether the queue stayed bounded: the backlog did not grow, or jobs were hardly slowed."""
        return self.drift <= GROWING or self.all.slowdown <= NOTICED

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["bound"]["makespan"] = self.bound.makespan
        return {k: (None if v == float("inf") else v) for k, v in data.items()}


def report(outcome: ClusterOutcome) -> ClusterReport:
    """The report on a simulation. Completion times and fairness are of the jobs that arrive in the window."""
    jobs = outcome.jobs
    arrival = np.array([j.arrival for j in jobs])
    work = np.array([j.gang_work for j in jobs])
    workers = np.array([j.workers for j in jobs])
    span = float(arrival[-1] - arrival[0])
    low, high = outcome.window
    steady: Mask = (arrival >= low) & (arrival <= high)
    alone = np.array([j.iterations * j.gang_period for j in jobs])
    fair = fairness(arrival, outcome.finish, alone, workers, outcome.cluster.devices)
    columns = (arrival, outcome.start, outcome.finish, alone, fair)
    groups = [_size_class("all", steady, *columns)]
    for name, least, most in SIZES:
        mask: Mask = steady & (workers >= least) & (workers <= most)
        if mask.any():
            groups.append(_size_class(name, mask, *columns))
    devices = outcome.cluster.devices
    makespan = outcome.makespan
    drained, done = outcome.drained
    if drained <= arrival[0]:
        drained, done = makespan, float(work.sum())
    return ClusterReport(
        policy=outcome.policy.name,
        level=outcome.level,
        devices=devices,
        jobs=len(jobs),
        load=float(work.sum()) / (devices * span) if span else float("inf"),
        makespan=makespan - float(arrival[0]),
        bound=lower_bounds(jobs, devices),
        busy=outcome.busy / (devices * (makespan - float(arrival[0]))),
        window_busy=outcome.window_busy / (devices * (high - low)) if high > low else 0.0,
        throughput=done / (devices * (drained - float(arrival[0]))),
        drift=drift(outcome) if span else 1.0,
        restarts=int(outcome.restarts.sum()),
        groups=tuple(groups),
    )


def _size_class(
    name: str,
    mask: Mask,
    arrival: FloatArray,
    start: FloatArray,
    finish: FloatArray,
    alone: FloatArray,
    fair: FloatArray,
) -> SizeClass:
    completion = (finish - arrival)[mask]
    return SizeClass(
        name=name,
        jobs=int(mask.sum()),
        mean=float(completion.mean()),
        median=float(np.median(completion)),
        p99=float(np.percentile(completion, 99)),
        queueing=float((start - arrival)[mask].mean()),
        slowdown=float((completion / alone[mask]).mean()),
        unfair=float((fair[mask] >= UNFAIR).mean()),
        worst_fairness=float(np.percentile(fair[mask], 99)),
    )


def fairness(
    arrival: FloatArray, finish: FloatArray, alone: FloatArray, workers: npt.NDArray[np.int64], devices: int
) -> FloatArray:
    """Finish-time fairness of each job: completion time over its time on 1/n of the cluster.

    n is the mean number of jobs in the cluster while the job is there. On a share of devices/n a job of k
    workers takes max(1, k·n/devices) times as long as on k devices.
    """
    # The integral of the number of jobs in the cluster, at every change.
    times = np.concatenate([arrival, finish])
    order = np.argsort(times, kind="stable")
    change = np.concatenate([np.ones(len(arrival)), -np.ones(len(finish))])[order]
    times = times[order]
    present = np.cumsum(change)
    area = np.concatenate([[0.0], np.cumsum(present[:-1] * np.diff(times))])
    spent = np.interp(finish, times, area) - np.interp(arrival, times, area)
    n = np.maximum(1.0, spent / np.maximum(finish - arrival, 1e-12))
    ideal = alone * np.maximum(1.0, workers * n / devices)
    result: FloatArray = (finish - arrival) / ideal
    return result


def drift(outcome: ClusterOutcome) -> float:
    """How fast the backlog grows, as a share of the work that arrives: near 0 where the queue is bounded.

    The backlog is the work that has arrived and is not done; a job's work counts as done evenly between its start and
    its finish. Its mean over the last quarter of the arrivals is compared with its mean over the second quarter: half
    a span lies between. Where a load ρ exceeds the capacity c the result tends to 1 − c/ρ.
    """
    arrival = np.array([j.arrival for j in outcome.jobs])
    work = np.array([j.gang_work for j in outcome.jobs])
    first, span = float(arrival[0]), float(arrival[-1] - arrival[0])
    held = np.maximum(outcome.finish - outcome.start, 1e-12)

    def backlog(quarter: int) -> float:
        total = 0.0
        for i in range(SAMPLES):
            now = first + span * (quarter + (i + 0.5) / SAMPLES) / 4
            left = 1.0 - np.clip((now - outcome.start) / held, 0.0, 1.0)
            total += float((work * left)[arrival <= now].sum())
        return total / SAMPLES

    return (backlog(3) - backlog(1)) / (float(work.sum()) / 2)


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest value of a figure over several samples."""

    mean: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)))


def lower_bounds(jobs: Sequence[Job], devices: int) -> LowerBounds:
    ordered = sorted(jobs, key=lambda j: j.arrival)
    work = [j.work() for j in ordered]
    alone = [j.alone() for j in ordered]
    area = left = 0.0
    for job, w in zip(reversed(ordered), reversed(work), strict=True):
        left += w
        area = max(area, job.arrival + left / devices)
    path = max(j.arrival + a for j, a in zip(ordered, alone, strict=True))
    pooled = _pooled_completion([(j.arrival, w / devices) for j, w in zip(ordered, work, strict=True)])
    return LowerBounds(area=area, critical_path=path, completion=max(pooled, sum(alone) / len(alone)))


def _pooled_completion(jobs: list[tuple[float, float]]) -> float:
    """Mean completion time of (arrival, seconds) on one machine, shortest remaining time first, which is optimal."""
    now, total, at = 0.0, 0.0, 0
    heap: list[tuple[float, float]] = []
    while at < len(jobs) or heap:
        if not heap:
            now = max(now, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= now:
            heapq.heappush(heap, (jobs[at][1], jobs[at][0]))
            at += 1
        left, arrival = heap[0]
        if at == len(jobs) or now + left <= jobs[at][0]:
            heapq.heappop(heap)
            now += left
            total += now - arrival
        else:
            heapq.heapreplace(heap, (left - (jobs[at][0] - now), arrival))
            now = jobs[at][0]
    return total / len(jobs)


def saturated_bound(job: Job) -> float:
    """The most throughput that devices full of such jobs reach, in units of gangs with full backpropagation.

    (f + b + s) / (f + b(k+1)/2k) for a ladder of k workers: a gang's iteration over the mean length of a task.
    """
    shape = job.shape()
    return job.gang_period / (shape.work / shape.width)

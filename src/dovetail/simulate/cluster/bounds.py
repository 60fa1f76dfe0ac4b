"""What no schedule can beat."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.job import Job


@dataclass(frozen=True)
class Bounds:
    """Lower bounds in seconds, whatever the policy."""

    area: float
    """max over t of t + (work that arrives at or after t) / devices."""
    critical_path: float
    """max over jobs of arrival + time on devices of its own."""
    completion: float
    """Mean completion: least remaining work first on one device as fast as all together, and each job's own path."""

    @property
    def makespan(self) -> float:
        return max(self.area, self.critical_path)


def bounds(jobs: Sequence[Job], devices: int) -> Bounds:
    ordered = sorted(jobs, key=lambda j: j.arrival)
    work = [j.work() for j in ordered]
    alone = [j.alone() for j in ordered]
    area = left = 0.0
    for job, w in zip(reversed(ordered), reversed(work), strict=True):
        left += w
        area = max(area, job.arrival + left / devices)
    path = max(j.arrival + a for j, a in zip(ordered, alone, strict=True))
    pooled = _pooled_completion([(j.arrival, w / devices) for j, w in zip(ordered, work, strict=True)])
    return Bounds(area=area, critical_path=path, completion=max(pooled, sum(alone) / len(alone)))


def _pooled_completion(jobs: list[tuple[float, float]]) -> float:
    """Mean completion of (arrival, seconds) on one machine under shortest remaining time first, which is optimal."""
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

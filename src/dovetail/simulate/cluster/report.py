"""Reports: what a policy gave whom, from an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .bounds import Bounds, bounds
from .run import FloatArray, Outcome

GROWING, NOTICED = 0.05, 1.5
"""A queue is unbounded where this share of the arriving work stays behind and jobs take so much longer than alone. The
second keeps one very long job in a short trace from looking like a queue."""
UNFAIR = 1.1
"""Finish-time fairness from which a job counts as badly off: jitter alone makes wide jobs a little late."""
SAMPLES = 16
"""Moments at which the backlog is looked at, per quarter."""
Mask = npt.NDArray[np.bool_]
SIZES: tuple[tuple[str, int, int], ...] = (
    ("1 worker", 1, 1), ("2-4", 2, 4), ("5-8", 5, 8), ("9+", 9, 10**9),
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Jobs of one size, or all of them. Times in seconds."""

    name: str
    jobs: int
    mean: float
    """Completion: from arrival to finish."""
    median: float
    p99: float
    queueing: float
    """Mean wait for the first device."""
    slowdown: float
    """Mean of completion over the time a gang with full backpropagation would take on devices of its own."""
    unfair: float
    """Share of jobs a tenth or more later than on an equal share of the cluster of their own."""
    worst_fairness: float
    """The 99th percentile of finish-time fairness."""


@dataclass(frozen=True)
class Report:
    """One policy on one workload."""

    policy: str
    level: str
    devices: int
    jobs: int
    load: float
    """Offered: work of gangs with full backpropagation over devices × span of arrivals; infinite for a batch."""
    makespan: float
    bound: Bounds
    busy: float
    """Share of device time in tasks, from first arrival to last finish."""
    window_busy: float
    """The same within the steady-state window."""
    throughput: float
    """Work done until the queue emptied for good, in units of devices full of gangs: the measure under backlog. Until
    the last finish where everybody started at once."""
    drift: float
    """How fast the backlog grew, as a share of the arriving work."""
    restarts: int
    groups: tuple[Group, ...]
    """All jobs that arrived in the window, then by size."""

    @property
    def all(self) -> Group:
        return self.groups[0]

    @property
    def bounded(self) -> bool:
        """Whether the queue stayed bounded: the backlog did not grow, or nobody noticed."""
        return self.drift <= GROWING or self.all.slowdown <= NOTICED

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["bound"]["makespan"] = self.bound.makespan
        return {k: (None if v == float("inf") else v) for k, v in data.items()}


def report(outcome: Outcome) -> Report:
    """Everything there is to say about an outcome. Completion and fairness count jobs that arrive in the window."""
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
    groups = [_group("all", steady, *columns)]
    for name, least, most in SIZES:
        mask: Mask = steady & (workers >= least) & (workers <= most)
        if mask.any():
            groups.append(_group(name, mask, *columns))
    devices = outcome.cluster.devices
    makespan = outcome.makespan
    drained, done = outcome.drained
    if drained <= arrival[0]:
        drained, done = makespan, float(work.sum())
    return Report(
        policy=outcome.policy.name,
        level=outcome.level,
        devices=devices,
        jobs=len(jobs),
        load=float(work.sum()) / (devices * span) if span else float("inf"),
        makespan=makespan - float(arrival[0]),
        bound=bounds(jobs, devices),
        busy=outcome.busy / (devices * (makespan - float(arrival[0]))),
        window_busy=outcome.window_busy / (devices * (high - low)) if high > low else 0.0,
        throughput=done / (devices * (drained - float(arrival[0]))),
        drift=drift(outcome) if span else 1.0,
        restarts=int(outcome.restarts.sum()),
        groups=tuple(groups),
    )


def _group(
    name: str,
    mask: Mask,
    arrival: FloatArray,
    start: FloatArray,
    finish: FloatArray,
    alone: FloatArray,
    fair: FloatArray,
) -> Group:
    completion = (finish - arrival)[mask]
    return Group(
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
    """Finish-time fairness of each job: completion over the time on 1/n of the cluster, n jobs being there on average.

    On a share of devices/n a job of k workers takes max(1, k·n/devices) times as long as on k devices.
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


def drift(outcome: Outcome) -> float:
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
    """A figure over several samples."""

    mean: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)))

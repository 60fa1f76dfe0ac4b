"""Simulates a list of jobs on a cluster under a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from dovetail.core.errors import Error
from dovetail.core.job import Job, Lease, Schedule, TaskRun
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import SchedulingPolicy
from dovetail.planning.sharing.priority import classes

from .control import Controller, Engine
from .fluid import FluidEngine
from .tasks import Overheads, TaskEngine

Level = Literal["auto", "task", "fluid"]
FloatArray = npt.NDArray[np.float64]
MANY_TASKS = 300_000
"""Above so many tasks `auto` chooses the fluid level; the task level takes about a second for them."""


@dataclass(frozen=True, eq=False)
class ClusterOutcome:
    """The result of a simulation: times of every job, in the order of `jobs`. Times in seconds."""

    policy: SchedulingPolicy
    cluster: ClusterSize
    level: Literal["task", "fluid"]
    jobs: tuple[Job, ...]
    start: FloatArray
    """When each job first got devices."""
    finish: FloatArray
    restarts: npt.NDArray[np.int64]
    busy: float
    """Device-seconds that tasks took."""
    window: tuple[float, float]
    """The steady-state window."""
    window_busy: float
    """Device-seconds that tasks took within the window."""
    drained: tuple[float, float]
    """When the queue emptied for good, and the work done by then, in device-seconds of gangs at full depth."""
    leases: tuple[tuple[int, tuple[int, ...], float, float], ...]
    """(job, its devices, start, stop) of every lease."""
    tasks: tuple[TaskRun, ...]

    @property
    def makespan(self) -> float:
        return float(self.finish.max())

    def schedule(self) -> Schedule:
        names = [j.name for j in self.jobs]
        return Schedule(
            policy=self.policy.name,
            source="predicted",
            devices=self.cluster.devices,
            leases=tuple(Lease(job=names[k], devices=d, start=a, stop=b) for k, d, a, b in self.leases),
            tasks=self.tasks,
        )


def simulate(
    jobs: Sequence[Job],
    cluster: ClusterSize,
    policy: SchedulingPolicy,
    *,
    level: Level = "auto",
    overheads: Overheads = Overheads(),
    record: bool = False,
    window: tuple[float, float] = (0.0, 1.0),
) -> ClusterOutcome:
    """Simulates the jobs: when each starts and finishes, and what devices do meanwhile.

    Jobs are taken in order of arrival. At the task level every task is an event; at the fluid level jobs run at
    constant rates between changes. `window` is the part of the span of arrivals that counts as steady state.
    """
    jobs = sorted(jobs, key=lambda j: j.arrival)
    if not jobs:
        raise Error("no jobs to schedule")
    for job in jobs:
        widest = max(p.workers for p in job.phases)
        if widest > cluster.devices:
            raise Error(f"job {job.name!r} needs {widest} devices, the cluster has {cluster.devices}")
        if job.persistent_bytes + job.ephemeral_bytes > cluster.device_bytes:
            need = job.persistent_bytes + job.ephemeral_bytes
            raise Error(f"job {job.name!r} needs {need} bytes on a device, each has {cluster.device_bytes}")
    if level == "auto":
        tasks = sum(p.iterations * sum(map(len, j.shape(i).tasks)) for j in jobs for i, p in enumerate(j.phases))
        level = "task" if tasks <= MANY_TASKS else "fluid"
    first, last = jobs[0].arrival, jobs[-1].arrival
    span = (first + window[0] * (last - first), first + window[1] * (last - first) if last > first else float("inf"))
    if not any(span[0] <= job.arrival <= span[1] for job in jobs):
        raise Error(f"window {window[0]:g}..{window[1]:g}: expected a part of the arrivals with jobs, got one without")
    if policy.order == "queues" and not policy.thresholds:
        policy = replace(policy, thresholds=classes(job.gang_work for job in jobs))
    kind = TaskEngine if level == "task" else FluidEngine
    engine: Engine = kind(cluster.devices, policy, overheads, window=span)
    if record and isinstance(engine, TaskEngine):
        engine.record, engine.names = [], [j.name for j in jobs]
    control = Controller(jobs, cluster, policy, overheads, engine)
    control.run()
    assert control.drained is not None
    finish = np.array([t.finish for t in control.progress])
    return ClusterOutcome(
        policy=policy,
        cluster=cluster,
        level=level,
        jobs=tuple(jobs),
        start=np.array([t.first_start for t in control.progress]),
        finish=finish,
        restarts=np.array([t.restarts for t in control.progress]),
        busy=engine.busy,
        window=(span[0], min(span[1], float(finish.max()))),
        window_busy=engine.window_busy,
        drained=control.drained,
        leases=tuple(control.leases),
        tasks=tuple(engine.record or ()) if isinstance(engine, TaskEngine) else (),
    )

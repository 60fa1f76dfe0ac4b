"""Job and Schedule: what asks for devices, and what ran where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import msgspec

from .files import Bytes, Count, Index, Name, Noun, Record, Seconds
from .timeline import Span, Timeline

Depth = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
"""The share of its backward pass that a worker runs; 1 is full backpropagation."""


class Stage(Record, frozen=True, kw_only=True):
    """A part of a burst-parallel iteration: `workers` devices for `seconds`, the others idle."""

    seconds: Annotated[float, msgspec.Meta(gt=0.0)]
    workers: Count


class JobPhase(Record, frozen=True, kw_only=True):
    """A stretch of training in which every iteration has the same shape."""

    iterations: Count
    workers: Count
    min_workers: Index = 0
    """Elastic where above 0: the scheduler may take workers down to this many at an iteration boundary. Local batches
    stay as they are, so an iteration of w out of k workers makes w/k of the progress."""
    depths: tuple[Depth, ...] = ()
    """One per worker; empty for full backpropagation."""


class Job(Noun, frozen=True, kw_only=True):
    """A training job as a scheduler sees it.

    In each iteration every worker runs one task on one device: forward, then its share of backward. When the last task
    has ended, `off_device` seconds pass (aggregation, input) before the next iteration may start. A burst-parallel job
    has `stages` instead: one after another, each on its first `workers` devices, with a barrier between.
    """

    kind: ClassVar[str] = "job"

    name: Name
    arrival: Seconds = 0.0
    phases: Annotated[tuple[JobPhase, ...], msgspec.Meta(min_length=1)]
    forward: Seconds = 0.0
    """Seconds of the forward pass of one worker's task."""
    backward: Seconds = 0.0
    """Seconds of a full backward pass."""
    off_device: Seconds = 0.0
    stages: tuple[Stage, ...] = ()
    persistent_bytes: Bytes = 0
    """Weights and what else stays on each device of the job between its tasks."""
    ephemeral_bytes: Bytes = 0
    """Bytes that a task of full depth needs in addition while it runs."""
    background: bool = False
    """True for a job that only fills gaps: every other job has priority over it."""
    tenant: str = ""

    def check(self) -> None:
        if not self.stages and self.forward + self.backward <= 0:
            raise ValueError("forward: expected forward + backward above 0, or stages")
        for i, phase in enumerate(self.phases):
            if phase.depths and len(phase.depths) != phase.workers:
                raise ValueError(
                    f"phases[{i}].depths: expected one for each of {phase.workers} workers, got {len(phase.depths)}"
                )
            if phase.min_workers > phase.workers:
                raise ValueError(f"phases[{i}].min_workers: expected at most {phase.workers}, got {phase.min_workers}")
            if self.stages and max(s.workers for s in self.stages) != phase.workers:
                raise ValueError(f"phases[{i}].workers: expected the widest stage's, got {phase.workers}")
            if self.stages and (phase.depths or phase.min_workers):
                raise ValueError(f"phases[{i}]: expected neither depths nor min_workers beside stages")

    @property
    def workers(self) -> int:
        """Workers of the first phase."""
        return self.phases[0].workers

    @property
    def iterations(self) -> int:
        return sum(p.iterations for p in self.phases)

    @property
    def gang_period(self) -> float:
        """Seconds of one iteration with full backpropagation on devices of its own."""
        compute = sum(s.seconds for s in self.stages) if self.stages else self.forward + self.backward
        return compute + self.off_device

    @property
    def gang_work(self) -> float:
        """Device-seconds that a gang with full backpropagation would hold: the unit in which loads are measured."""
        return sum(p.iterations * p.workers for p in self.phases) * self.gang_period

    def shape(self, phase: int = 0, workers: int | None = None) -> Shape:
        """What one iteration of a phase asks for, with its own number of workers or with `workers`."""
        p = self.phases[phase]
        k = p.workers if workers is None else workers
        if self.stages:
            tasks = tuple((s.seconds,) * s.workers for s in self.stages)
            return _shape(tasks, self.off_device, self.persistent_bytes, self.ephemeral_bytes, True, k / p.workers)
        # The deepest workers stay: a ladder without its deepest rung would leave the first layers without gradients.
        depths = sorted(p.depths)[-k:] if p.depths else [1.0] * k
        tasks = (tuple(self.forward + self.backward * d for d in depths),)
        return _shape(tasks, self.off_device, self.persistent_bytes, self.ephemeral_bytes, False, k / p.workers)

    def work(self) -> float:
        """Device-seconds of all its tasks."""
        return sum(p.iterations * self.shape(i).work for i, p in enumerate(self.phases))

    def alone(self) -> float:
        """Seconds on devices of its own, at full width."""
        return sum(p.iterations * self.shape(i).period for i, p in enumerate(self.phases))

    def with_depths(self, depths: Literal["full", "ladder", "late"]) -> Job:
        """The same job at other depths: the ladder 1/k..1, or full depth first and the ladder in the last half."""
        if self.stages:
            return self
        phases: list[JobPhase] = []
        for p in self.phases:
            rungs = ladder(p.workers) if p.workers > 1 else ()
            if depths == "full" or not rungs:
                phases.append(msgspec.structs.replace(p, depths=()))
            elif depths == "ladder" or p.iterations < 2:
                phases.append(msgspec.structs.replace(p, depths=rungs))
            else:
                half = p.iterations // 2
                phases.append(msgspec.structs.replace(p, iterations=p.iterations - half, depths=()))
                phases.append(msgspec.structs.replace(p, iterations=half, depths=rungs))
        return msgspec.structs.replace(self, phases=tuple(phases))


@dataclass(frozen=True, eq=False)
class Shape:
    """One iteration: the tasks of each stage (seconds, ascending), then the time off the devices.

    Compared by identity: jobs with the same iteration share one shape, so that it is cheap to look things up by it.
    """

    tasks: tuple[tuple[float, ...], ...]
    off_device: float
    persistent_bytes: int
    ephemeral_bytes: int
    pinned: bool
    """True where task i may only run on the job's i-th device (burst stages); otherwise on any device of the job."""
    progress: float
    """Iterations that one of this shape counts as: below 1 where an elastic job runs with fewer workers."""
    width: int
    work: float
    """Device-seconds of its tasks."""
    period: float
    """Seconds of one iteration on devices of its own."""
    duty: float
    """Share of the period in which it uses its `width` devices, on average over them."""

    @property
    def held(self) -> float:
        """Device-seconds for which a gang holds its devices."""
        return self.period * self.width


@lru_cache(maxsize=100_000)
def _shape(
    tasks: tuple[tuple[float, ...], ...], off_device: float, persistent: int, ephemeral: int, pinned: bool, share: float
) -> Shape:
    width = max(len(stage) for stage in tasks)
    work = sum(sum(stage) for stage in tasks)
    period = sum(max(stage) for stage in tasks) + off_device
    return Shape(
        tasks=tasks if pinned else tuple(tuple(sorted(stage)) for stage in tasks),
        off_device=off_device,
        persistent_bytes=persistent,
        ephemeral_bytes=ephemeral,
        pinned=pinned,
        progress=share,
        width=width,
        work=work,
        period=period,
        duty=work / (period * width),
    )


def ladder(workers: int) -> tuple[float, ...]:
    """Depths 1/k, 2/k, …, 1: every layer gets a gradient in every iteration."""
    return tuple((i + 1) / workers for i in range(workers))


class Lease(Record, frozen=True, kw_only=True):
    """A job may use these devices from start to stop, alone or not."""

    job: Name
    devices: tuple[Index, ...]
    start: Seconds
    stop: Seconds


class TaskRun(Record, frozen=True, kw_only=True):
    """One worker's part of one iteration, as it ran."""

    job: Name
    iteration: Index
    stage: Index = 0
    worker: Index
    device: Index
    start: Seconds
    stop: Seconds


class Schedule(Noun, frozen=True, kw_only=True):
    """Which job had which devices when; task by task where that was recorded."""

    kind: ClassVar[str] = "schedule"

    policy: Name
    source: Literal["predicted", "measured"]
    devices: Count
    leases: tuple[Lease, ...]
    tasks: tuple[TaskRun, ...] = ()

    def check(self) -> None:
        for i, lease in enumerate(self.leases):
            if lease.stop < lease.start:
                raise ValueError(f"leases[{i}].stop: expected at least start ({lease.start}), got {lease.stop}")
            if max(lease.devices, default=0) >= self.devices:
                raise ValueError(f"leases[{i}].devices: expected below {self.devices}, got {max(lease.devices)}")
        free: dict[int, float] = {}
        for task in sorted(self.tasks, key=lambda r: (r.start, r.stop)):
            if task.device >= self.devices:
                raise ValueError(f"tasks: expected devices below {self.devices}, got {task.device}")
            if task.start < free.get(task.device, 0.0) - 1e-9:
                raise ValueError(f"tasks: expected one at a time, got two on device {task.device} at {task.start}")
            free[task.device] = task.stop

    def timeline(self) -> Timeline:
        """One track per device, tasks where they were recorded, leases otherwise."""
        spans = [
            Span(
                track=f"device {r.device}/tasks",
                name=f"{r.job} iteration {r.iteration} worker {r.worker}",
                kind="task",
                start=r.start,
                stop=r.stop,
            )
            for r in self.tasks
        ] or [
            Span(track=f"device {d}/leases", name=lease.job, kind="lease", start=lease.start, stop=lease.stop)
            for lease in self.leases
            for d in lease.devices
        ]
        return Timeline(name=self.policy, source=self.source, spans=tuple(spans))

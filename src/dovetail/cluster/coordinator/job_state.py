"""A job that has not ended, as the coordinator has it in memory: the stored fields and what only this process knows."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dovetail.cluster.job.submission import Options, Share
from dovetail.cluster.transport.messages import Described, Progress
from dovetail.core.job import Shape
from dovetail.planning.sharing.priority import Standing

from . import strikes
from .job_store import State, StoredJob

TASK_TIMEOUT = 120.0
"""Seconds after which a task is taken for endless, where neither the submission nor the job file says."""
_UNKNOWN_TASK = 1.0  # seconds; with no time off the devices this is a duty of 1


@dataclass
class ActiveJob:
    """One job. `devices` is its lease; it keeps that while its aggregator is started again."""

    id: int
    name: str
    gang: int
    share: Share
    bound: float
    options: Options
    submitted: float
    state: State
    attempt: int
    iteration: int
    loss: float | None
    checkpoint: int
    record: strikes.StrikeRecord
    standing: Standing
    started: float | None = None
    described: Described | None = None
    progress: Progress | None = None
    devices: tuple[int, ...] = ()
    process: bool = False
    """Whether the aggregator of this attempt was started and has not ended."""
    connected: bool = False
    """Whether its aggregator is connected and has described the job to this coordinator."""
    address: tuple[str, int] = ("", 0)
    """Where its aggregator listens for executors."""
    node: str = ""
    """The aggregator's machine."""
    deadline: float = float("inf")
    """time.monotonic() by which its aggregator must have described the job, or have ended."""
    placed_at: float = 0.0
    """time.monotonic() of its last change of devices."""
    retry_at: float = 0.0
    """time.monotonic() of the next try after a strike."""
    stopping: bool = False
    """Whether its aggregator was asked to write a checkpoint and end; the job keeps its devices until then."""
    strike_counted_for: int = -1
    """The attempt whose failure already has its strike."""
    ranks_started: bool = False
    """Whether a gang's ranks of this attempt were started."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of a gang's ranks in this attempt, by worker."""

    @property
    def is_gang(self) -> bool:
        return self.gang > 0

    @property
    def background(self) -> bool:
        return self.share == "background"

    @property
    def promised(self) -> bool:
        """Whether its devices take background jobs only besides it: a foreground job's or a gang's."""
        return self.is_gang or self.share == "foreground"

    @property
    def key(self) -> str:
        """The engine's name for its aggregator."""
        return f"aggregator {self.id}.{self.attempt}"

    @property
    def shape(self) -> Shape:
        return self.standing.shape

    @property
    def iterations(self) -> int:
        return self.described.iterations if self.described else self.options.steps or 0

    @property
    def task_timeout(self) -> float:
        given = self.options.task_timeout or (self.described.task_timeout if self.described else 0.0)
        return given or TASK_TIMEOUT

    @property
    def alone(self) -> float:
        """Seconds of an iteration on devices of its own, computed from its measured tasks; 0 while unknown."""
        p = self.progress
        return max(p.task_seconds) + p.off_device if p and p.task_seconds and min(p.task_seconds) > 0 else 0.0

    @property
    def slowdown(self) -> float | None:
        """How much longer its iterations take than they would alone; None while unknown."""
        if self.progress is None or not self.alone or self.progress.iteration_seconds <= 0:
            return None
        return max(0.0, self.progress.iteration_seconds / self.alone - 1.0)


def shape_of(tasks: list[float], off_device: float, persistent: int, ephemeral: int, *, most: int) -> Shape:
    """An iteration as placement takes it: seconds and bytes. More workers than devices (`most`) take turns on one."""
    if len(tasks) > most:
        bins = [0.0] * most
        for seconds in sorted(tasks, reverse=True):
            bins[bins.index(min(bins))] += seconds
        tasks = bins
    work, period = sum(tasks), max(tasks) + off_device
    return Shape(
        tasks=(tuple(sorted(tasks)),),
        off_device=off_device,
        persistent_bytes=persistent,
        ephemeral_bytes=ephemeral,
        pinned=False,
        progress=1.0,
        width=len(tasks),
        work=work,
        period=period,
        duty=work / (period * len(tasks)),
    )


def shape_now(described: Described | None, progress: Progress | None, gang: int, *, most: int) -> Shape:
    """The shape from measured times, else from the job's profile, else as if the job always used its devices."""
    if gang or described is None:
        return shape_of([_UNKNOWN_TASK] * max(1, gang), 0.0, 0, 0, most=max(gang, most))
    workers = described.workers
    tasks, off = [_UNKNOWN_TASK] * workers, 0.0
    if progress and len(progress.task_seconds) == workers and min(progress.task_seconds) > 0:
        tasks, off = list(progress.task_seconds), max(0.0, progress.off_device)
    elif described.forward + described.backward > 0:
        depths = described.depths if len(described.depths) == workers else (1.0,) * workers
        tasks, off = [described.forward + described.backward * d for d in depths], max(0.0, described.off_device)
    return shape_of(tasks, off, described.persistent_bytes, described.ephemeral_bytes, most=most)


def from_stored(row: StoredJob, *, most: int) -> ActiveJob:
    described = msgspec.json.decode(row.described, type=Described) if row.described else None
    shape = shape_now(described, None, row.gang, most=most)
    total = described.iterations if described else row.options.steps or 1
    standing = Standing(
        serial=row.id, arrival=row.submitted, total=total, shape=shape, background=row.share == "background"
    )
    standing.done = float(row.iteration)
    return ActiveJob(
        id=row.id,
        name=row.name,
        gang=row.gang,
        share=row.share,
        bound=row.bound,
        options=row.options,
        submitted=row.submitted,
        started=row.started,
        state=row.state,
        attempt=row.attempt,
        iteration=row.iteration,
        loss=row.loss,
        checkpoint=row.checkpoint,
        record=strikes.decode(row.strikes),
        standing=standing,
        described=described,
    )

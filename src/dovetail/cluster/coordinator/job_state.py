"""A job that has not ended, as the coordinator holds it in memory: what is stored, and what is only known now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dovetail.cluster.job.submission import Options, Share
from dovetail.cluster.transport.messages import Described, Progress
from dovetail.core.job import Shape
from dovetail.planning.sharing.priority import Standing

from . import strikes
from .job_store import Row, State

TASK_TIMEOUT = 120.0
_UNKNOWN_TASK = 1.0  # seconds: with no time off its devices, a duty of 1


@dataclass
class Live:
    """One job. `devices` is its lease; it may hold one while its aggregator is being restarted."""

    id: int
    name: str
    gang: int
    share: Share
    bound: float
    options: Options
    submitted: float
    state: State
    epoch: int
    iteration: int
    loss: float | None
    checkpoint: int
    record: strikes.Record
    standing: Standing
    started: float | None = None
    described: Described | None = None
    progress: Progress | None = None
    devices: tuple[int, ...] = ()
    # Its aggregator.
    process: bool = False
    """Whether the aggregator of this epoch was started and has not ended."""
    linked: bool = False
    """Whether it is connected and has described the job in this coordinator's life."""
    address: tuple[str, int] = ("", 0)
    node: str = ""
    deadline: float = float("inf")
    """time.monotonic() by which it must have described itself, or have ended."""
    moved: float = 0.0
    """time.monotonic() of its last change of devices."""
    not_before: float = 0.0
    """time.monotonic() of the next try after a strike."""
    leaving: Literal["", "paused", "queued"] = ""
    """The state that its aggregator's end will complete: it has been asked to write a checkpoint and leave."""
    blamed: int = -1
    """The epoch whose end is accounted for already."""
    sent: bool = False
    """Whether a gang's ranks of this epoch were started."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of a gang's ranks in this epoch."""

    @property
    def is_gang(self) -> bool:
        return self.gang > 0

    @property
    def background(self) -> bool:
        return self.share == "background"

    @property
    def firm(self) -> bool:
        """Shares its devices with background jobs only."""
        return self.is_gang or self.share == "foreground"

    @property
    def key(self) -> str:
        """Of its aggregator, for the engine."""
        return f"aggregator {self.id}.{self.epoch}"

    @property
    def shape(self) -> Shape:
        return self.standing.shape

    @property
    def iterations(self) -> int:
        return self.described.iterations if self.described else self.options.steps or 0

    @property
    def task_timeout(self) -> float:
        named = self.options.task_timeout or (self.described.task_timeout if self.described else 0.0)
        return named or TASK_TIMEOUT

    @property
    def alone(self) -> float:
        """Seconds of an iteration on devices of its own, from its measured tasks; 0 while unknown."""
        p = self.progress
        return max(p.task_seconds) + p.off_device if p and p.task_seconds and min(p.task_seconds) > 0 else 0.0

    @property
    def slowdown(self) -> float | None:
        """How much longer its iterations take than they would alone; None while unknown."""
        if self.progress is None or not self.alone or self.progress.iteration_seconds <= 0:
            return None
        return max(0.0, self.progress.iteration_seconds / self.alone - 1.0)


def shape_of(tasks: list[float], off_device: float, persistent: int, ephemeral: int, *, most: int) -> Shape:
    """An iteration as placement sees it. Of more workers than devices (`most`), some take turns on one."""
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
    """From what was measured, else from what the job's profile says, else as if it used its devices always."""
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


def from_row(row: Row, *, most: int) -> Live:
    described = msgspec.json.decode(row.described, type=Described) if row.described else None
    shape = shape_now(described, None, row.gang, most=most)
    total = described.iterations if described else row.options.steps or 1
    standing = Standing(
        serial=row.id, arrival=row.submitted, total=total, shape=shape, background=row.share == "background"
    )
    standing.done = float(row.iteration)
    return Live(
        id=row.id,
        name=row.name,
        gang=row.gang,
        share=row.share,
        bound=row.bound,
        options=row.options,
        submitted=row.submitted,
        started=row.started,
        state=row.state,
        epoch=row.epoch,
        iteration=row.iteration,
        loss=row.loss,
        checkpoint=row.checkpoint,
        record=strikes.decode(row.strikes),
        standing=standing,
        described=described,
    )

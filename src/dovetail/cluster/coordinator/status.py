"""The cluster's state as plain data, and the reasons for which a job waits or is slow: for the API and the page.

Everything is built from memory, and what the page gets (`snapshot`) is of bounded size, so that it costs the
coordinator little with many jobs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from dovetail.cluster.transport.messages import Described
from dovetail.core.files import MOST_BYTES

from . import decide, executor_state
from .coordinator import Coordinator, finite
from .job_state import ActiveJob
from .job_store import ENDED, StoredJob
from .placement import Placement

RECENT = 50
"""Ended jobs that `status` shows."""
MOST_JOBS = 100
"""Jobs of a snapshot that have not ended: those that run, and the head of the queue."""


# -- jobs and devices --


def stored_job(r: StoredJob) -> dict[str, Any]:
    """A job as stored; `active_job` has more of one that has not ended."""
    return {
        "job": r.id,
        "name": r.name,
        "kind": r.kind,
        "share": r.share,
        "state": r.state,
        "reason": r.reason,
        "iteration": r.iteration,
        "iterations": msgspec.json.decode(r.described, type=Described).iterations if r.described else 0,
        "loss": r.loss,
        "submitted": r.submitted,
        "started": r.started,
        "ended": r.ended,
        "epoch": r.attempt,
        "checkpoint": r.checkpoint,
        "slowdown": r.slowdown,
    }


def active_job(c: Coordinator, job: ActiveJob) -> dict[str, Any]:
    speed = job.progress.iteration_seconds if job.progress and job.devices else 0.0
    return {
        "job": job.id,
        "name": job.name,
        "kind": "gang" if job.is_gang else "tasks",
        "share": job.share,
        "state": job.state,
        "reason": "",
        "iteration": job.iteration,
        "iterations": job.iterations,
        "loss": finite(job.loss),
        "submitted": job.submitted,
        "started": job.started,
        "ended": None,
        "epoch": job.attempt,
        "checkpoint": job.checkpoint,
        "workers": job.gang or (job.described.workers if job.described else job.options.workers or 0),
        "devices": list(job.devices),
        "iteration_seconds": speed,
        "duty": round(job.shape.duty, 4),
        "slowdown": executor_state.slowdown(job, c.executors),
        "bound": job.bound if job.share == "foreground" else None,
        "strikes": len(job.record.strikes),
    }


def one_job(c: Coordinator, number: int) -> dict[str, Any]:
    """An Error if there is no such job."""
    return active_job(c, c.jobs[number]) if number in c.jobs else stored_job(c.store.job(number))


def devices(c: Coordinator) -> list[dict[str, Any]]:
    found = []
    for e in c.executors.values():
        slot = c.placement.slot[e.index] if c.placement else 0
        books = c.placement.books if c.placement else None
        leased = int(books.persistent[slot] + books.ephemeral[slot]) if books else 0
        found.append(
            {
                "device": e.index,
                "node": e.device.node,
                "kind": e.device.kind,
                "accelerator": e.device.accelerator,
                "ready": e.ready,
                "residents": list(books.residents[slot]) if books else [],
                "running": int(e.beat.running or 0),
                "duty": round(float(books.load[slot]), 4) if books else 0.0,
                "utilization": round(e.utilization, 4),
                "bytes": min(leased, MOST_BYTES),
                "bytes_total": e.device.bytes,
                "overhead": e.beat.overhead,
                "tasks": sum(e.beat.tasks.values()),
            }
        )
    return found


def status(c: Coordinator, *, jobs: bool = True, most: int | None = None) -> dict[str, Any]:
    """Devices and counts; with `jobs` also the jobs that have not ended (the first `most`) and the latest that have."""
    data: dict[str, Any] = {
        "policy": c.policy.name,
        "engine": c.engine.name,
        "emulated": c.settings.imitated,
        "began": c.began,
        "now": time.time(),
        "devices": devices(c),
        "counts": c.store.counts(),
    }
    if jobs:
        running = sorted((j for j in c.jobs.values() if j.devices or j.stopping), key=lambda j: j.id)
        waiting = decide.queue(c)
        listed = {j.id for j in running} | {j.id for j in waiting}
        rest = [j for j in c.jobs.values() if j.id not in listed]
        data["jobs"] = [active_job(c, j) for j in (*running, *waiting, *rest)[:most]]
        data["ended"] = [stored_job(r) for r in c.store.jobs(ENDED, limit=RECENT)]
    return data


# -- reasons --


def reasons(c: Coordinator, job: ActiveJob, queue: Sequence[ActiveJob]) -> list[str]:
    """Why the job waits, or what slows it down; the first reason first. `queue`: `decide.queue`."""
    if job.state == "paused":
        lines = ["paused: resume it with `dovetail cluster resume`"]
        if job.stopping:
            lines.append("it is still ending its iteration")
    elif job.devices and c.placement is not None:
        lines = running_reasons(job, c.jobs, c.placement, delay=executor_state.delay(job, c.executors))
        if not job.is_gang and not job.connected:
            lines.insert(0, "preparing: its aggregator is being restarted from the last checkpoint")
    else:
        lines = waiting_reasons(job, queue, c.placement, c.ready(), now=time.monotonic())
    return lines


def waiting_reasons(
    job: ActiveJob, queue: Sequence[ActiveJob], placement: Placement | None, ready: Collection[int], *, now: float
) -> list[str]:
    """Why a job without devices waits."""
    lines = []
    if job.retry_at > now:
        last = job.record.strikes[-1].reason if job.record.strikes else "a strike"
        lines.append(f"strikes: tries again in {job.retry_at - now:.1f} s after {last}")
    else:
        lines += _strikes(job)
    before = queue[: queue.index(job)] if job in queue else []
    if job.stopping:
        lines.append("preparing: its aggregator writes a checkpoint and ends first")
    elif placement is None:
        lines.append("preparing: the cluster is starting")
    elif not job.is_gang and job.described is None:
        doing = "its file is being loaded" if job.process else "its turn to be loaded has not come"
        lines.append(f"preparing: {doing}")
    elif not job.is_gang and not job.connected and not job.retry_at > now:
        lines.append("preparing: its aggregator is starting" if job.process else "preparing: its turn has not come")
    if placement is not None and (job.is_gang or job.described is not None):
        lack = placement.lack(job, ready)
        if lack:
            lines.append(lack)
        if len(ready) < len(placement.devices):
            lines.append(f"devices: {len(placement.devices) - len(ready)} of {len(placement.devices)} are not ready")
    if before:
        first = before[0]
        others = f" and {len(before) - 1} more" if len(before) > 1 else ""
        lines.append(f"priority: {_called(first)}{others} before it")
    return lines or ["it can start now"]


def running_reasons(
    job: ActiveJob, others: Mapping[int, ActiveJob], placement: Placement, *, delay: float | None
) -> list[str]:
    """Which jobs share the devices of a job that has some, its share of them, and how much slower that makes it.

    `delay`: slow-down of a foreground job by background work; None while unknown.
    """
    shared: dict[int, list[int]] = {}
    for d in job.devices:
        for key in placement.books.residents[placement.slot[d]]:
            if key != job.id:
                shared.setdefault(key, []).append(d)
    lines = []
    if not shared:
        lines.append(f"alone on {_devices(job.devices)}")
    for key, on in sorted(shared.items()):
        other = others.get(key)
        if other is not None:
            kind = " (background)" if other.background else ""
            lines.append(f"shares {_devices(on)} with {_called(other)}{kind}, duty {other.shape.duty:.2f}")
    load = max(float(placement.books.load[placement.slot[d]]) for d in job.devices)
    share = min(1.0, job.shape.duty / load) if load > 0 else 1.0
    lines.append(f"duty: {job.shape.duty:.2f} of each device, {share:.0%} of what is asked of its fullest one")
    if job.slowdown is not None and job.progress is not None:
        lines.append(
            f"speed: {job.progress.iteration_seconds:.4g} s per iteration, {job.alone:.4g} s alone:"
            f" {job.slowdown:.1%} slower"
        )
    if delay is not None:
        lines.append(f"promise: background work delays it by {delay:.1%}, {job.bound:.0%} are allowed")
    return lines + _strikes(job)


def _strikes(job: ActiveJob) -> list[str]:
    strikes = job.record.strikes
    return [f"strikes: {len(strikes)} so far, the last: {strikes[-1].reason}"] if strikes else []


def _called(job: ActiveJob) -> str:
    return f"job {job.id} ({job.name})"


def _devices(found: Collection[int]) -> str:
    return f"device{'s' if len(found) > 1 else ''} {', '.join(map(str, sorted(found)))}"


# -- a snapshot for the page --


class Ongoing(NamedTuple):
    """What occupies a device now: a task that has not ended, or a gang's lease. Times are seconds of time.time()."""

    job: int
    device: int
    start: float
    stop: float
    """The last time at which it is known to have run."""
    gang: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The coordinator's state at one moment."""

    status: Mapping[str, Any]
    """What `status` returns, with at most MOST_JOBS jobs."""
    reasons: Mapping[int, Sequence[str]]
    """What `reasons` returns, by job."""
    ongoing: Sequence[Ongoing] = ()


def snapshot(c: Coordinator) -> Snapshot:
    """Nothing here grows with the number of jobs but the sorting of the queue."""
    found = status(c, most=MOST_JOBS)
    queue = decide.queue(c)
    monotonic, now = time.monotonic(), time.time()
    why: dict[int, list[str]] = {}
    ongoing = []
    for shown in found["jobs"]:
        job = c.jobs[shown["job"]]
        why[job.id] = reasons(c, job, queue)
        if job.is_gang:
            # A restarted coordinator knows only when the job first got devices.
            start = job.placed_at + now - monotonic if job.placed_at else job.started or job.submitted
            ongoing += [Ongoing(job.id, d, start, now, gang=True) for d in job.devices]
    for e in c.executors.values():
        if e.ready and e.beat.running:
            at = e.heard + now - monotonic
            ongoing.append(Ongoing(int(e.beat.running), e.index, at - e.beat.since, at))
    return Snapshot(found, why, ongoing)

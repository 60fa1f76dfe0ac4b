"""Why a job waits, or is slow: pure functions that put the books into sentences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dovetail.planning.sharing.policies import Policy

from .job_state import Live
from .placement import Floor


def waiting(job: Live, queue: Sequence[Live], floor: Floor | None, ready: Collection[int], *, now: float) -> list[str]:
    """Of a job in the queue, the first reason first."""
    lines = []
    if job.not_before > now:
        last = job.record.strikes[-1].reason if job.record.strikes else "a strike"
        lines.append(f"strikes: tries again in {job.not_before - now:.1f} s after {last}")
    elif job.record.strikes:
        lines.append(f"strikes: {len(job.record.strikes)} so far, the last: {job.record.strikes[-1].reason}")
    before = queue[: queue.index(job)] if job in queue else []
    if job.leaving:
        lines.append("preparing: its aggregator writes a checkpoint and ends first")
    elif floor is None:
        lines.append("preparing: the cluster is starting")
    elif not job.is_gang and job.described is None:
        doing = "its file is being loaded" if job.process else "its turn to be loaded has not come"
        lines.append(f"preparing: {doing}")
    elif not job.is_gang and not job.linked and not job.not_before > now:
        lines.append("preparing: its aggregator is starting" if job.process else "preparing: its turn has not come")
    if floor is not None and (job.is_gang or job.described is not None):
        lack = floor.why(job, ready)
        if lack:
            lines.append(lack)
        if len(ready) < len(floor.devices):
            lines.append(f"devices: {len(floor.devices) - len(ready)} of {len(floor.devices)} are not ready")
    if before:
        first = before[0]
        others = f" and {len(before) - 1} more" if len(before) > 1 else ""
        lines.append(f"priority: {_called(first)}{others} before it")
    return lines or ["it can start now"]


def running(job: Live, others: dict[int, Live], floor: Floor, *, delay: float | None) -> list[str]:
    """Of a job that has devices: who is on them, what share it has, what that costs it."""
    shared: dict[int, list[int]] = {}
    for d in job.devices:
        for key in floor.books.residents[floor.slot[d]]:
            if key != job.id:
                shared.setdefault(key, []).append(d)
    lines = []
    if not shared:
        lines.append(f"alone on {_devices(job.devices)}")
    for key, devices in sorted(shared.items()):
        other = others.get(key)
        if other is not None:
            kind = " (background)" if other.background else ""
            lines.append(f"shares {_devices(devices)} with {_called(other)}{kind}, duty {other.shape.duty:.2f}")
    load = max(float(floor.books.load[floor.slot[d]]) for d in job.devices)
    share = min(1.0, job.shape.duty / load) if load > 0 else 1.0
    lines.append(f"duty: {job.shape.duty:.2f} of each device, {share:.0%} of what is asked of its fullest one")
    if job.slowdown is not None and job.progress is not None:
        lines.append(
            f"speed: {job.progress.iteration_seconds:.4g} s per iteration, {job.alone:.4g} s alone:"
            f" {job.slowdown:.1%} slower"
        )
    if delay is not None:
        lines.append(f"promise: background work delays it by {delay:.1%}, {job.bound:.0%} are allowed")
    if job.record.strikes:
        lines.append(f"strikes: {len(job.record.strikes)} so far, the last: {job.record.strikes[-1].reason}")
    return lines


def why(
    job: Live,
    jobs: dict[int, Live],
    queue: Sequence[Live],
    floor: Floor | None,
    ready: Collection[int],
    policy: Policy,
    *,
    now: float,
    delay: float | None,
) -> dict[str, Any]:
    """The answer of `dovetail cluster why`."""
    if job.state == "paused":
        lines = ["paused: resume it with `dovetail cluster resume`"]
        if job.leaving:
            lines.append("it is still ending its iteration")
    elif job.devices and floor is not None:
        lines = running(job, jobs, floor, delay=delay)
        if not job.is_gang and not job.linked:
            lines.insert(0, "preparing: its aggregator is being restarted from the last checkpoint")
    else:
        lines = waiting(job, queue, floor, ready, now=now)
    return {"job": job.id, "name": job.name, "state": job.state, "why": lines, "policy": policy.name}


def _called(job: Live) -> str:
    return f"job {job.id} ({job.name})"


def _devices(devices: Collection[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, sorted(devices)))}"

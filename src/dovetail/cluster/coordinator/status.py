"""The cluster's state as plain data, for the API: built from memory, so that it costs little with many jobs."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dovetail.cluster.transport.messages import Described
from dovetail.core.files import MOST_BYTES

from . import decide, fleet
from .coordinator import Coordinator, finite
from .job_state import Live
from .job_store import Row

RECENT = 50
"""Ended jobs that `status` shows."""


def row(r: Row) -> dict[str, Any]:
    """A job as stored; `live` knows more while it has not ended."""
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
        "epoch": r.epoch,
        "checkpoint": r.checkpoint,
        "slowdown": r.slowdown,
    }


def live(c: Coordinator, job: Live) -> dict[str, Any]:
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
        "epoch": job.epoch,
        "checkpoint": job.checkpoint,
        "workers": job.gang or (job.described.workers if job.described else job.options.workers or 0),
        "devices": list(job.devices),
        "iteration_seconds": speed,
        "duty": round(job.shape.duty, 4),
        "slowdown": fleet.slowdown(job, c.executors),
        "bound": job.bound if job.share == "foreground" else None,
        "strikes": len(job.record.strikes),
    }


def one(c: Coordinator, number: int) -> dict[str, Any]:
    """An Error if there is no such job."""
    if number in c.jobs:
        return live(c, c.jobs[number])
    return row(c.store.job(number))


def devices(c: Coordinator) -> list[dict[str, Any]]:
    found = []
    for e in c.executors.values():
        slot = c.floor.slot[e.index] if c.floor else 0
        books = c.floor.books if c.floor else None
        booked = int(books.persistent[slot] + books.ephemeral[slot]) if books else 0
        found.append(
            {
                "device": e.index,
                "node": e.device.node,
                "kind": e.device.kind,
                "ready": e.ready,
                "residents": list(books.residents[slot]) if books else [],
                "running": int(e.beat.running or 0),
                "duty": round(float(books.load[slot]), 4) if books else 0.0,
                "utilization": round(e.utilization, 4),
                "bytes": min(booked, MOST_BYTES),
                "bytes_total": e.device.bytes,
                "overhead": e.beat.overhead,
                "tasks": sum(e.beat.tasks.values()),
            }
        )
    return found


def status(c: Coordinator, *, jobs: bool = True, most: int | None = None) -> dict[str, Any]:
    """Devices, and every job (the first `most`) that has not ended with the latest that have."""
    data: dict[str, Any] = {
        "policy": c.policy.name,
        "engine": c.engine.name,
        "emulated": c.settings.emulated,
        "began": c.began,
        "now": time.time(),
        "devices": devices(c),
        "counts": c.store.counts(),
    }
    if jobs:
        running = sorted((j for j in c.jobs.values() if j.devices or j.leaving), key=lambda j: j.id)
        waiting = decide.queue(c)
        listed = {j.id for j in running} | {j.id for j in waiting}
        rest = [j for j in c.jobs.values() if j.id not in listed]
        ended = c.store.jobs(("finished", "failed", "cancelled"), limit=RECENT)
        data["jobs"] = [live(c, j) for j in (*running, *waiting, *rest)[:most]]
        data["ended"] = [row(r) for r in ended]
    return data

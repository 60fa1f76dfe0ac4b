"""What a coordinator knows at one moment, for whoever looks on: taken in its loop, so of bounded size."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import decide, fleet
from . import status as reports
from .coordinator import Coordinator
from .job_state import Live
from .why import why

MOST_JOBS = 100
"""Of those that have not ended: who runs, and the head of the queue."""


class Doing(NamedTuple):
    """What goes on, so far as is known: a task that has not ended, or a device that a gang holds."""

    job: int
    device: int
    start: float
    stop: float
    """Both in seconds of the calendar's clock."""
    gang: bool = False


@dataclass(frozen=True)
class Snapshot:
    """What the coordinator knows at one moment."""

    status: Mapping[str, Any]
    """As `report.status` has it, with at most MOST_JOBS jobs."""
    whys: Mapping[int, Sequence[str]]
    doing: Sequence[Doing] = ()


def glimpse(c: Coordinator) -> Snapshot:
    """Nothing here grows with the number of jobs but the sorting of the queue."""
    status = reports.status(c, most=MOST_JOBS)
    queue, ready = decide.queue(c), c.ready()
    monotonic, now = time.monotonic(), time.time()
    whys: dict[int, list[str]] = {}
    doing = []
    for shown in status["jobs"]:
        job = c.jobs[shown["job"]]
        delay = fleet.delayed(job, c.executors)
        whys[job.id] = why(job, c.jobs, queue, c.floor, ready, c.policy, now=monotonic, delay=delay)["why"]
        if job.is_gang:
            doing += [Doing(job.id, d, _since(job, now - monotonic), now, gang=True) for d in job.devices]
    for e in c.executors.values():
        if e.ready and e.beat.running:
            at = e.heard + now - monotonic
            doing.append(Doing(int(e.beat.running), e.index, at - e.beat.since, at))
    return Snapshot(status, whys, doing)


def _since(job: Live, offset: float) -> float:
    """When it got its devices, by the calendar's clock; a restarted coordinator knows of the first ones only."""
    return job.moved + offset if job.moved else job.started or job.submitted

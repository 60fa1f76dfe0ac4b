"""What the coordinator does when something has changed: prepare, admit, move, tell the executors."""

from __future__ import annotations

import asyncio
import time

from dovetail.cluster.transport.messages import Grant, StartRank
from dovetail.planning.sharing.priority import rank

from . import folders, gang_launch
from .coordinator import Coordinator
from .fleet import Key
from .job_state import Live
from .placement import admissions, place, to_prepare

Wanted = dict[int, dict[Key, Grant | StartRank | None]]
_TOGETHER = 0.01  # seconds: what comes at once is decided together


async def decide_forever(c: Coordinator) -> None:
    while True:
        await c.kicked.wait()
        c.kicked.clear()
        if c.floor is not None and not c.closing:
            decide(c)
        await asyncio.sleep(_TOGETHER)


def queue(c: Coordinator) -> list[Live]:
    """Who waits, in order."""
    waiting = [j for j in c.jobs.values() if not j.devices and not j.leaving and j.state in ("queued", "preparing")]
    return sorted(waiting, key=lambda j: place(c.policy, j))


def decide(c: Coordinator) -> None:
    """One pass: aggregators for who needs one, devices for who fits, and everybody is told."""
    assert c.floor is not None, "there are devices"
    now, waiting = time.monotonic(), queue(c)
    may = {j.id for j in waiting if j.not_before <= now and (j.is_gang or j.linked)}
    for job in admissions(c.floor, waiting, c.ready(), may=may):
        if job.is_gang:
            job.epoch += 1
            folders.write(c.home, job.id, c.store.submission(job.id))
        c.store.lease(job.id, job.devices, epoch=job.epoch)
        job.state, job.moved = "running", now
    waiting = [j for j in waiting if not j.devices]
    again = [j for j in c.jobs.values() if j.devices and not (j.is_gang or j.process or j.leaving)]
    for job in [j for j in again if j.not_before <= now] + to_prepare(waiting, now=now, most=c.settings.prepare):
        c.prepare(job)
    if not waiting and (found := c.floor.better(c.jobs.values(), c.ready(), now=now)):
        shift(c, *found)
    sync(c)


def shift(c: Coordinator, job: Live, devices: list[int]) -> None:
    """Other devices for a job that runs; its tasks will be asked for from there."""
    assert c.floor is not None, "there are devices"
    c.floor.free(job)
    fits = c.floor.book(job, devices)
    assert fits, "room was found"
    job.devices, job.moved = tuple(devices), time.monotonic()
    c.store.lease(job.id, devices)


def reseat(c: Coordinator, job: Live, away: set[int]) -> None:
    """Some of its devices are away: others if there are, else what is left of them, else the queue."""
    assert c.floor is not None, "there are devices"
    c.floor.free(job)
    ready = c.ready() - away
    devices = c.floor.find(job, ready) or [d for d in job.devices if d in ready]
    if devices and not job.is_gang and c.floor.book(job, devices):
        job.devices = tuple(devices)
        c.store.lease(job.id, devices)
    else:
        c.move(job, "queued" if job.is_gang else "preparing")
    c.kick()


def sync(c: Coordinator) -> None:
    """Every executor hears what it should serve and does not, and the other way round."""
    now = time.monotonic()
    wanted: Wanted = {d: {} for d in c.executors}
    held_back = [(j.id, j.epoch) for j in c.jobs.values() if j.not_before > now]
    for job in c.jobs.values():
        if job.is_gang and job.devices:
            _want_ranks(c, job, wanted, now)
        elif job.linked and job.devices:
            grant = Grant(
                job=str(job.id),
                epoch=job.epoch,
                aggregator=job.address,
                node=job.node,
                folder=str(c.home.job(job.id)),
                rank=rank(c.policy.order, job.standing),
                foreground=job.share == "foreground",
                bound=job.bound,
                exclusive=not c.policy.shares,
            )
            for d in job.devices:
                wanted[d][job.id, job.epoch] = grant
        elif job.process and job.blamed != job.epoch:
            # Its aggregator lives and is on its way to a restarted coordinator: who serves it goes on.
            for d in job.devices:
                wanted[d][job.id, job.epoch] = None
    for d, e in c.executors.items():
        e.sync(wanted[d], held_back)


def _want_ranks(c: Coordinator, job: Live, wanted: Wanted, now: float) -> None:
    key = (job.id, job.epoch)
    if job.sent:  # told once; a rank that is missing later is `gangs.broken`
        for d in job.devices:
            if key in c.executors[d].granted:
                wanted[d][key] = c.executors[d].granted[key]
        return
    links = [c.executors[d].link for d in job.devices]
    first = links[0]
    if first is None or None in links or job.not_before > now:
        return  # all at once or none
    told = gang_launch.ranks(
        c.home,
        job,
        rank(c.policy.order, job.standing),
        devices={e.index: e.device for e in c.executors.values()},
        arguments=c.store.submission(job.id).arguments,
        master=(first.host, gang_launch.free_port(first.host)),
    )
    for d, message in told.items():
        wanted[d][key] = message
    job.sent = True

"""What the coordinator looks after four times a second: who is late, stuck or away, and what has not been saved."""

from __future__ import annotations

import asyncio
import time

from . import decide, fleet, folders, gang_launch
from .coordinator import Coordinator

TICK = 0.25
_EVERY_SECOND, _EVERY_FIVE = 4, 20  # ticks


async def watch_forever(c: Coordinator) -> None:
    ticks = 0
    while True:
        await asyncio.sleep(TICK)
        ticks += 1
        if c.floor is None or c.closing:
            continue
        now = time.monotonic()
        executors(c, now)
        jobs(c, now)
        for key in [k for k, limit in c.doomed.items() if now > limit]:
            del c.doomed[key]
            c.kill(key)
        if ticks % _EVERY_SECOND == 0:
            c.save()
            if c.policy.order != "fifo":
                decide.sync(c)  # ranks move with time
        if ticks % _EVERY_FIVE == 0:
            folders.bound(c.home.logs.glob("*.log"))
            if c.engine.name != "local":
                c.grow(await c.engine.devices())


def executors(c: Coordinator, now: float) -> None:
    """Those that have ended are started again; those that do not answer, or run an endless task, are ended."""
    limits = {j.id: j.task_timeout for j in c.jobs.values()}
    for e in c.executors.values():
        if not e.process and now >= e.restart:
            c.start_executor(e, now)
        number = fleet.endless(e, limits)
        if number and not e.struck:
            e.struck = True
            c.kill(e.key)
            if (job := c.jobs.get(number)) is not None:  # gone if its other worker's strike was its last
                c.strike(job, f"a task ran for more than {limits[number]:g} s")
                c.kick()
    for e in fleet.late(c.executors.values(), now):
        guilty = c.jobs.get(fleet.running_job(c.home, e.index))
        if guilty is not None and not e.struck:
            c.strike(guilty, f"executor {e.index} fell silent in its task")
        e.struck, e.deadline, e.heard = True, now + fleet.HELLO_LIMIT, now
        c.kill(e.key)
    away = {e.index for e in c.executors.values() if not e.ready and now - e.away > fleet.AWAY_LIMIT}
    if away:
        for job in [j for j in c.jobs.values() if away & set(j.devices)]:
            decide.reseat(c, job, away)


def jobs(c: Coordinator, now: float) -> None:
    """Aggregators that do not come up, or do not leave, are ended; pauses after strikes end."""
    for job in list(c.jobs.values()):
        if gang_launch.broken(job, c.executors, now):
            c.gang_again(job)
        if 0.0 < job.not_before <= now:
            job.not_before = 0.0
            c.kick()
        if job.process and now > job.deadline:
            job.deadline = now + fleet.HELLO_LIMIT
            c.kill(job.key)
            if not job.leaving and job.blamed != job.epoch:
                job.blamed = job.epoch
                c.strike(job, "its aggregator did not answer in time")

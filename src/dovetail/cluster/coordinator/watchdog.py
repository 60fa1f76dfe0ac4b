"""Checks that the coordinator makes four times a second: processes that are silent, stuck or lost; unsaved progress."""

from __future__ import annotations

import asyncio
import time

from . import decide, executor_state, job_files
from .coordinator import Coordinator

TICK = 0.25
"""Seconds from one check to the next."""
_EVERY_SECOND, _EVERY_FIVE = 4, 20  # ticks


async def watch_forever(c: Coordinator) -> None:
    ticks = 0
    while True:
        await asyncio.sleep(TICK)
        ticks += 1
        if c.placement is None or c.closing:
            continue
        now = time.monotonic()
        executors(c, now)
        jobs(c, now)
        for key in [k for k, limit in c.kill_at.items() if now > limit]:
            del c.kill_at[key]
            c.kill(key)
        if ticks % _EVERY_SECOND == 0:
            c.save()
            if c.policy.order != "fifo":
                decide.sync(c)  # priorities change with time
        if ticks % _EVERY_FIVE == 0:
            job_files.shorten(c.home.logs.glob("*.log"))
            if c.engine.name != "local":
                c.grow(await c.engine.devices())


def executors(c: Coordinator, now: float) -> None:
    """Starts executors that have ended; ends those that are silent or run an endless task; replaces lost devices."""
    limits = {j.id: j.task_timeout for j in c.jobs.values()}
    for e in c.executors.values():
        if not e.process and now >= e.restart:
            c.start_executor(e, now)
        number = executor_state.overdue_job(e, limits)
        if number and not e.strike_counted:
            e.strike_counted = True
            c.kill(e.key)
            if (job := c.jobs.get(number)) is not None:  # None if the strike for its other worker ended it
                c.strike(job, f"a task ran for more than {limits[number]:g} s")
                c.decide_soon()
    for e in executor_state.silent(c.executors.values(), now):
        job = c.jobs.get(executor_state.running_job(c.home, e.index))
        if job is not None and not e.strike_counted:
            c.strike(job, f"executor {e.index} fell silent in its task")
        e.strike_counted, e.deadline, e.heard = True, now + executor_state.HELLO_LIMIT, now
        c.kill(e.key)
    lost = {e.index for e in c.executors.values() if not e.ready and now - e.lost_at > executor_state.LOST_LIMIT}
    if lost:
        for job in [j for j in c.jobs.values() if lost & set(j.devices)]:
            decide.replace_lost(c, job, lost)


def jobs(c: Coordinator, now: float) -> None:
    """Starts broken gangs again, ends the pauses after strikes, ends aggregators that miss their deadline."""
    for job in list(c.jobs.values()):
        if decide.gang_is_broken(c, job, now):
            c.restart_gang(job)
        if 0.0 < job.retry_at <= now:
            job.retry_at = 0.0
            c.decide_soon()
        if job.process and now > job.deadline:
            job.deadline = now + executor_state.HELLO_LIMIT
            c.kill(job.key)
            if not job.stopping and job.strike_counted_for != job.attempt:
                job.strike_counted_for = job.attempt
                c.strike(job, "its aggregator did not answer in time")

"""Decisions, made again whenever something has changed: prepare jobs, place them, move them, update the executors.

A gang job runs any script, one rank on each of its devices, all at once, with torchrun's environment.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

from dovetail.cluster.engines import process
from dovetail.cluster.transport.messages import GrantLease, StartRank
from dovetail.planning.sharing.priority import precedence

from . import job_files
from .coordinator import Coordinator
from .executor_state import Key
from .job_state import ActiveJob
from .placement import admissions, queue_key, to_prepare

Wanted = dict[int, dict[Key, GrantLease | StartRank | None]]
"""By device, what its executor should serve."""
SETTLED = 2.0
"""Seconds after an executor's Hello in which it sends the ends of ranks that it has kept for the coordinator."""
_TOGETHER = 0.01  # seconds: changes that come at once are decided together


async def decide_forever(c: Coordinator) -> None:
    while True:
        await c.changed.wait()
        c.changed.clear()
        if c.placement is not None and not c.closing:
            decide(c)
        await asyncio.sleep(_TOGETHER)


def queue(c: Coordinator) -> list[ActiveJob]:
    """The jobs that wait for devices, in the order in which they get them."""
    waiting = [j for j in c.jobs.values() if not j.devices and not j.stopping and j.state in ("queued", "preparing")]
    return sorted(waiting, key=lambda j: queue_key(c.policy, j))


def decide(c: Coordinator) -> None:
    """One pass: devices for the jobs that fit, aggregators for those that need one, then the executors' leases."""
    assert c.placement is not None, "there are devices"
    now, waiting = time.monotonic(), queue(c)
    may = {j.id for j in waiting if j.retry_at <= now and (j.is_gang or j.connected)}
    for job in admissions(c.placement, waiting, c.ready(), may=may):
        if job.is_gang:
            job.attempt += 1
            job_files.write(c.home, job.id, c.store.submission(job.id))
        c.store.lease(job.id, job.devices, attempt=job.attempt)
        job.state, job.placed_at = "running", now
    waiting = [j for j in waiting if not j.devices]
    again = [j for j in c.jobs.values() if j.devices and not (j.is_gang or j.process or j.stopping)]
    for job in [j for j in again if j.retry_at <= now] + to_prepare(waiting, now=now, most=c.settings.prepare):
        c.prepare(job)
    if not waiting and (found := c.placement.better(c.jobs.values(), c.ready(), now=now)):
        relocate(c, *found)
    sync(c)


def relocate(c: Coordinator, job: ActiveJob, devices: list[int]) -> None:
    """Moves a running job to other devices; its next tasks run there."""
    assert c.placement is not None, "there are devices"
    c.placement.release(job)
    fits = c.placement.lease(job, devices)
    assert fits, "room was found"
    job.devices, job.placed_at = tuple(devices), time.monotonic()
    c.store.lease(job.id, devices)


def replace_lost(c: Coordinator, job: ActiveJob, lost: set[int]) -> None:
    """Some of the job's devices are lost: it gets others if there are, else it keeps the rest, else it is queued."""
    assert c.placement is not None, "there are devices"
    c.placement.release(job)
    ready = c.ready() - lost
    devices = c.placement.find(job, ready) or [d for d in job.devices if d in ready]
    if devices and not job.is_gang and c.placement.lease(job, devices):
        job.devices = tuple(devices)
        c.store.lease(job.id, devices)
    else:
        c.move(job, "queued" if job.is_gang else "preparing")
    c.decide_soon()


# -- what executors should serve --


def sync(c: Coordinator) -> None:
    """Sends every executor the leases that it lacks, and takes back those that it should not have."""
    now = time.monotonic()
    wanted: Wanted = {d: {} for d in c.executors}
    held_back = [(j.id, j.attempt) for j in c.jobs.values() if j.retry_at > now]
    for job in c.jobs.values():
        if job.is_gang and job.devices:
            _want_ranks(c, job, wanted, now)
        elif job.connected and job.devices:
            lease = GrantLease(
                job=str(job.id),
                attempt=job.attempt,
                aggregator=job.address,
                node=job.node,
                folder=str(c.home.job(job.id)),
                priority=precedence(c.policy.order, job.standing),
                foreground=job.share == "foreground",
                bound=job.bound,
                exclusive=not c.policy.shares,
            )
            for d in job.devices:
                wanted[d][job.id, job.attempt] = lease
        elif job.process and job.strike_counted_for != job.attempt:
            # Its aggregator lives and will connect to this restarted coordinator: its executors keep their leases.
            for d in job.devices:
                wanted[d][job.id, job.attempt] = None
    for d, e in c.executors.items():
        e.sync(wanted[d], held_back)


def _want_ranks(c: Coordinator, job: ActiveJob, wanted: Wanted, now: float) -> None:
    key = (job.id, job.attempt)
    if job.ranks_started:  # sent once; `gang_is_broken` finds a rank that is missing later
        for d in job.devices:
            if key in c.executors[d].leases:
                wanted[d][key] = c.executors[d].leases[key]
        return
    peers = [c.executors[d].peer for d in job.devices]
    first = peers[0]
    if first is None or None in peers or job.retry_at > now:
        return  # all ranks start at once, or none
    for d, message in _ranks(c, job, master=(first.host, _free_port(first.host))).items():
        wanted[d][key] = message
    job.ranks_started = True


def _ranks(c: Coordinator, job: ActiveJob, *, master: tuple[str, int]) -> dict[int, StartRank]:
    """The message to each device's executor: rank i runs on the job's i-th device."""
    folder, arguments = c.home.job(job.id), c.store.submission(job.id).arguments
    nodes = [c.executors[d].device.node for d in job.devices]
    messages = {}
    for worker, device in enumerate(job.devices):
        node = nodes[worker]
        environment = process.scrubbed(os.environ) | {
            "RANK": str(worker),
            "WORLD_SIZE": str(job.gang),
            "LOCAL_RANK": str(nodes[:worker].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "GROUP_RANK": str(sorted(set(nodes), key=nodes.index).index(node)),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "TORCHELASTIC_RUN_ID": f"dovetail-{job.id}",
            "TORCHELASTIC_RESTART_COUNT": str(max(0, job.attempt - 1)),
        }
        if name := c.executors[device].device.accelerator:
            environment["DOVETAIL_ACCELERATOR"] = name
        messages[device] = StartRank(
            job=str(job.id),
            attempt=job.attempt,
            worker=worker,
            argv=(sys.executable, str(folder / "job.py"), *arguments),
            environment=environment,
            folder=str(folder),
            priority=precedence(c.policy.order, job.standing),
            foreground=job.share == "foreground",
            bound=job.bound,
        )
    return messages


def _free_port(host: str) -> int:
    """A port for the ranks' rendezvous. If another process takes it first, the gang fails and is started again."""
    with socket.socket() as sock:
        try:
            sock.bind((host, 0))
        except OSError:  # an address of another machine
            sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


def gang_is_broken(c: Coordinator, job: ActiveJob, now: float) -> bool:
    """Whether a rank that was started does not run any more although nobody has reported its end."""
    if not job.is_gang or not job.ranks_started:
        return False
    for worker, device in enumerate(job.devices):
        e = c.executors[device]
        missing = e.ready and now - e.connected_at > SETTLED and (job.id, job.attempt) not in e.leases
        if missing and worker not in job.exit_codes:
            return True
    return False

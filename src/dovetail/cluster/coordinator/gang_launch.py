"""Gang jobs: any script, one rank on each of its devices, all at once, with torchrun's environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from dovetail.cluster.engines import process
from dovetail.cluster.engines.base import Device
from dovetail.cluster.home import Home
from dovetail.cluster.transport.messages import Rank, StartRank

from .fleet import Executor
from .job_state import Live

SETTLED = 2.0
"""Seconds after an executor's Hello in which it says what it has kept for the coordinator."""


def free_port(host: str) -> int:
    """For the ranks' rendezvous. Somebody else may take it before they do: then the gang tries again."""
    with socket.socket() as sock:
        try:
            sock.bind((host, 0))
        except OSError:  # an address of another machine
            sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


def ranks(
    home: Home,
    job: Live,
    rank: Rank,
    *,
    arguments: Sequence[str],
    devices: Mapping[int, Device],
    master: tuple[str, int],
) -> dict[int, StartRank]:
    """What to tell each device: rank i on the job's i-th device."""
    folder = home.job(job.id)
    nodes = [devices[d].node for d in job.devices]
    told = {}
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
            "TORCHELASTIC_RESTART_COUNT": str(max(0, job.epoch - 1)),
        }
        told[device] = StartRank(
            job=str(job.id),
            epoch=job.epoch,
            worker=worker,
            argv=(sys.executable, str(folder / "job.py"), *arguments),
            environment=environment,
            folder=str(folder),
            rank=rank,
            foreground=job.share == "foreground",
            bound=job.bound,
        )
    return told


def broken(job: Live, executors: Mapping[int, Executor], now: float) -> bool:
    """Whether a rank that was started is not there, and nobody has told how it ended."""
    if not job.is_gang or not job.sent:
        return False
    for worker, device in enumerate(job.devices):
        e = executors[device]
        gone = e.ready and now - e.welcomed > SETTLED and (job.id, job.epoch) not in e.granted
        if gone and worker not in job.codes:
            return True
    return False

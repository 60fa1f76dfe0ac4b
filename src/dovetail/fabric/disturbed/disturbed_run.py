"""Training over a fabric while its links fail and heal: torch.distributed ranks on fabric hosts, real packets.

`run` starts one rank on each chosen host, and breaks or heals links after given iterations of rank 0. It returns the
loss and the duration of every iteration, so that a disturbed run can be compared with an undisturbed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from dovetail.core.errors import Error
from dovetail.core.scratch import scratch
from dovetail.fabric.dataplane import addresses
from dovetail.fabric.routing.topology import Topology

PORT = 29500
WORKER = ("-m", "dovetail.fabric.disturbed.worker")


class BreakableFabric(Protocol):
    """A fabric that runs commands on its hosts and whose links can be broken."""

    topology: Topology

    def run(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]: ...
    def fail(self, link: int, *, how: str = "down", end: int = 0) -> None: ...
    def heal(self, link: int) -> None: ...


@dataclass(frozen=True)
class LinkEvent:
    """After this iteration of rank 0, a link breaks ("fail") or comes back ("heal")."""

    iteration: int
    action: str
    link: int


@dataclass
class TrainingRun:
    """What rank 0 reported of every iteration."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: list[LinkEvent] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of the median iteration."""
        return statistics.median(self.seconds)

    @property
    def stall(self) -> float:
        """Seconds of the longest iteration beyond the median. The first two, which set up connections, do not count."""
        return max(self.seconds[2:], default=0.0) - self.median

    @property
    def late_iterations(self) -> int:
        """Iterations at least 200 ms longer than the median one: TCP's smallest retransmission time-out."""
        return sum(s > self.median + 0.2 for s in self.seconds[2:])


def disturbances(
    topology: Topology, *, iterations: int, failures: int, hosts: Sequence[int] = (), hold: int = 4
) -> list[LinkEvent]:
    """Failures spread over a run, each healed `hold` iterations later.

    The links at the switches of `hosts` fail in turn, where all traffic passes; without hosts, links of every tier.
    """
    near = {topology.hosts[h].switch for h in hosts}
    links = [i for i, k in enumerate(topology.links) if not near or near & {k.a, k.b}]
    every = max(hold + 1, (iterations - 6) // max(1, failures))
    events = []
    for i in range(failures):
        at = 4 + i * every
        if at + hold >= iterations:
            break
        link = links[i % len(links)] if near else links[(i * (len(links) // 2 + 3)) % len(links)]
        events += [LinkEvent(at, "fail", link), LinkEvent(at + hold, "heal", link)]
    return events


def run(
    fabric: BreakableFabric,
    hosts: Sequence[int],
    *,
    iterations: int,
    events: Sequence[LinkEvent] = (),
    width: int = 256,
    worker: Sequence[str] = WORKER,
    port: int = PORT,
    timeout: float = 180.0,
) -> TrainingRun:
    """Runs `iterations` on one rank per host; raises one line if a rank fails or the time is over.

    `worker`: the Python program of a rank, which takes the options of `worker.py` and prints the same lines.
    """
    result = TrainingRun()
    todo = sorted(events, key=lambda e: e.iteration)
    broken: set[int] = set()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    source = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (source, environment.get("PYTHONPATH", "")) if p)
    with scratch("fabric") as folder, contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[Any]] = []
        logs: list[IO[bytes]] = []
        try:
            for rank, host in enumerate(hosts):
                command = [sys.executable, *worker, "--rank", str(rank), "--world", str(len(hosts))]
                command += ["--iterations", str(iterations), "--width", str(width)]
                command += ["--master", addresses(hosts[0]).v4, "--port", str(port)]
                log = stack.enter_context((folder / f"{rank}.log").open("w+b"))
                logs.append(log)
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                ranks.append(fabric.run(host, command, stdout=out, stderr=log, env=environment, cwd=folder))
            end = time.monotonic() + timeout
            pending = b""
            stream = ranks[0].stdout
            assert stream
            while len(result.losses) < iterations:
                if time.monotonic() > end:
                    reached = f"iteration {len(result.losses)} of {iterations}"
                    raise Error(f"training over the fabric did not end within {timeout:.0f} s ({reached})")
                if not select.select([stream], [], [], 0.2)[0]:
                    _check_alive(ranks, logs)
                    continue
                part = os.read(stream.fileno(), 65536)
                if not part:
                    _check_alive(ranks, logs)
                    time.sleep(0.05)
                    continue
                *lines, pending = (pending + part).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    result.losses.append(said["loss"])
                    result.seconds.append(said["seconds"])
                    while todo and todo[0].iteration <= said["iteration"]:
                        event = todo.pop(0)
                        if event.action == "fail":
                            fabric.fail(event.link)
                            broken.add(event.link)
                        else:
                            fabric.heal(event.link)
                            broken.discard(event.link)
                        result.events.append(event)
            for process in ranks:
                process.wait(timeout=60)
        finally:
            for link in broken:
                fabric.heal(link)
            for process in ranks:
                process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()
    return result


def _check_alive(ranks: list[subprocess.Popen[Any]], logs: list[IO[bytes]]) -> None:
    for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
        if process.poll():
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()
            raise Error(f"rank {rank} on the fabric failed: {said[-1] if said else f'exit code {process.returncode}'}")

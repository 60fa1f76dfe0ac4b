"""Training over a fabric while its links break: torch.distributed ranks on fabric hosts, real packets.

`run` starts one rank on each chosen host, and after given steps of rank 0 breaks or heals links. What comes back is the
loss and the duration of every step, so that a disturbed run can be laid beside an undisturbed one.
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
from typing import IO, Any

from dovetail.core.errors import Error
from dovetail.core.scratch import scratch

from .dataplane import addresses
from .loss import Runs
from .topology import Topology

PORT = 29500


@dataclass(frozen=True)
class Event:
    """After so many steps of rank 0, a link breaks ("fail") or comes back ("heal")."""

    step: int
    action: str
    link: int


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each step, on rank 0."""
    events: list[Event] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def stall(self) -> float:
        """The longest step beyond the median one, in seconds, without the first two, which set up connections."""
        return max(self.seconds[2:], default=0.0) - self.median

    @property
    def slow_steps(self) -> int:
        """Steps at least 200 ms longer than the median one: TCP's smallest retransmission time-out."""
        return sum(s > self.median + 0.2 for s in self.seconds[2:])


def disturbances(
    topology: Topology, *, steps: int, failures: int, hosts: Sequence[int] = (), hold: int = 4
) -> list[Event]:
    """Failures spread over a run, each healed `hold` steps later: the links at the switches of `hosts` in turn, where
    all traffic passes; without hosts, links of every tier."""
    near = {topology.hosts[h].switch for h in hosts}
    links = [i for i, k in enumerate(topology.links) if not near or near & {k.a, k.b}]
    every = max(hold + 1, (steps - 6) // max(1, failures))
    events = []
    for i in range(failures):
        at = 4 + i * every
        if at + hold >= steps:
            break
        link = links[i % len(links)] if near else links[(i * (len(links) // 2 + 3)) % len(links)]
        events += [Event(at, "fail", link), Event(at + hold, "heal", link)]
    return events


def run(
    fabric: Runs,
    hosts: Sequence[int],
    *,
    steps: int,
    events: Sequence[Event] = (),
    mode: str = "train",
    width: int = 256,
    port: int = PORT,
    timeout: float = 180.0,
) -> Result:
    """Runs `steps` steps on one rank per host; raises one line if a rank fails or the time is over."""
    result = Result()
    todo = sorted(events, key=lambda e: e.step)
    broken: set[int] = set()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    source = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (source, environment.get("PYTHONPATH", "")) if p)
    with scratch("fabric") as folder, contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[Any]] = []
        logs: list[IO[bytes]] = []
        try:
            for rank, host in enumerate(hosts):
                command = [sys.executable, "-m", "dovetail.fabric.worker", mode, "--rank", str(rank)]
                command += ["--world", str(len(hosts)), "--steps", str(steps), "--width", str(width)]
                command += ["--master", addresses(hosts[0]).v4, "--port", str(port)]
                log = stack.enter_context((folder / f"{rank}.log").open("w+b"))
                logs.append(log)
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                ranks.append(fabric.run(host, command, stdout=out, stderr=log, env=environment, cwd=folder))
            end = time.monotonic() + timeout
            pending = b""
            stream = ranks[0].stdout
            assert stream
            while len(result.losses) < steps:
                if time.monotonic() > end:
                    raise Error(
                        f"training over the fabric did not end within {timeout:.0f} s (step {len(result.losses)})"
                    )
                if not select.select([stream], [], [], 0.2)[0]:
                    _all_well(ranks, logs)
                    continue
                part = os.read(stream.fileno(), 65536)
                if not part:
                    _all_well(ranks, logs)
                    time.sleep(0.05)
                    continue
                *lines, pending = (pending + part).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    result.losses.append(said["loss"])
                    result.seconds.append(said["seconds"])
                    while todo and todo[0].step <= said["step"]:
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


def _all_well(ranks: list[subprocess.Popen[Any]], logs: list[IO[bytes]]) -> None:
    for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
        if process.poll():
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()
            raise Error(f"rank {rank} on the fabric failed: {said[-1] if said else f'exit code {process.returncode}'}")


def all_reduce_rate(fabric: Runs, hosts: Sequence[int], *, floats: int = 1 << 22, turns: int = 12) -> float:
    """Bytes per second of one all-reduce: payload over the median time."""
    result = run(fabric, hosts, steps=turns, mode="all_reduce", width=floats)
    return 4 * floats / statistics.median(result.seconds[2:])

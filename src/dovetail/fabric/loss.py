"""What one link failure costs a stream of datagrams, in any fabric that can say which way a flow goes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.core.errors import Error

from . import kernel
from .dataplane import addresses
from .topology import Topology

PORT = 7000


class Runs(Protocol):
    """A fabric that runs commands on its hosts and whose links can be broken."""

    topology: Topology

    def run(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]: ...
    def fail(self, link: int, *, how: str = "down", end: int = 0) -> None: ...
    def heal(self, link: int) -> None: ...
    def path(self, source: int, target: int, sport: int, dport: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Loss:
    link: str
    position: int
    """Which link of the path was broken, 0 the first."""
    sent: int
    lost: int
    longest_gap: float
    late: int
    """Datagrams that the sender itself sent more than 2 ms late: how busy the machine was."""


def measure(
    fabric: Runs,
    source: int,
    target: int,
    position: int,
    *,
    rate: float = 20_000,
    seconds: float = 1.5,
    size: int = 200,
    sport: int = 20_000,
    how: str = "down",
    end: int = 0,
    settle: Callable[[], None] = lambda: None,
) -> Loss:
    """Streams from host to host, breaks the link at `position` of the flow's path in mid-stream, and counts."""
    topology = fabric.topology
    walk = fabric.path(source, target, sport, PORT)
    if len(walk) < position + 2:
        raise Error(f"{topology.name}: no link {position} on the path {walk}")
    link = topology.link_index[frozenset(walk[position : position + 2])]
    near = 0 if topology.links[link].a == walk[position] else 1
    tool = str(kernel.build_tool("traffic.c"))
    receiver = fabric.run(target, [tool, "receive", str(PORT), str(seconds + 0.7)], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout
    receiver.stdout.readline()
    sender = fabric.run(
        source,
        [tool, "send", addresses(target).v4, str(PORT), str(sport), str(rate), str(seconds), str(size)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        time.sleep(seconds / 2)
        fabric.fail(link, how=how, end=near if end == 0 else 1 - near)
        sent = json.loads(sender.communicate(timeout=seconds + 20)[0])
        got = json.loads(receiver.communicate(timeout=seconds + 20)[0])
    finally:
        for process in (sender, receiver):
            process.kill()
            process.wait()
        fabric.heal(link)
        settle()
    return Loss(
        topology.link_name(link),
        position,
        sent["sent"],
        sent["sent"] - got["received"],
        got["longest_gap"],
        sent["late"],
    )

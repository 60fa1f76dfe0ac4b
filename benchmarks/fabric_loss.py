"""Datagrams that one link failure costs a stream, in any fabric whose flows can be followed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import Error
from dovetail.core.files import cache_folder
from dovetail.fabric import kernel
from dovetail.fabric.dataplane import addresses
from dovetail.fabric.disturbed.disturbed_run import BreakableFabric

PORT = 7000
SOURCE = Path(__file__).parent / "fabric_bpf" / "traffic.c"
Walk = Callable[[int, int, int, int], tuple[int, ...]]
"""The switches that a flow (source host, target host, source port, target port) visits now."""


def traffic() -> str:
    """The compiled sender and receiver of a numbered stream (`fabric_bpf/traffic.c`)."""
    target = cache_folder("bpf") / f"traffic-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not target.exists():
        kernel.compile_with_clang(SOURCE, target, "-O2")
        target.chmod(0o755)
    return str(target)


@dataclass(frozen=True)
class Loss:
    """What a stream lost when one link of its path was broken."""

    link: str
    position: int
    """Which link of the path was broken, 0 the first."""
    sent: int
    lost: int
    longest_gap: float
    """Seconds between two datagrams at the receiver."""
    late: int
    """Datagrams that the sender itself sent more than 2 ms late: how busy the machine was."""


def measure(
    fabric: BreakableFabric,
    walk_of: Walk,
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
    walk = walk_of(source, target, sport, PORT)
    if len(walk) < position + 2:
        raise Error(f"{topology.name}: no link {position} on the path {walk}")
    link = topology.link_index[frozenset(walk[position : position + 2])]
    near = 0 if topology.links[link].a == walk[position] else 1
    tool = traffic()
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

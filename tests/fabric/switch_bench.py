"""The real switch program in the kernel's test runner: no devices, every hop a call.

A packet is given to the program as if it came in by some port; what comes out is given to the next switch. Links are
cut by draining their ports. Topologies may be of any size.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from dovetail.fabric import hooks, kernel, structs
from dovetail.fabric.dataplane import DataPlane, addresses, host_slot, link_slot, slot_towards
from dovetail.fabric.packets import udp
from dovetail.fabric.routing.policy import Policies, assemble
from dovetail.fabric.routing.topology import Topology

LOOPBACK = 1
"""The one device that the test runner may name in every namespace; nothing is sent to it."""
TOO_MANY_HOPS = 4000


@dataclass(frozen=True)
class Journey:
    """The way of one packet through the fabric, and how it ended."""

    delivered: bool
    walk: tuple[int, ...]
    """Switches visited, in order."""
    packet: bytes
    """As delivered."""
    searches: int
    failures: frozenset[int]
    """Failed links it met or was told of."""
    notice: tuple[int, ...] = ()
    """Where the notice of its failure went."""
    looped: bool = False


class SwitchBench:
    """One fabric in the test runner. `settings` are those of the data plane, but for the port a packet comes in by."""

    def __init__(self, plane: DataPlane, topology: Topology, policies: Policies) -> None:
        self.plane, self.topology = plane, topology
        self.run = kernel.ProgramRunner(plane.programs["fabric_switch"], tc=plane.hook == hooks.TC)
        plane.install_ports(topology)
        for slot in range(2 * len(topology.links) + len(topology.hosts)):
            kernel.update(plane.maps["wires"], slot, struct.pack("<I", LOOPBACK))
        self.policies = policies
        self.failed: frozenset[int] = frozenset()
        plane.install(topology, policies, grace=0)
        self.settings = plane.config()

    def use(self, policies: Policies, *, without: frozenset[int] = frozenset()) -> None:
        self.policies = policies
        self.plane.install(self.topology, policies, without=without, grace=0)
        self.settings = self.plane.config()

    def configure(self, **changes: int) -> None:
        self.plane.configure(**changes)
        self.settings = self.plane.config()

    def fail(self, links: frozenset[int]) -> None:
        """Exactly these links are down."""
        for link in links ^ self.failed:
            for end in (0, 1):
                self.plane.set_flag(link_slot(link, end), structs.DRAINED, link in links)
        self.failed = links

    def enter(self, slot: int, packet: bytes, *, segment: int = 0) -> tuple[int, bytes]:
        """One run of the program, as if the packet came in by `slot`."""
        self.settings["first_ifindex"] = (LOOPBACK - slot) & 0xFFFFFFFF
        kernel.update(self.plane.maps[structs.SETTINGS], 0, structs.CONFIG.pack(*self.settings.values()))
        verdict, out, _ = self.run(packet, ifindex=LOOPBACK, segment=segment)
        return verdict, out

    def send(self, source: int, target: int, *, sport: int = 1000, dport: int = 2000, packet: bytes = b"") -> Journey:
        """A packet between two hosts, followed to its end; the notice it may cause is followed too."""
        frame = packet or udp(addresses(source), addresses(target), sport=sport, dport=dport, payload=b"dovetail" * 4)
        here, slot = self.topology.hosts[source].switch, host_slot(self.topology, source)
        walk = [here]
        notice: list[int] = []
        searches, failures = 0, frozenset[int]()
        kind = 0
        while True:
            verdict, frame = self.enter(slot, frame)
            if verdict != kernel.XDP_REDIRECT:
                return Journey(False, tuple(walk), b"", searches, failures, tuple(notice))
            if frame[12:14] != struct.pack(">H", structs.ETH_FABRIC):
                return Journey(True, tuple(walk), frame, searches, failures)
            header = structs.read_header(self.plane.size, frame)
            kind = header.kind
            if not kind:
                searches, failures = header.computed, header.failed
            there = header.path[header.hop - 1]
            slot = slot_towards(self.topology, there, here)
            (notice if kind else walk).append(there)
            here = there
            if len(walk) + len(notice) > TOO_MANY_HOPS:
                return Journey(False, tuple(walk), b"", searches, failures, tuple(notice), looped=True)


@contextlib.contextmanager
def bench(topology: Topology, policies: Policies | None = None, *, hook: str = hooks.XDP) -> Iterator[SwitchBench]:
    with contextlib.closing(DataPlane.load(structs.size_for(topology), hook=hook)) as plane:
        yield SwitchBench(plane, topology, policies or assemble(topology, []))

"""What a packet costs in the kernel: nanoseconds per run of the switch program, by the kernel's own test runner."""

from __future__ import annotations

import contextlib
import statistics
import struct
from dataclasses import dataclass
from pathlib import Path

from dovetail.fabric import kernel, packets, structs
from dovetail.fabric.dataplane import DataPlane, addresses, host_slot, link_slot, slot_towards
from dovetail.fabric.extra import nx
from dovetail.fabric.routing.policy import Rule, assemble
from dovetail.fabric.routing.topology import Topology

SOURCE = Path(__file__).parent / "fabric_bpf" / "bench.bpf.c"
LOOPBACK = 1
"""The one device that the test runner may name in every namespace; nothing is sent to it."""
PROGRAMS = ("bench_nothing", "bench_transit", "bench_plain", "bench_ingress")


@dataclass(frozen=True)
class PacketCost:
    """Nanoseconds per packet: medians over `turns` interleaved measurements."""

    topology: str
    switches: int
    policy: str
    hops: int
    search: float
    """At the first switch, the path computed anew for every packet."""
    cached: float
    """At the first switch, the path kept from an earlier packet."""
    transit: float
    plain: float
    """A plain XDP redirect with the same header work."""
    recompute: float
    """At a switch whose next link is down."""
    nothing: float
    """What the test runner itself costs, the header put back; contained in transit, plain and recompute."""

    @property
    def ratio(self) -> float:
        """Transit over plain, both as the test runner says."""
        return self.transit / self.plain

    @property
    def net_ratio(self) -> float:
        """The same with the runner's own part taken off both: harder, and noisier."""
        return (self.transit - self.nothing) / (self.plain - self.nothing)


def measure(topology: Topology, *, waypoints: int = 0, repeat: int = 20_000, turns: int = 9) -> PacketCost:
    """The costs for the two hosts that are farthest apart, under a chain of `waypoints`."""
    lengths = dict(nx.all_pairs_shortest_path_length(topology.graph))
    ends = max(
        ((a, b) for a in range(len(topology.hosts)) for b in range(len(topology.hosts)) if a != b),
        key=lambda p: lengths[topology.hosts[p[0]].switch][topology.hosts[p[1]].switch],
    )
    inner = [s for s in range(len(topology.switches)) if s not in {topology.hosts[h].switch for h in ends}]
    via = tuple(frozenset({inner[(i + 1) * len(inner) // (waypoints + 1) - 1]}) for i in range(waypoints))
    rule = Rule("any path" if not via else f"chain of {waypoints}", frozenset({ends[0]}), frozenset({ends[1]}), via=via)
    plane = DataPlane.load(structs.size_for(topology), source=SOURCE, programs=PROGRAMS, maps=("kept",))
    with contextlib.closing(plane):
        plane.install_ports(topology)
        for slot in range(2 * len(topology.links) + len(topology.hosts)):
            kernel.update(plane.maps["wires"], slot, struct.pack("<I", LOOPBACK))
        plane.install(topology, assemble(topology, [rule]), grace=0)
        run = {name: kernel.ProgramRunner(plane.programs[name]) for name in PROGRAMS}
        frame = packets.udp(addresses(ends[0]), addresses(ends[1]), sport=1, dport=2)
        first = topology.hosts[ends[0]].switch
        plane.configure(first_ifindex=(LOOPBACK - host_slot(topology, ends[0])) & 0xFFFFFFFF, use_cache=0)
        # One ordinary run, to have a packet as it travels.
        whole = kernel.ProgramRunner(plane.programs["fabric_switch"])
        _, inside, _ = whole(frame, ifindex=LOOPBACK)
        header = structs.read_header(plane.size, inside)
        second, third = header.path[0], header.path[1] if len(header.path) > 1 else None
        kernel.update(plane.maps["kept"], 0, inside[14 : 14 + plane.size.header])
        if third is not None:  # a real device behind the next port, so that reading its carrier is part of the cost
            out = slot_towards(topology, second, third)
            plane.configure(first_ifindex=(LOOPBACK - out) & 0xFFFFFFFF)
            kernel.ProgramRunner(plane.programs["adopt"])(bytes(64), ifindex=LOOPBACK)
            assert plane.port(out)[5]
        samples: dict[str, list[int]] = {
            k: [] for k in ("search", "cached", "transit", "plain", "recompute", "nothing")
        }
        for _ in range(turns):
            for cache, name in ((0, "search"), (1, "cached")):
                plane.configure(first_ifindex=(LOOPBACK - host_slot(topology, ends[0])) & 0xFFFFFFFF, use_cache=cache)
                samples[name].append(run["bench_ingress"](frame, ifindex=LOOPBACK, repeat=repeat)[2])
            plane.configure(first_ifindex=(LOOPBACK - slot_towards(topology, second, first)) & 0xFFFFFFFF)
            for name in ("nothing", "transit", "plain"):
                samples[name].append(run[f"bench_{name}"](inside, ifindex=LOOPBACK, repeat=repeat)[2])
            if third is not None:
                link = topology.link_index[frozenset((second, third))]
                for drained in (True, False):
                    for end in (0, 1):
                        plane.set_flag(link_slot(link, end), structs.DRAINED, drained)
                    if drained:
                        samples["recompute"].append(run["bench_transit"](inside, ifindex=LOOPBACK, repeat=repeat)[2])
        medians = {k: float(statistics.median(v)) if v else float("nan") for k, v in samples.items()}
    return PacketCost(topology.name, len(topology.switches), rule.name, header.length, **medians)

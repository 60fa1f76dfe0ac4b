"""The bytes of the switches' tables: Python's side of bpf/maps.h and bpf/header.h, one function per struct."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

from .routing.automaton import MAX_RANKS, MAX_STATES, UNBOUNDED_HOPS, Automaton
from .routing.topology import Topology

ETH_FABRIC, ETH_PROBE = 0x88B5, 0x88B6
CARRIED = 16
POLICIES, NOTICE_POLICY = 64, 63
UNBOUNDED = 0xFFFF
TO_SWITCH, TO_HOST = 1, 2
DRAINED, SILENT = 1, 2
COUNTERS = (
    "ingress", "transit", "delivered", "searched", "rerouted", "continued", "retried", "cached",
    "answered", "noticed", "drop no path", "drop violation", "drop denied", "drop paused", "drop unknown host",
    "drop hops", "drop stale", "drop malformed", "drop silent link", "drop queue full", "drop too big", "drop spoofed",
    "drop other",
)  # fmt: skip
DROPS = tuple(c for c in COUNTERS if c.startswith("drop"))
PORT = struct.Struct("<HHHBBQQQQQ")
SETTINGS, SLOTS = ".data.config", ".data.slots"
"""The maps behind the variables of these sections."""
CONFIG = struct.Struct("<IIQQQIIQQ")
RECORD = struct.Struct("<H2s2H124H")


@dataclass(frozen=True)
class Size:
    """What the data plane was built for: sets of `words` 64-bit words."""

    words: int

    @property
    def nodes(self) -> int:
        return 64 * self.words

    @property
    def links(self) -> int:
        return {1: 128, 2: 512}.get(self.words, 1024)

    @property
    def header(self) -> int:
        """Bytes that a packet grows by inside the fabric."""
        return 24 + 2 * CARRIED + self.links // 8

    @property
    def node(self) -> int:
        """Bytes of struct node: links heard of as failed, when each belief is over, when the first, rest, version."""
        return self.links // 8 + 8 * self.links + 24

    def bits(self, members: set[int] | frozenset[int] | list[int]) -> bytes:
        return sum(1 << m for m in set(members)).to_bytes(8 * self.words, "little")


def size_for(topology: Topology) -> Size:
    """The smallest build that holds a topology."""
    for words in (1, 2, 4, 8):
        size = Size(words)
        if len(topology.switches) <= size.nodes and len(topology.links) <= size.links:
            return size
    raise AssertionError("checked by Topology.check")


def graph(size: Size, topology: Topology, generation: int, *, without: frozenset[int] = frozenset()) -> bytes:
    """struct graph; links in `without` are not there."""
    near: list[list[int]] = [[] for _ in range(size.nodes)]
    ends = b""
    for i, link in enumerate(topology.links):
        ends += struct.pack("<HH", link.a, link.b)
        if i not in without:
            near[link.a].append(link.b)
            near[link.b].append(link.a)
    head = struct.pack("<II", generation, len(topology.switches))
    return head + b"".join(size.bits(n) for n in near) + ends.ljust(4 * size.links, b"\0")


def policy(size: Size, automaton: Automaton, generation: int) -> bytes:
    """struct policy."""
    by: list[list[set[int]]] = [[set() for _ in range(MAX_STATES)] for _ in range(MAX_STATES)]
    step = bytearray(b"\xff" * (MAX_STATES * size.nodes))
    into = [0] * MAX_STATES
    for state, row in enumerate(automaton.step):
        for switch, after in enumerate(row):
            if after >= 0:
                by[state][after].add(switch)
                into[state] |= 1 << after
                step[state * size.nodes + switch] = after
    accept = [sum(1 << q for q in states) for states in automaton.accept] + [0] * (MAX_RANKS - len(automaton.accept))
    hops = UNBOUNDED if automaton.max_hops >= UNBOUNDED_HOPS else automaton.max_hops
    head = struct.pack("<I4BHH", generation, automaton.states, automaton.start, len(automaton.accept), 1, hops, 0)
    return head + bytes(accept) + bytes(into) + bytes(step) + b"".join(size.bits(s) for row in by for s in row)


def port(node: int, peer: int, link: int, kind: int, *, flags: int = 0, rate: float = 0.0) -> bytes:
    """struct port; `rate` in bytes per second."""
    return PORT.pack(node, peer, link, kind, flags, 0, 0, 0, 0, int(1e12 / rate) if rate else 0)


def slots(size: Size, ways: list[dict[int, int]]) -> bytes:
    """The port of each switch towards each neighbour; what is no neighbour leads to a slot that does not exist."""
    made = bytearray(b"\xff" * (2 * size.nodes * size.nodes))
    for here, known in enumerate(ways):
        for there, slot in known.items():
            struct.pack_into("<H", made, 2 * (here * size.nodes + there), slot)
    return bytes(made)


def host_key(address: str, side: int) -> bytes:
    parsed = ipaddress.ip_address(address)
    raw = parsed.packed if parsed.version == 6 else b"\0" * 10 + b"\xff\xff" + parsed.packed
    return raw + struct.pack("<I", side)


def host(mac: str, node: int, slot: int, group: int) -> bytes:
    return bytes.fromhex(mac.replace(":", "")) + struct.pack("<HHH", node, slot, group)


def class_key(source: int, target: int, port: int, side: int) -> bytes:
    return struct.pack("<HH", source, target) + struct.pack(">H", port) + struct.pack("<H", side)


@dataclass(frozen=True)
class FabricHeader:
    """struct fabric_header, as read from a packet."""

    kind: int
    flags: int
    generation: int
    policy: int
    state: int
    hop: int
    length: int
    life: int
    hops_left: int
    source: int
    target: int
    port: int
    computed: int
    flow: int
    met: int
    path: tuple[int, ...]
    failed: frozenset[int]


def read_header(size: Size, packet: bytes) -> FabricHeader:
    at = 14
    kind, flags, generation, policy, state, hop, length, life = packet[at : at + 8]
    left, source, target, port, computed, flow, met = struct.unpack_from("<7H", packet, at + 10)
    path = struct.unpack_from(f"<{CARRIED}H", packet, at + 24)[:length]
    raw = int.from_bytes(packet[at + 24 + 2 * CARRIED : at + size.header], "little")
    failed = frozenset(i for i in range(size.links) if raw >> i & 1)
    return FabricHeader(
        kind, flags, generation, policy, state, hop, length, life, left, source, target, port, computed, flow,
        met, path, failed,
    )  # fmt: skip

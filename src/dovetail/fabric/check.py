"""Checking a running fabric: real probes between hosts, every one compared with the oracle.

A probe is classified and forwarded like any packet of its class, and every switch it visits signs it. So what arrives
proves its own walk, and what does not arrive must be a drop that some switch counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import select
import socket
import time
from collections.abc import Iterator, Sequence

from dovetail.core.errors import Error

from . import netns, packets, structs
from .dataplane import PAUSE, addresses
from .emulation import Fabric
from .routing import oracle
from .routing.automaton import Automaton, backtrack_closed
from .wiring import HOST_DEVICE

BATCH = 48
"""Probes under way at once: well below the 256 frames that a port's ring holds."""
PORT = 9
"""Destination of a probe unless a class asks for another: "discard"."""
PATIENCE = 2.0
"""Seconds after which a probe that neither arrived nor was counted as dropped is missing."""
ATTEMPTS = 5
"""Attempts at a check during which links fail or come back: what it sees then fits no one graph."""


@dataclasses.dataclass
class CheckReport:
    """Counts of probes by what became of them, and a line for every fault."""

    probes: int = 0
    delivered: int = 0
    no_path: int = 0
    """Rightly dropped: no compliant path survives."""
    denied: int = 0
    """Rightly dropped: the policy forbids this traffic."""
    stranded: int = 0
    """Dropped although a path survives, under a policy whose compilation warned of it."""
    violations: list[str] = dataclasses.field(default_factory=list)
    loops: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)
    """Not delivered although a compliant path survives, or not accounted for."""
    less_preferred: list[str] = dataclasses.field(default_factory=list)
    """Delivered on a path that the policy likes less than one that survives."""
    hops: int = 0
    """Of all delivered probes together."""
    best_hops: int = 0

    @property
    def faults(self) -> list[str]:
        return [*self.violations, *self.loops, *self.lost, *self.less_preferred]

    @property
    def holds(self) -> bool:
        return not self.faults

    @property
    def stretch(self) -> float:
        """Hops of the delivered probes over the fewest possible."""
        return self.hops / self.best_hops if self.best_hops else 1.0


class Prober:
    """Raw sockets on every host, for frames of the probe's ethertype only."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.sockets: list[socket.socket] = []
        self.poll = select.epoll()
        for h in range(len(fabric.topology.hosts)):
            with netns.inside(fabric.names.host(h)):
                made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(structs.ETH_PROBE))
                made.bind((HOST_DEVICE, structs.ETH_PROBE))
            made.setblocking(False)
            self.sockets.append(made)
            self.poll.register(made, select.EPOLLIN)
        self.by_fd = {s.fileno(): h for h, s in enumerate(self.sockets)}
        self._sent = 0  # numbers the probes, so that one that comes late is not taken for another

    def close(self) -> None:
        self.poll.close()
        for s in self.sockets:
            s.close()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self, wanted: Sequence[tuple[int, int, int]], *, v6: bool = False, dport: int = PORT
    ) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Sends probes (source, target, flow); returns (host, walk) for those that arrived, by position."""
        arrived: dict[int, tuple[int, tuple[int, ...]]] = {}
        first, self._sent = self._sent, self._sent + len(wanted)

        def take(wait: float) -> None:
            for number, what in self._arrivals(wait):
                if 0 <= number - first < len(wanted):
                    arrived[number - first] = what

        for start in range(0, len(wanted), BATCH):
            group = wanted[start : start + BATCH]
            before = self._drops()
            for i, (source, target, flow) in enumerate(group, start):
                frame = packets.udp(
                    addresses(source),
                    addresses(target),
                    sport=1024 + flow % 60000,
                    dport=dport,
                    payload=b"probe",
                    v6=v6,
                )
                self.sockets[source].send(packets.probe(frame, ((first + i) & 0xFFFF, (first + i) >> 16)))
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                take(0.002)
                got = sum(1 for i in range(start, start + len(group)) if i in arrived)
                if got == len(group):
                    break
                if got + self._drops() - before >= len(group):
                    take(0.01)  # another packet may have been dropped instead of one that is still on its way
                    break
        return arrived

    def _arrivals(self, wait: float) -> Iterator[tuple[int, tuple[int, tuple[int, ...]]]]:
        while events := self.poll.poll(wait):
            for fd, _ in events:
                host = self.by_fd[fd]
                try:
                    frame, where = self.sockets[host].recvfrom(2048)
                except BlockingIOError:
                    continue
                if where[2] == socket.PACKET_OUTGOING:
                    continue
                walk, tag, _ = packets.read_probe(frame)
                yield tag[0] | tag[1] << 16, (host, walk)

    def _drops(self) -> int:
        totals = self.fabric.plane.totals(self.fabric.topology)
        # What hosts send on their own (router solicitations and the like) is no probe.
        return sum(totals[d] for d in structs.DROPS if d not in ("drop other", "drop unknown host"))


def check(
    fabric: Fabric, *, flows: int = 2, most: int = 20_000, seed: int = 0, v6: bool = False, prober: Prober | None = None
) -> CheckReport:
    """Probes every ordered pair of hosts, `flows` flows each (a random sample where that is more than `most`).

    A pair that has a class of its own for some port is probed on that port too.
    """
    topology = fabric.topology
    if len(topology.hosts) < 2:
        raise Error(f"{topology.name}: checking needs at least two hosts")
    pairs = [(a, b) for a, b in itertools.permutations(range(len(topology.hosts)), 2)]
    ports = {PORT: pairs} | {
        port: [p for p in pairs if fabric.policies.has_class(*p, port)]
        for port in sorted(fabric.policies.ports - {PORT})
    }
    wanted = [(port, a, b, flow * 7919 + seed) for port in ports for a, b in ports[port] for flow in range(flows)]
    if len(wanted) > most:
        wanted = random.Random(seed).sample(wanted, most)
    groups = {port: [(a, b, flow) for p, a, b, flow in wanted if p == port] for port in ports}
    with contextlib.ExitStack() as stack:
        sender = prober or stack.enter_context(Prober(fabric))
        for _ in range(ATTEMPTS):
            down = fabric.failed()
            report = _probe(fabric, groups, sender, down, v6=v6)
            if fabric.failed() == down:  # a healed link may get its carrier up to a second later
                return report
    raise Error(f"{topology.name}: links kept failing or coming back while probes were on their way")


def _probe(
    fabric: Fabric, groups: dict[int, list[tuple[int, int, int]]], sender: Prober, down: frozenset[int], *, v6: bool
) -> CheckReport:
    time.sleep(1.2 * PAUSE)  # until classes that were paused before a link came back are tried again
    # A link that came back within the last second may still be believed failed, and a worse path be taken for it.
    outdated = any(fabric.plane.believed(s) - down for s in range(len(fabric.topology.switches)))
    report = CheckReport()
    for port, group in groups.items():
        judge(report, fabric, group, sender.send(group, v6=v6, dport=port), down, port=port)
    if outdated:
        report.less_preferred.clear()
    return report


def judge(
    report: CheckReport,
    fabric: Fabric,
    wanted: Sequence[tuple[int, int, int]],
    arrived: dict[int, tuple[int, tuple[int, ...]]],
    down: frozenset[int],
    *,
    port: int = PORT,
) -> None:
    """Compares what arrived with the oracle on the graph that survives `down`, and adds it to the report."""
    topology = fabric.topology
    alive = topology.surviving(down)
    report.probes += len(wanted)
    products: dict[Automaton, object] = {}
    best: dict[tuple[Automaton, int], dict[int, oracle.Best]] = {}
    for i, (source, target, _) in enumerate(wanted):
        automaton = fabric.policies.of(source, target, port)
        a, b = topology.hosts[source].switch, topology.hosts[target].switch
        pair = f"{topology.hosts[source].name} to {topology.hosts[target].name}"
        if automaton is None:
            if i in arrived:
                report.violations.append(f"{pair}: denied, but arrived")
            else:
                report.denied += 1
            continue
        if (automaton, a) not in best:
            if automaton not in products:
                products[automaton] = oracle.product(alive, automaton)
            best[automaton, a] = oracle.best_from(products[automaton], automaton, a)
        expected = best[automaton, a].get(b)
        if i not in arrived:
            if expected is None:
                report.no_path += 1
            elif not backtrack_closed(automaton):
                report.stranded += 1
            else:
                report.lost.append(f"{pair}: lost, although {show(fabric, expected.walk)} is up and compliant")
            continue
        host, walk = arrived[i]
        report.delivered += 1
        why = oracle.violation(alive, automaton, walk, a, b) or ("came out at another host" if host != target else "")
        if why or expected is None:
            report.violations.append(f"{pair}: {show(fabric, walk)} {why or 'where no path should be'}")
            continue
        if oracle.repeats(walk, automaton, len(down) + bool(down)):
            report.loops.append(f"{pair}: {show(fabric, walk)}")
        if automaton.run(walk) != expected.rank and backtrack_closed(automaton):
            report.less_preferred.append(f"{pair}: {show(fabric, walk)}, although {show(fabric, expected.walk)} is up")
        report.hops += len(walk) - 1
        report.best_hops += expected.hops


def show(fabric: Fabric, walk: Sequence[int]) -> str:
    return " → ".join(fabric.topology.switches[s] for s in walk)


@dataclasses.dataclass(frozen=True)
class PathTrace:
    """The path of one probe, by names."""

    source: str
    target: str
    policy: str
    walk: tuple[str, ...]
    """Empty where the probe did not arrive."""
    why: str


def find_walk(fabric: Fabric, source: int, target: int, *, flow: int = 0, port: int = PORT) -> tuple[int, ...]:
    """The switches that a probe of this flow visits now; empty where it does not arrive."""
    with Prober(fabric) as prober:
        arrived = prober.send([(source, target, flow)], dport=port)
    return arrived[0][1] if arrived else ()


def trace(fabric: Fabric, source: int, target: int, *, flow: int = 0, port: int = PORT) -> PathTrace:
    """The path of one probe, and the reason for it."""
    topology = fabric.topology
    automaton = fabric.policies.of(source, target, port)
    a, b = topology.hosts[source].switch, topology.hosts[target].switch
    names = topology.hosts[source].name, topology.hosts[target].name
    if automaton is None:
        return PathTrace(*names, "denied", (), "the policy denies this traffic; it is dropped at its first switch")
    down = fabric.failed()
    whole, left = (oracle.best(g, automaton, a, b) for g in (topology.graph, topology.surviving(down)))
    walk = find_walk(fabric, source, target, flow=flow, port=port)
    if not walk:
        if left:
            why = f"lost, although {show(fabric, left.walk)} is up and compliant"
        else:
            cut = ", ".join(topology.link_name(i) for i in sorted(down)) or "nothing"
            why = f"no compliant path survives (down: {cut}); dropped and counted"
        return PathTrace(*names, automaton.name, (), why)
    assert left and whole
    hops = len(walk) - 1
    parts = [f"{hops} hops, the fewest that policy {automaton.name!r} allows" if hops == left.hops else f"{hops} hops"]
    if hops > left.hops:
        parts.append(f"{hops - left.hops} more than needed: it met a failure on its way; later packets will avoid it")
    if left.hops > whole.hops:
        parts.append(f"{left.hops - whole.hops} more than with every link up")
    rank = automaton.run(walk)
    if len(automaton.accept) > 1:
        parts.append("its preference is met" if rank == 0 else f"preference {rank} (better ones are cut off)")
    if down:
        parts.append(f"down: {', '.join(topology.link_name(i) for i in sorted(down))}")
    return PathTrace(*names, automaton.name, tuple(topology.switches[s] for s in walk), "; ".join(parts))

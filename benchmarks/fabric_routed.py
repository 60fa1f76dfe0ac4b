"""The same fabric with ordinary routers, as the baseline: switches forward in the kernel by routing tables.

The tables are filled in three ways: static ECMP (all shortest paths, written once; a switch leaves out next hops whose
link it sees down), a controller (the same, and a central process that sees every carrier change at once, waits `delay`
seconds as a detection and reaction time, recomputes and writes what changed), and FRR (`fabric_frr.py`). Namespaces,
devices and hosts are those of `dovetail.fabric.wiring`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.fabric import hooks, kernel, netns
from dovetail.fabric.dataplane import FIRST_IFINDEX, addresses, host_slot, link_slot, slot_towards
from dovetail.fabric.emulation import down
from dovetail.fabric.extra import nx
from dovetail.fabric.routing.topology import Topology
from dovetail.fabric.wiring import HOST_DEVICE, HOST_IFINDEX, Names, build, device, ports_of
from fabric_loss import traffic

DROP = Path(__file__).parent / "fabric_bpf" / "drop.bpf.c"


def subnet(host: int) -> str:
    """The /30 of a host's link."""
    return f"{ipaddress.ip_address(addresses(host).v4) - 1}/30"


def gateway(host: int) -> str:
    """The switch's address on a host's link."""
    return str(ipaddress.ip_address(addresses(host).v4) + 1)


def link_address(link: int, end: int) -> str:
    """Each link is a /31 of 172.16.0.0/12."""
    n = 2 * link + end
    return f"172.16.{n >> 8}.{n & 255}"


class Routed:
    """A fabric of kernel routers."""

    def __init__(self, names: Names, topology: Topology) -> None:
        self.names, self.topology = names, topology
        self.routes: list[dict[int, list[int]]] = [{} for _ in topology.switches]
        """For each switch: host → neighbours."""
        self._drop: kernel.BpfObject | None = None

    def build(self, *, superframes: bool = True) -> None:
        """Routers and hosts without routes; a link with a rate is shaped at both ends.

        `superframes`: frames of 64 KiB and no checksums between namespaces, as veth does by default, and ours at tc;
        without, all is cut to the MTU as on a wire.
        """
        topology, names = self.topology, self.names
        build(names, topology)
        ends = {link_slot(i, e): link_address(i, e) for i in range(len(topology.links)) for e in (0, 1)}
        gateways = {host_slot(topology, h): gateway(h) for h in range(len(topology.hosts))}
        rates = [link.rate for link in topology.links for _ in range(2)] + [host.rate for host in topology.hosts]
        for s, slots in enumerate(ports_of(topology)):
            with netns.inside(names.switch(s)), netns.netlink() as route:
                netns.sysctl("ipv4/ip_forward", "1")
                netns.sysctl("ipv4/conf/all/ignore_routes_with_linkdown", "1")
                # Flows by addresses, protocol, ports. The usual policy 1 would take the hash that the sender's socket
                # drew by lot, which veth carries along: a wire would not.
                netns.sysctl("ipv4/fib_multipath_hash_policy", "3")
                netns.sysctl("ipv4/fib_multipath_hash_fields", "55")
                netns.sysctl("ipv4/conf/all/rp_filter", "0")
                netns.sysctl("ipv4/conf/default/rp_filter", "0")
                for slot in slots:
                    index = FIRST_IFINDEX + slot
                    if slot in ends:
                        netns.sysctl(f"ipv4/conf/{device(slot)}/ignore_routes_with_linkdown", "1")
                        netns.offload(device(slot), tx=superframes, tso=superframes, gro=True)
                        route.addr("add", index=index, address=ends[slot], prefixlen=31)
                    else:
                        route.addr("add", index=index, address=gateways[slot], prefixlen=30)
                    if rates[slot]:
                        netns.shape(route, index, rates[slot], topology.mtu)
        for h in range(len(topology.hosts)):
            with netns.inside(names.host(h)), netns.netlink() as route:
                route.addr("add", index=HOST_IFINDEX, address=addresses(h).v4, prefixlen=30)
                route.route("add", dst="default", gateway=gateway(h), oif=HOST_IFINDEX)
                if superframes:
                    netns.offload(HOST_DEVICE, tx=True, tso=True)

    def push(self, graph: nx.Graph) -> int:
        """Writes all shortest paths of `graph` into the switches, only what changed; returns how many routes."""
        topology, changed = self.topology, 0
        distance = dict(nx.all_pairs_shortest_path_length(graph))
        for s in range(len(topology.switches)):
            lines = []
            for h, host in enumerate(topology.hosts):
                if host.switch == s:
                    continue
                far = distance[s].get(host.switch)
                hops = [] if far is None else [n for n in graph[s] if distance[n].get(host.switch) == far - 1]
                if hops == self.routes[s].get(h):
                    continue
                old, self.routes[s][h] = self.routes[s].get(h), hops
                changed += 1
                if hops:
                    parts = " ".join(
                        f"nexthop via {self._peer(s, n)} dev {device(slot_towards(topology, s, n))}" for n in hops
                    )
                    lines.append(f"route replace {subnet(h)} {parts}")
                elif old:
                    lines.append(f"route del {subnet(h)}")
            if lines:
                with netns.inside(self.names.switch(s)):
                    subprocess.run(
                        ["ip", "-force", "-batch", "-"],
                        input="\n".join(lines) + "\n",
                        text=True,
                        capture_output=True,
                        check=False,
                    )
        return changed

    def restore(self) -> None:
        """Writes all routes anew: the kernel forgets those whose last next hop went down."""
        self.routes = [{} for _ in self.topology.switches]
        self.push(self.topology.graph)

    def _peer(self, here: int, there: int) -> str:
        link = self.topology.link_index[frozenset((here, there))]
        return link_address(link, 0 if self.topology.links[link].a == there else 1)

    # what fabric_loss.measure needs

    def run(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(["ip", "netns", "exec", self.names.host(host), *command], **options)

    def _ends(self, link: int) -> list[tuple[str, int]]:
        ends = (self.topology.links[link].a, self.topology.links[link].b)
        return [(self.names.switch(s), link_slot(link, e)) for e, s in enumerate(ends)]

    def fail(self, link: int, *, how: str = "down", end: int = 0) -> None:
        """Carrier lost, or ("silent") every frame that arrives at either end vanishes."""
        if how == "down":
            where, slot = self._ends(link)[end]
            with netns.inside(where):
                netns.set_up(FIRST_IFINDEX + slot, False)
            return
        self._drop = self._drop or kernel.BpfObject(kernel.build(DROP, words=1))
        for where, slot in self._ends(link):
            with netns.inside(where):
                hooks.attach(hooks.XDP, FIRST_IFINDEX + slot, self._drop.program("drop_all"))

    def heal(self, link: int) -> None:
        for where, slot in self._ends(link):
            with netns.inside(where), netns.netlink() as route:
                if self._drop:
                    route.link("set", index=FIRST_IFINDEX + slot, xdp_fd=-1)
                route.link("set", index=FIRST_IFINDEX + slot, state="up")

    def walk_of(self, source: int, target: int, sport: int, dport: int) -> tuple[int, ...]:
        """The switches that a UDP flow visits now: those whose ports count its frames."""
        before = self._received()
        command = [traffic(), "send", addresses(target).v4, str(dport), str(sport), "4000", "0.1", "64"]
        self.run(source, command, stdout=subprocess.DEVNULL).wait(10)
        time.sleep(0.05)
        after = self._received()
        walk = [self.topology.hosts[source].switch]
        goal = self.topology.hosts[target].switch
        while walk[-1] != goal:
            here = walk[-1]
            ahead = [n for n in self.topology.graph[here] if n not in walk]
            if not ahead:
                return ()
            # Frames of this flow that came in at the neighbour's end of the link.
            counts = [(after[x] - before[x], n) for n in ahead if (x := slot_towards(self.topology, n, here)) in after]
            most, there = max(counts)
            if most < 200:
                return ()
            walk.append(there)
        return tuple(walk)

    def _received(self) -> dict[int, int]:
        counts = {}
        for s in range(len(self.topology.switches)):
            with netns.inside(self.names.switch(s)):
                for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
                    name, _, rest = line.partition(":")
                    if name.strip().startswith("p"):
                        counts[int(name.strip()[1:])] = int(rest.split()[1])
        return counts


class RouteController(threading.Thread):
    """Sees every carrier change of every switch; `delay` seconds later recomputes and writes what changed."""

    def __init__(self, routed: Routed, *, delay: float) -> None:
        super().__init__(daemon=True)
        self.routed, self.delay, self.stopped = routed, delay, threading.Event()
        self.down: set[int] = set()
        self.sockets: dict[int, tuple[int, socket.socket]] = {}
        self.poll = select.epoll()
        for s in range(len(routed.topology.switches)):
            with netns.inside(routed.names.switch(s)):
                made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
                made.bind((0, 1))  # RTMGRP_LINK
            self.sockets[made.fileno()] = (s, made)
            self.poll.register(made, select.EPOLLIN)

    def run(self) -> None:
        while not self.stopped.is_set():
            events = self.poll.poll(0.1)
            changed = [link for fd, _ in events for link in self._read(fd)]
            if not changed:
                continue
            time.sleep(self.delay)
            for fd, _ in self.poll.poll(0):
                self._read(fd)
            self.routed.push(self.routed.topology.surviving(self.down))

    def _read(self, fd: int) -> list[int]:
        raw, at, changed = self.sockets[fd][1].recv(65536), 0, []
        while at + 32 <= len(raw):
            length, kind = struct.unpack_from("<IH", raw, at)
            if kind == 16:  # RTM_NEWLINK
                index, flags = struct.unpack_from("<iI", raw, at + 20)
                link = (index - FIRST_IFINDEX) // 2
                if 0 <= link < len(self.routed.topology.links):
                    is_up = flags & 0x10001 == 0x10001  # IFF_UP and IFF_LOWER_UP
                    if is_up == (link in self.down):
                        (self.down.discard if is_up else self.down.add)(link)
                        changed.append(link)
            at += max(length + 3 & ~3, 16)
        return changed

    def stop(self) -> None:
        self.stopped.set()
        self.join(10)
        self.poll.close()
        for _, s in self.sockets.values():
            s.close()


@contextlib.contextmanager
def routed(topology: Topology, *, superframes: bool = True, push: bool = True) -> Iterator[Routed]:
    """A fabric of routers for the duration of a block, all shortest paths in its tables."""
    name = f"r{os.getpid()}x{time.monotonic_ns() % 10**6}"[:16]
    made = Routed(Names(name, f"{name}-{os.getpid()}"), topology)
    try:
        made.build(superframes=superframes)
        if push:
            made.push(topology.graph)
        yield made
    finally:
        down(name)

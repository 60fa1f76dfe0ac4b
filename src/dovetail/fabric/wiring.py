"""The wiring of an emulated fabric: namespaces for switches and hosts, veth pairs for links, programs on the ports."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from . import hooks, kernel, netns
from .dataplane import FIRST_IFINDEX, DataPlane, addresses, host_slot, link_slot
from .routing.topology import Topology

HOST_DEVICE = "eth0"
HOST_IFINDEX = FIRST_IFINDEX - 1
"""Index of HOST_DEVICE in its namespace: above those of devices that kernel modules put into every namespace."""


@dataclass(frozen=True)
class Names:
    """The names of one fabric's namespaces. `run` is the fabric's name and the process that built it."""

    name: str
    run: str

    @property
    def prefix(self) -> str:
        return f"{netns.PREFIX}{self.run}-"

    def switch(self, index: int) -> str:
        return f"{self.prefix}s{index}"

    def host(self, index: int) -> str:
        return f"{self.prefix}h{index}"


def device(slot: int) -> str:
    """The name of a switch's port."""
    return f"p{slot}"


def ports_of(topology: Topology) -> list[list[int]]:
    """The slots of each switch's ports."""
    ports: list[list[int]] = [[] for _ in topology.switches]
    for i, link in enumerate(topology.links):
        ports[link.a].append(link_slot(i, 0))
        ports[link.b].append(link_slot(i, 1))
    for h, host in enumerate(topology.hosts):
        ports[host.switch].append(host_slot(topology, h))
    return ports


def build(names: Names, topology: Topology, *, hook: str = "", header: int = 0) -> None:
    """Makes namespaces, devices and addresses; links between switches are wider than hosts' MTU by `header` bytes.

    Without a `hook` the switches are plain routers: hosts get no addresses, since a router's subnets differ.
    """
    switches, hosts = range(len(topology.switches)), range(len(topology.hosts))
    netns.create([*map(names.switch, switches), *map(names.host, hosts)])
    with netns.netlink() as route:
        for i, link in enumerate(topology.links):
            a, b = (_port(names.switch(s), link_slot(i, end)) for end, s in enumerate((link.a, link.b)))
            _add_pair(route, a, b, mtu=topology.mtu + header)
        for h, host in enumerate(topology.hosts):
            at_switch = _port(names.switch(host.switch), host_slot(topology, h))
            at_host = (names.host(h), HOST_DEVICE, HOST_IFINDEX)
            _add_pair(route, at_switch, at_host, mtu=topology.mtu, mac=addresses(h).mac)
    ports = ports_of(topology)
    for s in switches:
        with netns.inside(names.switch(s)), netns.netlink() as route:
            if hook:
                netns.sysctl("ipv6/conf/all/disable_ipv6", "1")
                netns.sysctl("ipv6/conf/default/disable_ipv6", "1")
            for index in (1, *(FIRST_IFINDEX + slot for slot in ports[s])):
                route.link("set", index=index, state="up")
            if hook == hooks.TC:  # GRO lets a device take heartbeats, which are redirected frames
                for slot in (slot for slot in ports[s] if slot < 2 * len(topology.links)):
                    netns.offload(device(slot), gro=True)
    for h, host in enumerate(topology.hosts):
        with netns.inside(names.host(h)), netns.netlink() as route:
            for where in ("default", "all", HOST_DEVICE):
                netns.sysctl(f"ipv6/conf/{where}/accept_dad", "0")
            netns.sysctl(f"ipv6/conf/{HOST_DEVICE}/router_solicitations", "0")
            for index in (1, HOST_IFINDEX):
                route.link("set", index=index, state="up")
            if hook:
                route.addr("add", index=HOST_IFINDEX, address=addresses(h).v4, prefixlen=8)
                route.addr("add", index=HOST_IFINDEX, address=addresses(h).v6, prefixlen=64)
            if hook != hooks.TC:
                # Frames pass between namespaces as bare bytes: a checksum left to the device would never be filled in,
                # and a frame longer than the MTU never cut. GRO on (while up) lets a device take redirected frames.
                netns.offload(HOST_DEVICE, tx=False, tso=False, gso=True, gro=True)
            if host.rate:
                netns.shape(route, HOST_IFINDEX, host.rate, topology.mtu)


def _port(namespace: str, slot: int) -> tuple[str, str, int]:
    return namespace, device(slot), FIRST_IFINDEX + slot


def _add_pair(route: Any, end: tuple[str, str, int], peer: tuple[str, str, int], *, mtu: int, mac: str = "") -> None:
    """Adds a veth pair; both ends as (namespace, device, index), `mac` for the second one.

    The attributes are written out since pyroute2's shorter form leaves out the peer's index.
    """
    (namespace, name, index), (peer_namespace, peer_name, peer_index) = end, peer
    attributes: list[tuple[str, Any]] = [("IFLA_IFNAME", peer_name), ("IFLA_MTU", mtu)]
    attributes += [("IFLA_NET_NS_FD", str(netns.WHERE / peer_namespace)), *([("IFLA_ADDRESS", mac)] if mac else [])]
    data = {"attrs": [("VETH_INFO_PEER", {"index": peer_index, "attrs": attributes})]}
    info = {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", data)]}
    where = str(netns.WHERE / namespace)
    route.link("add", ifname=name, index=index, mtu=mtu, net_ns_fd=where, IFLA_LINKINFO=info)


def attach(names: Names, topology: Topology, plane: DataPlane) -> None:
    """Puts the switch program on every port: wires first, then programs, so that no port forwards before all can."""
    adopt = kernel.ProgramRunner(plane.programs["adopt"])
    ports = ports_of(topology)
    for s, slots in enumerate(ports):
        with netns.inside(names.switch(s)):
            for slot in slots:
                kernel.update(plane.maps["wires"], slot, struct.pack("<I", FIRST_IFINDEX + slot))
    for s, slots in enumerate(ports):
        with netns.inside(names.switch(s)):
            for slot in slots:
                hooks.attach(plane.hook, FIRST_IFINDEX + slot, plane.programs["fabric_switch"])
                adopt(bytes(64), ifindex=FIRST_IFINDEX + slot)

"""Emulation: a fabric of network namespaces on one machine, with real packets.

A switch is a namespace with the switch program on each of its ports (at tc, or at XDP as on physical ports), a host is
a namespace with one device, a link is a veth pair. Everything a fabric needs lives in the kernel, held by its
namespaces: there is no daemon, commands find a running fabric by its namespaces, and removing them removes it. A small
file in RUN says what was asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.core.errors import Error
from dovetail.core.files import write_text

from . import hooks, kernel, netns, tables
from .dataplane import FIRST_IFINDEX, DataPlane, addresses, host_slot, link_slot
from .policy import Policies, compile_policy
from .topology import Host, Link, Topology

RUN = Path("/run/dovetail/fabric")
HOST_DEVICE = "eth0"
CARRIER = 2.0
"""Seconds in which a link that is healed has its carrier: the kernel notices at once, and tells in its own time."""
_NAME = re.compile("[a-z0-9]{1,16}")
_NAMESPACE = re.compile(rf"{netns.PREFIX}({_NAME.pattern})-[0-9]+-[sh][0-9]+")


@dataclasses.dataclass(frozen=True)
class Names:
    """What the parts of one fabric are called."""

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
    return f"p{slot}"


class Fabric:
    """A running fabric. Made by `up`, found again by `find`; `down` removes it, `close` only lets go of it."""

    def __init__(self, names: Names, topology: Topology, document: dict[str, Any], plane: DataPlane) -> None:
        self.names, self.topology, self.document, self.plane = names, topology, document, plane
        self.policies: Policies = compile_policy(document, topology)

    @property
    def name(self) -> str:
        return self.names.name

    def close(self) -> None:
        self.plane.close()

    # links

    def _ends(self, link: int) -> list[tuple[str, str, int]]:
        ends = (self.topology.links[link].a, self.topology.links[link].b)
        return [(self.names.switch(s), device(link_slot(link, e)), link_slot(link, e)) for e, s in enumerate(ends)]

    def fail(self, link: int, *, how: str = "down", end: int = 0) -> None:
        """Breaks a link: "down" (carrier lost), "silent" (frames vanish both ways), "one-way" (only those that arrive
        at `end`), or "drained" (taken out of service in good order)."""
        ends = self._ends(link)
        if how == "down":
            where, what, _ = ends[end]
            with netns.inside(where):
                netns.set_up(what, False)
        else:
            flag = tables.DRAINED if how == "drained" else tables.SILENT
            for _, _, slot in [ends[end]] if how == "one-way" else ends:
                self.plane.set_flag(slot, flag, True)

    def heal(self, link: int) -> None:
        for where, what, slot in self._ends(link):
            self.plane.set_flag(slot, tables.DRAINED | tables.SILENT, False)
            with netns.inside(where):
                netns.set_up(what, True)
        end = time.monotonic() + CARRIER
        while self.link_state(link) == "down" and time.monotonic() < end:
            time.sleep(0.002)

    def link_state(self, link: int) -> str:
        for where, what, slot in self._ends(link):
            flags = self.plane.port(slot)[4]
            if flags:
                return "drained" if flags & tables.DRAINED else "silent"
            with netns.inside(where):
                if not netns.is_up(what):
                    return "down"
        return "up"

    def failed(self) -> frozenset[int]:
        return frozenset(i for i in range(len(self.topology.links)) if self.link_state(i) != "up")

    # policies and hosts

    def use(self, document: dict[str, Any], source: str | Path = "<policy>") -> int:
        """Brings another policy into force, whole at once; returns the new generation."""
        policies = compile_policy(document, self.topology, source)
        generation = self.plane.install(self.topology, policies)
        self.policies, self.document = policies, document
        _remember(self.names, self.topology, document, "up")
        return generation

    def path(self, source: int, target: int, sport: int, dport: int) -> tuple[int, ...]:
        """The way a UDP flow takes now, as a probe of the same flow finds it."""
        from .check import Prober

        with Prober(self) as prober:
            arrived = prober.send([(source, target, sport - 1024)], dport=dport)
        return arrived[0][1] if arrived else ()

    def run(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host."""
        return subprocess.Popen(["ip", "netns", "exec", self.names.host(host), *command], **options)


def up(topology: Topology, document: dict[str, Any] | None = None, *, name: str = "lab", hook: str = "") -> Fabric:
    """Builds a fabric, or finds the one of this name and brings it to this policy; nothing is left if it fails.

    `hook`: where its programs sit. At "tc", the default of a new one, segments of 64 KiB cross it whole; at "xdp"
    frames are as on a wire.
    """
    wanted = hooks.chosen(hook, topology.mtu)
    if why := kernel.missing():
        raise Error(why)
    _check_name(name)
    document = document or {}
    policies = compile_policy(document, topology)  # refuse before anything is touched
    known = _recall(name)
    if known and known["state"] == "up":
        running = find(name)
        if running.topology != topology:
            running.close()
            raise Error(f"fabric {name!r} is up with another topology: `dovetail fabric down --name {name}` first")
        if hook and running.plane.hook != hook:
            there = running.plane.hook
            running.close()
            raise Error(f"fabric {name!r} is up at hook {there}: `dovetail fabric down --name {name}` first")
        running.use(document)
        return running
    if known:
        builder = int(known["run"].rpartition("-")[2])
        if builder != os.getpid() and Path(f"/proc/{builder}").exists():
            raise Error(
                f"fabric {name!r} is being built by process {builder}; `dovetail fabric down --name {name}` ends it"
            )
        down(name)  # what an interrupted `up` left behind
    names = Names(name, f"{name}-{os.getpid()}")
    plane = DataPlane.load(tables.size_for(topology), hook=wanted)
    try:
        _remember(names, topology, document, "building")
        _build(names, topology, plane)
        plane.install_ports(topology)
        plane.install(topology, policies, grace=0)
        _attach(names, topology, plane)
        made = Fabric(names, topology, document, plane)
        _remember(names, topology, document, "up")
    except BaseException:
        plane.close()
        down(name)
        raise
    return made


def _build(names: Names, topology: Topology, plane: DataPlane | None, *, mtu: int | None = None) -> None:
    """Namespaces, devices, addresses. With a data plane the links are wider by its header."""
    wide = mtu or topology.mtu + (plane.size.header if plane else 0)
    switches, hosts = range(len(topology.switches)), range(len(topology.hosts))
    netns.batch([f"netns add {names.switch(s)}" for s in switches] + [f"netns add {names.host(h)}" for h in hosts])
    lines = []
    for i, link in enumerate(topology.links):
        a, b = link_slot(i, 0), link_slot(i, 1)
        lines.append(
            f"link add {device(a)} index {FIRST_IFINDEX + a} netns {names.switch(link.a)} mtu {wide} type veth "
            f"peer name {device(b)} index {FIRST_IFINDEX + b} netns {names.switch(link.b)} mtu {wide}"
        )
    for h, host in enumerate(topology.hosts):
        slot = host_slot(topology, h)
        lines.append(
            f"link add {device(slot)} index {FIRST_IFINDEX + slot} netns {names.switch(host.switch)} "
            f"mtu {topology.mtu} type veth peer name {HOST_DEVICE} netns {names.host(h)} "
            f"mtu {topology.mtu} address {addresses(h).mac}"
        )
    netns.batch(lines)
    ports = ports_of(topology)
    for s in switches:
        with netns.inside(names.switch(s)):
            if plane:
                netns.sysctl("ipv6/conf/all/disable_ipv6", "1")
                netns.sysctl("ipv6/conf/default/disable_ipv6", "1")
            netns.set_up("lo", True)
            for slot in ports[s]:
                netns.set_up(device(slot), True)
                if plane and plane.hook == hooks.TC and slot < 2 * len(topology.links):
                    netns.offload(device(slot), gro=True)  # lets it take heartbeats, which are redirected frames
    for h, host in enumerate(topology.hosts):
        with netns.inside(names.host(h)):
            netns.sysctl("ipv6/conf/default/accept_dad", "0")
            netns.sysctl("ipv6/conf/all/accept_dad", "0")
            netns.sysctl(f"ipv6/conf/{HOST_DEVICE}/accept_dad", "0")
            netns.sysctl(f"ipv6/conf/{HOST_DEVICE}/router_solicitations", "0")
            netns.set_up("lo", True)
            netns.set_up(HOST_DEVICE, True)
            if plane:
                me = addresses(h)
                netns.add_addresses(HOST_DEVICE, me.v4, me.v6, 8, 64)
            if not plane or plane.hook == hooks.XDP:
                # Frames pass between namespaces as bare bytes: a checksum left to the device would never be filled in,
                # and a frame longer than the MTU never cut. GRO on (while up) lets a device take redirected frames.
                netns.offload(HOST_DEVICE, tx=False, tso=False, gso=True, gro=True)
        if host.rate:
            shape(names.host(h), HOST_DEVICE, host.rate, topology.mtu)


def shape(where: str, what: str, rate: float, mtu: int) -> None:
    """What leaves by a device leaves at `rate` bytes per second."""
    burst = max(16_000, mtu + 100, int(rate / 250))
    command = ["tc", "-n", where, "qdisc", "replace", "dev", what, "root", "tbf", "rate", f"{int(rate * 8)}bit"]
    done = subprocess.run(
        [*command, "burst", str(burst), "latency", "20ms"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Error(f"tc: {done.stderr.strip()}")


def ports_of(topology: Topology) -> list[list[int]]:
    """The slots of each switch's ports."""
    ports: list[list[int]] = [[] for _ in topology.switches]
    for i, link in enumerate(topology.links):
        ports[link.a].append(link_slot(i, 0))
        ports[link.b].append(link_slot(i, 1))
    for h, host in enumerate(topology.hosts):
        ports[host.switch].append(host_slot(topology, h))
    return ports


def _attach(names: Names, topology: Topology, plane: DataPlane) -> None:
    """Wires first, then devices, then programs: no port forwards before all of its switch can."""
    learn = kernel.Runner(plane.programs["adopt"])
    ports = ports_of(topology)
    for s, slots in enumerate(ports):
        with netns.inside(names.switch(s)):
            for slot in slots:
                kernel.update(plane.maps["wires"], slot, struct.pack("<I", FIRST_IFINDEX + slot))
    for s, slots in enumerate(ports):
        with netns.inside(names.switch(s)):
            for slot in slots:
                hooks.attach(plane.hook, FIRST_IFINDEX + slot, plane.programs["fabric_switch"])
                learn(bytes(64), ifindex=FIRST_IFINDEX + slot)


def find(name: str | None = None) -> Fabric:
    """The running fabric of this name; without a name, the only one there is."""
    if why := kernel.missing():
        raise Error(why)
    if name is None:
        there = running()
        if len(there) != 1:
            what = f"several fabrics are up: {', '.join(there)}; choose with --name" if there else "no fabric is up"
            raise Error(what)
        name = there[0]
    known = _recall(name)
    if not known or known["state"] != "up":
        raise Error(f"no fabric {name!r} is up")
    topology, names = _topology(known["topology"]), Names(name, known["run"])
    switch = next(s for s, slots in enumerate(ports_of(topology)) if slots)
    try:
        with netns.inside(names.switch(switch)):
            plane = DataPlane.found_on(FIRST_IFINDEX + ports_of(topology)[switch][0], tables.size_for(topology))
    except OSError as e:
        why = f"fabric {name!r} is damaged ({e.strerror}): `dovetail fabric down --name {name}` removes what is left"
        raise Error(why) from None
    return Fabric(names, topology, known["policy"], plane)


def running() -> list[str]:
    """Fabrics that are up or being built."""
    return sorted(p.stem for p in RUN.glob("*.json") if _NAME.fullmatch(p.stem)) if RUN.exists() else []


def standing() -> list[str]:
    """All that `down` could remove: also what only namespaces are left of, and the routers of a comparison."""
    return sorted({*running(), *(m[1] for n in netns.named(netns.PREFIX) if (m := _NAMESPACE.fullmatch(n)))})


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Error(f"fabric name: expected up to 16 of a-z and 0-9, got {name!r}")


def down(name: str) -> int:
    """Removes a fabric and all that runs in it, whole or half-built; returns how many namespaces it had."""
    _check_name(name)
    if os.geteuid() != 0:
        raise Error("removing a fabric needs root")
    # The name in a namespace's name ends with the process that built it: an interrupted build is found without a file.
    removed = 0
    for _ in range(20):  # a builder that was just killed may still have made one more: until nothing new appears
        runs = {
            m[1] for n in netns.named(f"{netns.PREFIX}{name}-") if (m := re.match(rf"dvf-({name}-\d+)-[sh]\d+$", n))
        }
        if not runs:
            break
        removed += sum(netns.remove(f"{netns.PREFIX}{run}-") for run in runs)
    for file in (RUN / f"{name}.json", *RUN.glob(f".{name}.json.*")):  # the latter: half-written when it was killed
        file.unlink(missing_ok=True)
    shutil.rmtree(RUN / name, ignore_errors=True)
    for directory in (RUN, RUN.parent):
        with contextlib.suppress(OSError):
            directory.rmdir()
    return removed


@contextlib.contextmanager
def temporary(
    topology: Topology, document: dict[str, Any] | None = None, *, name: str = "", hook: str = ""
) -> Iterator[Fabric]:
    """A fabric for the duration of a block."""
    made = up(topology, document, name=name or f"t{os.getpid()}x{time.monotonic_ns() % 10**6}"[:16], hook=hook)
    try:
        yield made
    finally:
        made.close()
        down(made.name)


def _remember(names: Names, topology: Topology, document: dict[str, Any], state: str) -> None:
    RUN.mkdir(parents=True, exist_ok=True)
    shown = {
        "name": topology.name, "switches": topology.switches, "mtu": topology.mtu, "source": topology.source,
        "links": [dataclasses.astuple(k) for k in topology.links],
        "hosts": [dataclasses.astuple(h) for h in topology.hosts],
    }  # fmt: skip
    known = {"state": state, "run": names.run, "topology": shown, "policy": document}
    write_text(RUN / f"{names.name}.json", json.dumps(known, default=str))


def _recall(name: str) -> dict[str, Any] | None:
    try:
        known: dict[str, Any] = json.loads((RUN / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return known


def _topology(shown: dict[str, Any]) -> Topology:
    return Topology(
        shown["name"], tuple(shown["switches"]), tuple(Link(*k) for k in shown["links"]),
        tuple(Host(*h) for h in shown["hosts"]), shown["mtu"], shown["source"],
    )  # fmt: skip

"""Emulation: a fabric of network namespaces on one machine, with real packets.

A switch is a namespace with the switch program on each of its ports (at tc, or at XDP as on physical ports), a host is
a namespace with one device, a link is a veth pair. Everything a fabric needs lives in the kernel, held by its
namespaces: there is no daemon, commands find a running fabric by its namespaces, and removing them removes it. A small
file in RUN describes what was asked for, and whoever changes a fabric holds its lock (`lock.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.core.errors import Error
from dovetail.core.files import write_text

from . import hooks, kernel, netns, structs, wiring
from .dataplane import FIRST_IFINDEX, DataPlane, link_slot
from .lock import RUN, FabricLock
from .routing.policy import Policies, compile_policy
from .routing.topology import Host, Link, Topology
from .wiring import Names

CARRIER = 2.0
"""Seconds within which a healed link has its carrier; the kernel reports it with a delay."""
VALID_NAME = re.compile("[a-z0-9]{1,16}")
_NAMESPACE = re.compile(rf"{netns.PREFIX}({VALID_NAME.pattern})-[0-9]+-[sh][0-9]+")


class Fabric:
    """A running fabric. Made by `up`, found again by `find`; `down` removes it, `close` only closes its descriptors."""

    def __init__(self, names: Names, topology: Topology, document: dict[str, Any], plane: DataPlane) -> None:
        self.names, self.topology, self.document, self.plane = names, topology, document, plane
        self.policies: Policies = compile_policy(document, topology)

    @property
    def name(self) -> str:
        return self.names.name

    def close(self) -> None:
        self.plane.close()

    # links

    def _ends(self, link: int) -> list[tuple[int, int]]:
        """(switch, slot) of both ends."""
        cable = self.topology.links[link]
        return [(cable.a, link_slot(link, 0)), (cable.b, link_slot(link, 1))]

    def fail(self, link: int, *, how: str = "down", end: int = 0) -> None:
        """Breaks a link: "down" (carrier lost), "silent" (frames vanish both ways), "one-way" (only those that arrive
        at `end`), or "drained" (taken out of service in good order)."""
        ends = self._ends(link)
        if how == "down":
            self._set_up(*ends[end], False)
        else:
            flag = structs.DRAINED if how == "drained" else structs.SILENT
            for _, slot in [ends[end]] if how == "one-way" else ends:
                self.plane.set_flag(slot, flag, True)

    def heal(self, link: int) -> None:
        """Brings a link back, and returns when it has its carrier."""
        for switch, slot in self._ends(link):
            self.plane.set_flag(slot, structs.DRAINED | structs.SILENT, False)
            self._set_up(switch, slot, True)
        end = time.monotonic() + CARRIER
        while self.link_state(link) == "down" and time.monotonic() < end:
            time.sleep(0.002)

    def _set_up(self, switch: int, slot: int, up: bool) -> None:
        with netns.inside(self.names.switch(switch)):
            netns.set_up(FIRST_IFINDEX + slot, up)

    def link_state(self, link: int) -> str:
        """ "up", "down", "drained" or "silent"."""
        for switch, slot in self._ends(link):
            flags = self.plane.port(slot)[4]
            if flags:
                return "drained" if flags & structs.DRAINED else "silent"
            with netns.inside(self.names.switch(switch)):
                if not netns.is_running(wiring.device(slot)):
                    return "down"
        return "up"

    def link_states(self) -> list[str]:
        """The state of every link, by its index."""
        return [self.link_state(link) for link in range(len(self.topology.links))]

    def failed(self) -> frozenset[int]:
        """Links that are not up."""
        return frozenset(i for i, state in enumerate(self.link_states()) if state != "up")

    # policies and hosts

    def use(self, document: dict[str, Any], source: str | Path = "<policy>") -> int:
        """Brings another policy into force, whole at once; returns the new generation."""
        policies = compile_policy(document, self.topology, source)
        with self.plane.lock.held():
            if (_read(self.name) or {}).get("run") != self.names.run:
                raise Error(f"fabric {self.name!r} has been removed")
            generation = self.plane.install(self.topology, policies)
            write_description(self.names, self.topology, document, "up")
        self.policies, self.document = policies, document
        return generation

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
    names, lock = Names(name, f"{name}-{os.getpid()}"), FabricLock(name)
    with lock.held():
        known = _read(name)
        if known and known["state"] == "up":
            return _update(_find(name, lock), topology, document, hook)
        if known:
            builder = int(known["run"].rpartition("-")[2])
            if builder != os.getpid() and Path(f"/proc/{builder}").exists():
                raise Error(
                    f"fabric {name!r} is being built by process {builder}; `dovetail fabric down --name {name}` ends it"
                )
            _remove(name)  # what an interrupted `up` left behind
        write_description(names, topology, document, "building")
    try:
        plane = DataPlane.load(structs.size_for(topology), hook=wanted, lock=lock)
        try:
            wiring.build(names, topology, hook=plane.hook, header=plane.size.header)
            plane.install_ports(topology)
            plane.install(topology, policies, grace=0)
            wiring.attach(names, topology, plane)
            with lock.held():
                if (_read(name) or {}).get("run") != names.run:
                    raise Error(f"fabric {name!r} was removed while it was being built")
                write_description(names, topology, document, "up")
        except BaseException:
            plane.close()
            raise
    except BaseException:
        with lock.held():
            if (_read(name) or {"run": names.run})["run"] == names.run:
                _remove(name)
            else:  # somebody removed ours and has built another one
                netns.remove(names.prefix)
        raise
    return Fabric(names, topology, document, plane)


def _update(there: Fabric, topology: Topology, document: dict[str, Any], hook: str) -> Fabric:
    """Brings a running fabric to another policy; the topology and the hook must be its own."""
    try:
        remedy = f"`dovetail fabric down --name {there.name}` first"
        if there.topology != topology:
            raise Error(f"fabric {there.name!r} is up with another topology: {remedy}")
        if hook and there.plane.hook != hook:
            raise Error(f"fabric {there.name!r} is up at hook {there.plane.hook}: {remedy}")
        there.use(document)
    except BaseException:
        there.close()
        raise
    return there


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
    return _find(name, FabricLock(name))


def _find(name: str, lock: FabricLock) -> Fabric:
    known = _read(name)
    if not known or known["state"] != "up":
        raise Error(f"no fabric {name!r} is up")
    topology, names = _topology(known["topology"]), Names(name, known["run"])
    switch, slots = next((s, slots) for s, slots in enumerate(wiring.ports_of(topology)) if slots)
    try:
        with netns.inside(names.switch(switch)):
            plane = DataPlane.found_on(FIRST_IFINDEX + slots[0], structs.size_for(topology), lock=lock)
    except OSError as e:
        why = f"fabric {name!r} is damaged ({e.strerror}): `dovetail fabric down --name {name}` removes what is left"
        raise Error(why) from None
    return Fabric(names, topology, known["policy"], plane)


def running() -> list[str]:
    """Fabrics that are up or being built."""
    return sorted(p.stem for p in RUN.glob("*.json") if VALID_NAME.fullmatch(p.stem)) if RUN.exists() else []


def standing() -> list[str]:
    """All that `down` could remove: also fabrics of which only namespaces are left."""
    return sorted({*running(), *(m[1] for n in netns.named(netns.PREFIX) if (m := _NAMESPACE.fullmatch(n)))})


def _check_name(name: str) -> None:
    if not VALID_NAME.fullmatch(name):
        raise Error(f"fabric name: expected up to 16 of a-z and 0-9, got {name!r}")


def down(name: str) -> int:
    """Removes a fabric and all that runs in it, whole or half-built; returns how many namespaces it had."""
    _check_name(name)
    if os.geteuid() != 0:
        raise Error("removing a fabric needs root")
    with FabricLock(name).held():
        return _remove(name)


def _remove(name: str) -> int:
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
    shutil.rmtree(RUN / name, ignore_errors=True)  # of programs that ran in it
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


def write_description(names: Names, topology: Topology, document: dict[str, Any], state: str) -> None:
    """Writes what was asked for, and whether it is "building" or "up"; the caller holds the fabric's lock."""
    shown = {
        "name": topology.name, "switches": topology.switches, "mtu": topology.mtu, "source": topology.source,
        "links": [dataclasses.astuple(k) for k in topology.links],
        "hosts": [dataclasses.astuple(h) for h in topology.hosts],
    }  # fmt: skip
    known = {"state": state, "run": names.run, "topology": shown, "policy": document}
    write_text(RUN / f"{names.name}.json", json.dumps(known, default=str))


def _read(name: str) -> dict[str, Any] | None:
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

"""The data plane of a fabric: loaded once, its tables replaced without a window of wrong forwarding.

One program and one set of maps serve all switches of the machine; which switch a frame is at follows from the port it
came in by. `install` writes a complete second set of tables beside the one in force and then changes one number. A
packet is judged everywhere by the set that was in force when it entered, so no packet ever sees a mixture.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from . import hooks, kernel, structs
from .lock import FabricLock
from .routing.automaton import build
from .routing.policy import DENY, Policies
from .routing.topology import Topology

FIRST_IFINDEX = 1000
LIFE = 1.0
"""Seconds for which a switch believes a failure that it heard of."""
PAUSE = 0.05
"""Seconds for which a class that no path can serve is not tried again."""
GRACE = 0.25
"""Seconds after which a packet has left the fabric, also on a busy machine: its tables can then be overwritten."""


@dataclass(frozen=True)
class Addresses:
    """The addresses of a host."""

    v4: str
    v6: str
    mac: str


def addresses(host: int) -> Addresses:
    n, v4 = host + 1, 4 * host + 1  # every host has a /30 to itself, as routers need it
    mac = f"02:d0:7e:{n >> 16 & 255:02x}:{n >> 8 & 255:02x}:{n & 255:02x}"
    return Addresses(f"10.{v4 >> 16 & 255}.{v4 >> 8 & 255}.{v4 & 255}", f"fd00:d07e::{n:x}", mac)


def link_slot(link: int, end: int) -> int:
    """The port of a link at its end a (0) or b (1)."""
    return 2 * link + end


def host_slot(topology: Topology, host: int) -> int:
    return 2 * len(topology.links) + host


def slot_towards(topology: Topology, here: int, there: int) -> int:
    link = topology.link_index[frozenset((here, there))]
    return link_slot(link, 0 if topology.links[link].a == here else 1)


class DataPlane:
    """Loaded programs and maps. `close` lets go of them; what is attached to a device stays."""

    def __init__(
        self,
        maps: dict[str, int],
        programs: dict[str, int],
        size: structs.Size,
        owner: kernel.BpfObject | None,
        hook: str,
        lock: FabricLock | None,
    ) -> None:
        self.maps, self.programs, self.size, self._owner, self.hook = maps, programs, size, owner, hook
        self.lock = lock or FabricLock(None)
        """Held while tables or settings are read and written changed."""

    @classmethod
    def load(
        cls,
        size: structs.Size,
        *,
        hook: str = hooks.XDP,
        source: str | Path = "fabric.bpf.c",
        programs: tuple[str, ...] = (),
        maps: tuple[str, ...] = (),
        lock: FabricLock | None = None,
    ) -> DataPlane:
        """`hook`: where the switch program will sit; it is compiled for one of them.

        `lock`: the fabric's, if others can find it. `source` may have more `programs` and `maps` than the switch's.
        """
        cpus = kernel.processors()
        path = kernel.build(source, words=size.words, defines=("TC",) if hook == hooks.TC else ())
        loaded = kernel.BpfObject(path, sizes={"scratches": cpus, "cache": cpus * 4096, "nodes": size.nodes})
        names = (
            structs.SETTINGS, structs.SLOTS, "graphs", "policies", "nodes", "ports", "hosts", "classes", "pauses",
            "counts", "wires",
        )  # fmt: skip
        found = {p: loaded.program(p) for p in ("fabric_switch", "adopt", *programs)}
        loaded.hold("fabric_switch", "wires")  # heartbeats leave by them, whatever the program itself uses
        plane = cls({name: loaded.map(name) for name in (*names, *maps)}, found, size, loaded, hook, lock)
        plane.configure(generation=0, first_ifindex=FIRST_IFINDEX)
        return plane

    @classmethod
    def found_on(cls, ifindex: int, size: structs.Size, *, lock: FabricLock) -> DataPlane:
        """The data plane whose switch program sits on a device of this namespace."""
        hook, program, maps = hooks.found(ifindex)
        return cls(maps, {"fabric_switch": program}, size, None, hook, lock)

    def close(self) -> None:
        if self._owner:
            self._owner.close()
        else:
            for fd in (*self.maps.values(), *self.programs.values()):
                os.close(fd)
        self.maps, self.programs = {}, {}

    # configuration

    def config(self) -> dict[str, int]:
        raw = structs.CONFIG.unpack(kernel.lookup(self.maps[structs.SETTINGS], 0, structs.CONFIG.size))
        names = ("generation", "first_ifindex", "life", "pause", "silence", "by_port", "use_cache", "round", "changed")
        return dict(zip(names, raw, strict=True))

    def configure(self, **changes: int) -> None:
        """Changes fields of the settings."""
        with self.lock.held():
            now = self.config()
            if not now["life"]:
                now |= {"life": int(LIFE * 1e9), "pause": int(PAUSE * 1e9), "use_cache": 1}
            now |= changes
            kernel.update(self.maps[structs.SETTINGS], 0, structs.CONFIG.pack(*now.values()))

    # tables

    def install(
        self, topology: Topology, policies: Policies, *, without: frozenset[int] = frozenset(), grace: float = GRACE
    ) -> int:
        """Brings a topology (less the links in `without`) and policies into force; returns the new generation.

        The tables that it overwrites have been out of use since the last change; if that was less than `grace` seconds
        ago, it waits for the packets that entered under them.
        """
        assert len(policies.automata) <= structs.NOTICE_POLICY
        with self.lock.held():
            time.sleep(max(0.0, self.config()["changed"] / 1e9 + grace - time.monotonic()))
            generation = self.config()["generation"] + 1
            side = generation & 1
            for name, width in (("hosts", 20), ("classes", 8)):
                for key in kernel.keys(self.maps[name], width):
                    if (
                        struct.unpack_from("<I", key, 16)[0] if name == "hosts" else struct.unpack_from("<H", key, 6)[0]
                    ) == side:
                        kernel.delete(self.maps[name], key)
            kernel.update(self.maps["graphs"], side, structs.graph(self.size, topology, generation, without=without))
            everything = build(len(topology.switches))
            blank = bytes(len(structs.policy(self.size, everything, 0)))
            for i in range(structs.POLICIES):
                automaton = policies.automata[i] if i < len(policies.automata) else None
                if i == structs.NOTICE_POLICY:
                    automaton = everything
                raw = structs.policy(self.size, automaton, generation) if automaton else blank
                kernel.update(self.maps["policies"], side * structs.POLICIES + i, raw)
            for i, host in enumerate(topology.hosts):
                entry = structs.host(addresses(i).mac, host.switch, host_slot(topology, i), policies.groups[i])
                for address in (addresses(i).v4, addresses(i).v6):
                    kernel.update(self.maps["hosts"], structs.host_key(address, side), entry)
            for (source, target, port), index in policies.choice.items():
                if index != DENY:
                    key = structs.class_key(source, target, port, side)
                    kernel.update(self.maps["classes"], key, struct.pack("<I", index))
            # A port whose traffic is denied while the pair is not needs an entry that says so.
            for (source, target, port), index in policies.choice.items():
                if index == DENY and port:
                    kernel.update(self.maps["classes"], structs.class_key(source, target, port, side), b"\xff" * 4)
            # Each side has its own bit: the old tables are read as before until the one store that ends them.
            ports = self.config()["by_port"] & ~(1 << side) | bool(policies.ports) << side
            self.configure(by_port=ports)
            self.configure(generation=generation, changed=time.monotonic_ns())
            return generation

    def install_ports(self, topology: Topology) -> None:
        """Writes the ports, and each switch's port towards every neighbour. Done once, before any port is attached."""
        slots: list[dict[int, int]] = [{} for _ in topology.switches]
        for i, link in enumerate(topology.links):
            for end, (here, there) in enumerate(((link.a, link.b), (link.b, link.a))):
                slots[here][there] = link_slot(i, end)
                entry = structs.port(here, there, i, structs.TO_SWITCH, rate=link.rate)
                kernel.update(self.maps["ports"], link_slot(i, end), entry)
        for i, host in enumerate(topology.hosts):
            entry = structs.port(host.switch, i, 0, structs.TO_HOST, rate=host.rate)
            kernel.update(self.maps["ports"], host_slot(topology, i), entry)
        kernel.update(self.maps[structs.SLOTS], 0, structs.slots(self.size, slots))

    def port(self, slot: int) -> tuple[int, ...]:
        return structs.PORT.unpack(kernel.lookup(self.maps["ports"], slot, structs.PORT.size))

    def set_flag(self, slot: int, flag: int, on: bool) -> None:
        with self.lock.held():
            values = list(self.port(slot))
            values[4] = values[4] | flag if on else values[4] & ~flag
            kernel.update(self.maps["ports"], slot, structs.PORT.pack(*values))

    def hear_all(self, topology: Topology) -> None:
        """Every link counts as heard in this round of heartbeats."""
        with self.lock.held():
            now = self.config()["round"]
            for slot in range(2 * len(topology.links)):
                values = list(self.port(slot))
                values[6:8] = [now, 0]  # heard, unheard
                kernel.update(self.maps["ports"], slot, structs.PORT.pack(*values))

    def forget(self, topology: Topology) -> None:
        """Makes every switch forget what it heard of failures; link state itself is never stored."""
        with self.lock.held():
            for switch in range(len(topology.switches)):
                raw = kernel.lookup(self.maps["nodes"], switch, self.size.node)
                version = struct.unpack_from("<I", raw, self.size.node - 8)[0] + 1
                fresh = bytes(self.size.node - 8) + struct.pack("<II", version, 0)
                kernel.update(self.maps["nodes"], switch, fresh)
            for key in kernel.keys(self.maps["pauses"], 8):
                kernel.delete(self.maps["pauses"], key)

    def believed(self, switch: int) -> frozenset[int]:
        """Links that a switch believes failed because it heard so."""
        raw, links = kernel.lookup(self.maps["nodes"], switch, self.size.node), self.size.links
        number = int.from_bytes(raw[: links // 8], "little")
        if not number:
            return frozenset()
        until, now = struct.unpack_from(f"<{links}Q", raw, links // 8), time.monotonic_ns()
        return frozenset(i for i in range(links) if number >> i & 1 and until[i] > now)

    # counters

    def counters(self, switch: int) -> dict[str, int]:
        cpus, width = kernel.processors(), len(structs.COUNTERS)
        raw = struct.unpack(f"<{cpus * width}Q", kernel.lookup(self.maps["counts"], switch, 8 * width * cpus))
        return {name: sum(raw[i::width]) for i, name in enumerate(structs.COUNTERS)}

    def totals(self, topology: Topology) -> dict[str, int]:
        total = dict.fromkeys(structs.COUNTERS, 0)
        for switch in range(len(topology.switches)):
            for name, value in self.counters(switch).items():
                total[name] += value
        return total

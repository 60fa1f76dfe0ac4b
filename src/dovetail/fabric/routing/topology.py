"""Topology: switches, the links between them, and the hosts at their edge.

A topology comes from a file (`topology_file.py`) or from a shape (`shapes.py`). It is checked before anything is built,
and a mistake is one line that names the place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from dovetail.core.errors import Error, InputError
from dovetail.fabric.extra import nx

MAX_SWITCHES = 512
MAX_LINKS = 1024
"""The map of failed links travels in front of the packet, where XDP leaves 216 bytes."""
MAX_HOSTS = 4096
MAX_MTU = 65_000
"""Wires end at some 9,000 bytes; an emulated link can be wider, up to what an IP packet may be with our header."""


@dataclass(frozen=True)
class Link:
    """A cable between two switches, by index; `rate` in bytes per second, 0 for as fast as the machine goes."""

    a: int
    b: int
    rate: float = 0.0

    def other(self, end: int) -> int:
        return self.b if end == self.a else self.a


@dataclass(frozen=True)
class Host:
    name: str
    switch: int
    rate: float = 0.0


@dataclass(frozen=True)
class Topology:
    """Switches and links by index, names beside; a link's index is its bit in the packets' failure map."""

    name: str
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    hosts: tuple[Host, ...]
    mtu: int = 1500
    source: str = field(default="<made>", compare=False)

    @cached_property
    def graph(self) -> nx.Graph:
        g = nx.Graph()
        g.add_nodes_from(range(len(self.switches)))
        g.add_edges_from((link.a, link.b, {"index": i}) for i, link in enumerate(self.links))
        return g

    @cached_property
    def link_index(self) -> dict[frozenset[int], int]:
        return {frozenset((link.a, link.b)): i for i, link in enumerate(self.links)}

    @cached_property
    def switch_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.switches)}

    @cached_property
    def host_index(self) -> dict[str, int]:
        return {host.name: i for i, host in enumerate(self.hosts)}

    def surviving(self, failed: set[int] | frozenset[int]) -> nx.Graph:
        """The graph without the links in `failed` (indices)."""
        g = self.graph.copy()
        g.remove_edges_from((self.links[i].a, self.links[i].b) for i in failed)
        return g

    def link_name(self, index: int) -> str:
        link = self.links[index]
        return f"{self.switches[link.a]}-{self.switches[link.b]}"

    def find_link(self, text: str) -> int:
        """The link called "A-B"; switch names may themselves hold hyphens, so every split is tried."""
        apart = ""
        for at in (m.start() for m in re.finditer("-", text)):
            ends = self.switch_index.get(text[:at]), self.switch_index.get(text[at + 1 :])
            if None not in ends and ends[0] != ends[1]:
                found = self.link_index.get(frozenset(e for e in ends if e is not None))
                if found is not None:
                    return found
                apart = f"{text[:at]} and {text[at + 1 :]}"
        raise Error(
            f"{self.name}: no link between {apart}"
            if apart
            else f"{self.name}: expected a link as SWITCH-SWITCH, got {text!r}"
        )

    def find_host(self, text: str) -> int:
        if text not in self.host_index:
            known = ", ".join(list(self.host_index)[:6])
            raise Error(f"{self.name}: no host {text!r} (there are {known}{', …' if len(self.hosts) > 6 else ''})")
        return self.host_index[text]

    def check(self) -> Topology:
        """Raises one line for what would make the fabric wrong; returns itself."""

        def bad(place: str, expected: str) -> InputError:
            return InputError(self.source, place, expected)

        if not self.switches:
            raise bad("switches", "expected at least one")
        if not self.links and not self.hosts:
            raise bad("links", "expected at least one link or host")
        if len(self.switches) > MAX_SWITCHES:
            raise bad("switches", f"expected at most {MAX_SWITCHES}, got {len(self.switches)}")
        if len(self.links) > MAX_LINKS:
            raise bad("links", f"expected at most {MAX_LINKS}, got {len(self.links)}")
        if not 1280 <= self.mtu <= MAX_MTU:
            raise bad("mtu", f"expected 1280 to {MAX_MTU} bytes, got {self.mtu}")
        for what, names in (("switches", self.switches), ("hosts", [h.name for h in self.hosts])):
            if twice := first_duplicate(names):
                raise bad(what, f"{twice} is there twice")
        if both := set(self.switches) & {h.name for h in self.hosts}:
            raise bad("hosts", f"{min(both)} is also the name of a switch")
        seen: set[frozenset[int]] = set()
        for i, link in enumerate(self.links):
            if link.a == link.b:
                raise bad(f"links[{i}]", f"{self.switches[link.a]} is linked to itself")
            if frozenset((link.a, link.b)) in seen:
                raise bad(f"links[{i}]", f"duplicate link {self.link_name(i)}")
            seen.add(frozenset((link.a, link.b)))
        if len(self.hosts) > MAX_HOSTS:
            raise bad("hosts", f"expected at most {MAX_HOSTS}, got {len(self.hosts)}")
        if self.hosts:
            home = nx.node_connected_component(self.graph, self.hosts[0].switch)
            for host in self.hosts:
                if host.switch not in home:
                    raise bad("hosts", f"{host.name} is disconnected: no links lead from it to {self.hosts[0].name}")
        return self


def match(names: list[str] | tuple[str, ...], patterns: list[str], *, file: str, place: str) -> list[int]:
    """Indices of the names that any of the patterns ("h*", "core1") matches; each pattern must match something."""
    if not patterns:
        raise InputError(file, place, "expected at least one name, got none")
    found: set[int] = set()
    for pattern in patterns:
        hits = {i for i, name in enumerate(names) if name == pattern or fnmatchcase(name, pattern)}
        if not hits:
            raise InputError(file, place, f"{pattern!r} matches nothing; expected one of {', '.join(names[:6])}, …")
        found |= hits
    return sorted(found)


def first_duplicate(names: Any) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return str(name)
        seen.add(name)
    return ""

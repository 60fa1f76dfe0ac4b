"""Topologies in files: YAML files of our own, and GML files of the Topology Zoo."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from dovetail.core.errors import InputError, first_line
from dovetail.fabric.extra import nx, yaml

from . import shapes
from .topology import Host, Link, Topology, first_duplicate, match


def load(path: str | Path) -> Topology:
    """A topology from a .yaml/.yml or .gml file, checked."""
    if Path(path).suffix == ".gml":
        return load_gml(path)
    return from_document(read_yaml(path), path)


def from_document(document: dict[str, Any], path: str | Path) -> Topology:
    """The topology part of a YAML document: a `shape` with its numbers, a `gml` file, or switches and links."""
    name = str(document.get("name", Path(path).stem))
    mtu = document.get("mtu", 1500)
    if isinstance(mtu, bool) or not isinstance(mtu, int):
        raise InputError(path, "mtu", f"expected a whole number of bytes, got {mtu!r}")
    if "shape" in document:
        _known(document, ("name", "mtu", "shape", "policy"), path)
        return shapes.build(document["shape"], name=name, mtu=mtu, source=str(path))
    if "gml" in document:
        _known(document, ("name", "mtu", "gml", "hosts", "policy"), path)
        made = load_gml(Path(path).parent / str(document["gml"]), hosts=document.get("hosts", "every switch"))
        return Topology(name, made.switches, made.links, made.hosts, mtu, str(path)).check()
    _known(document, ("name", "mtu", "switches", "links", "hosts", "policy"), path)
    switches = _list(document.get("switches"), path, "switches")
    names = tuple(str(s) for s in switches)
    index = {s: i for i, s in enumerate(names)}

    def switch(value: Any, place: str) -> int:
        if str(value) not in index:
            raise InputError(path, place, f"unknown switch {str(value)!r}")
        return index[str(value)]

    links = []
    for i, item in enumerate(_list(document.get("links"), path, "links")):
        place = f"links[{i}]"
        if isinstance(item, dict):
            _known(item, ("ends", "rate"), path, place)
        ends, rate = (item.get("ends"), item.get("rate", 0)) if isinstance(item, dict) else (item, 0)
        if not isinstance(ends, list) or len(ends) != 2:
            raise InputError(path, place, f"expected two ends as [A, B], got {ends!r}")
        links.append(Link(switch(ends[0], place), switch(ends[1], place), parse_rate(rate, path, f"{place}.rate")))
    table = document.get("hosts") or {}
    if not isinstance(table, dict):
        raise InputError(path, "hosts", "expected host: switch, one per line")
    hosts = []
    for host, where in table.items():
        if isinstance(where, dict):
            _known(where, ("switch", "rate"), path, f"hosts.{host}")
        at, rate = (where.get("switch"), where.get("rate", 0)) if isinstance(where, dict) else (where, 0)
        hosts.append(Host(str(host), switch(at, f"hosts.{host}"), parse_rate(rate, path, f"hosts.{host}.rate")))
    return Topology(name, names, tuple(links), tuple(hosts), mtu, str(path)).check()


def load_gml(path: str | Path, *, hosts: Any = "every switch") -> Topology:
    """A Topology Zoo file; parallel links count once, a host hangs on every switch (or on the listed ones)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(path, "", f"cannot be read: {e}") from None
    try:
        # Several files hold parallel links without saying that they are multigraphs.
        whole = (
            text
            if re.search(r"^\s*multigraph\s", text, re.M)
            else text.replace("graph [", "graph [\n  multigraph 1", 1)
        )
        graph = nx.parse_gml(whole, label="id")
    except (nx.NetworkXError, ValueError, TypeError, AttributeError) as e:
        raise InputError(path, "", f"expected a graph in GML: {first_line(e)}") from None
    nodes = sorted(graph.nodes)
    labels = [re.sub(r"\s+", "_", str(graph.nodes[n].get("label", n))) for n in nodes]
    names = tuple(label if labels.count(label) == 1 else f"{label}_{n}" for label, n in zip(labels, nodes, strict=True))
    index = {n: i for i, n in enumerate(nodes)}
    ends = sorted({tuple(sorted((index[a], index[b]))) for a, b in nx.Graph(graph).edges if a != b})
    links = tuple(Link(a, b) for a, b in ends)
    home = max(nx.connected_components(nx.Graph([(k.a, k.b) for k in links])), key=len) if links else {0}
    chosen = [i for i in range(len(names)) if i in home]
    if hosts != "every switch":
        chosen = match(names, [str(h) for h in _list(hosts, path, "hosts")], file=str(path), place="hosts")
    return Topology(Path(path).stem, names, links, tuple(Host(f"h{i}", i) for i in chosen), source=str(path)).check()


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without silent duplicates: a host named twice would otherwise quietly move."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        if twice := first_duplicate([str(k) for k in keys]):
            raise yaml.MarkedYAMLError(problem=f"{twice} is there twice", problem_mark=node.start_mark)
        made: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return made


# A name such as 2026-11-15 is a name and not a date, which could not be stored.
_Loader.yaml_implicit_resolvers = {
    first: [r for r in known if r[0] != "tag:yaml.org,2002:timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(path, "", f"cannot be read: {getattr(e, 'strerror', None) or e}") from None
    except yaml.MarkedYAMLError as e:
        line = f"line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise InputError(path, line, f"expected valid YAML: {e.problem}") from None
    except yaml.YAMLError as e:
        raise InputError(path, "", f"expected valid YAML: {first_line(e)}") from None
    if not isinstance(document, dict):
        raise InputError(path, "", f"expected a YAML mapping, got {type(document).__name__}")
    return document


_UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}


def parse_rate(value: Any, path: str | Path, place: str) -> float:
    """ "10gbit" as bytes per second; 0 means unlimited."""
    if value in (0, None):
        return 0.0
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?\s*", str(value), re.I)
    if not found or float(found[1]) <= 0:
        raise InputError(path, place, f"expected a rate such as 10gbit or 500mbit, got {value!r}")
    return float(found[1]) * _UNITS[found[2].lower()]


def _list(value: Any, path: str | Path, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(path, place, f"expected a list, got {'nothing' if value is None else repr(value)}")
    return value


def _known(document: dict[str, Any], fields: tuple[str, ...], path: str | Path, place: str = "") -> None:
    """A misspelt field is an error: `polcy:` would otherwise be a fabric without one."""
    for key in document:
        if key not in fields:
            where = f"{place}.{key}" if place else str(key)
            raise InputError(path, where, f"unknown field; expected one of {', '.join(fields)}")

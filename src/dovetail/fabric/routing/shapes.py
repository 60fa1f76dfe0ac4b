"""Shapes: topologies made from a few numbers: fat-tree, leaf-spine, ring and random regular graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.core.errors import InputError
from dovetail.fabric.extra import nx

from .topology import MAX_SWITCHES, Host, Link, Topology


def _small(switches: int, source: str) -> None:
    """Before anything is made: a fat-tree of k = 2,000 would have billions of links."""
    if switches > MAX_SWITCHES:
        raise InputError(source, "shape", f"expected at most {MAX_SWITCHES} switches, got {switches}")


def fat_tree(k: int, *, hosts: int = 1, name: str = "", mtu: int = 1500, source: str = "<made>") -> Topology:
    """A k-ary fat-tree: k pods of k/2 edge and k/2 aggregation switches, (k/2)² cores; `hosts` per edge switch."""
    if k < 2 or k % 2:
        raise InputError(source, "shape.k", f"expected an even number of at least 2, got {k}")
    half = k // 2
    _small(5 * half * half, source)
    edge = [f"edge{p}.{i}" for p in range(k) for i in range(half)]
    aggregation = [f"agg{p}.{i}" for p in range(k) for i in range(half)]
    core = [f"core{i}" for i in range(half * half)]
    first_agg, first_core = len(edge), 2 * len(edge)
    links = [
        Link(pod * half + e, first_agg + pod * half + a) for pod in range(k) for e in range(half) for a in range(half)
    ] + [
        Link(first_agg + pod * half + a, first_core + a * half + c)
        for pod in range(k)
        for a in range(half)
        for c in range(half)
    ]
    attached = tuple(Host(f"h{e * hosts + i}", e) for e in range(len(edge)) for i in range(hosts))
    label = name or f"fat-tree-{k}"
    return Topology(label, tuple(edge + aggregation + core), tuple(links), attached, mtu, source).check()


def leaf_spine(
    leaves: int, spines: int, *, hosts: int = 1, name: str = "", mtu: int = 1500, source: str = "<made>"
) -> Topology:
    """Every leaf linked to every spine; `hosts` per leaf."""
    if leaves < 1 or spines < 1:
        raise InputError(source, "shape", f"expected at least one leaf and one spine, got {leaves} and {spines}")
    _small(leaves + spines, source)
    names = [f"leaf{i}" for i in range(leaves)] + [f"spine{i}" for i in range(spines)]
    links = tuple(Link(i, leaves + j) for i in range(leaves) for j in range(spines))
    attached = tuple(Host(f"h{i * hosts + j}", i) for i in range(leaves) for j in range(hosts))
    return Topology(name or f"leaf-spine-{leaves}x{spines}", tuple(names), links, attached, mtu, source).check()


def ring(
    size: int, *, chords: int = 0, hosts: int = 1, name: str = "", mtu: int = 1500, source: str = "<made>"
) -> Topology:
    """`size` switches in a circle; with `chords` = c also a link from each to the c-th next."""
    if size < 3:
        raise InputError(source, "shape.size", f"expected at least 3, got {size}")
    _small(size, source)
    ends = {frozenset((i, (i + 1) % size)) for i in range(size)}
    if chords:
        ends |= {frozenset((i, (i + chords) % size)) for i in range(size) if chords % size}
    links = tuple(Link(*sorted(e)) for e in sorted(ends, key=sorted))
    attached = tuple(Host(f"h{i * hosts + j}", i) for i in range(size) for j in range(hosts))
    return Topology(name or f"ring-{size}", tuple(f"s{i}" for i in range(size)), links, attached, mtu, source).check()


def expander(size: int, degree: int, *, hosts: int = 1, seed: int = 1) -> Topology:
    """A random regular graph, as in Jellyfish."""
    g = nx.random_regular_graph(degree, size, seed=seed)
    links = tuple(Link(*sorted(e)) for e in sorted(map(tuple, g.edges)))
    attached = tuple(Host(f"h{i * hosts + j}", i) for i in range(size) for j in range(hosts))
    return Topology(f"expander-{size}", tuple(f"s{i}" for i in range(size)), links, attached).check()


_SHAPES: dict[str, tuple[Callable[..., Topology], tuple[str, ...]]] = {
    "fat-tree": (fat_tree, ("k",)),
    "leaf-spine": (leaf_spine, ("leaves", "spines")),
    "ring": (ring, ("size",)),
}
_OPTIONAL = ("hosts", "chords")


def build(spec: Any, *, name: str, mtu: int, source: str) -> Topology:
    """The `shape:` of a YAML file, such as {kind: fat-tree, k: 4, hosts: 2}."""
    if not isinstance(spec, dict) or spec.get("kind") not in _SHAPES:
        raise InputError(source, "shape.kind", f"expected one of {', '.join(_SHAPES)}")
    make, needed = _SHAPES[spec["kind"]]
    numbers = {key: value for key, value in spec.items() if key != "kind"}
    for key in needed:
        if key not in numbers:
            raise InputError(source, f"shape.{key}", "missing")
    for key, value in numbers.items():
        if key not in needed and (key not in _OPTIONAL or (key == "chords" and spec["kind"] != "ring")):
            raise InputError(source, f"shape.{key}", "unknown field")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 4 * MAX_SWITCHES:
            raise InputError(source, f"shape.{key}", f"expected a small whole number, got {value!r}")
    return make(**numbers, name=name, mtu=mtu, source=source)

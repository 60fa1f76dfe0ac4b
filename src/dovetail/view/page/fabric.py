"""A fabric's links as a drawing: switches placed so that linked ones are near each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dovetail.view import units

from .document import DrawnLink, DrawnSwitch, FabricSection
from .reports import TraceReport

MOST = 400
"""Switches up to which places are computed by distance; beyond, they stand on a circle."""
SWEEPS = 60

FloatArray = npt.NDArray[np.float64]


def fabric(
    name: str,
    links: Mapping[str, str],
    counters: Mapping[str, int],
    believed: Mapping[str, Sequence[str]],
    paths: Sequence[TraceReport],
) -> FabricSection:
    ends = {link: split(link, set(links)) for link in links}
    names = list(dict.fromkeys(end for pair in ends.values() for end in pair))
    index = {switch: i for i, switch in enumerate(names)}
    edges = [(index[a], index[b]) for a, b in ends.values()]
    at = places(len(names), edges)
    broken = {link: state for link, state in links.items() if state != "up"}
    listed = ", ".join(f"{link} is {state}" for link, state in list(broken.items())[:4]) + (
        ", …" if len(broken) > 4 else ""
    )
    sentence = f"{_switches(len(names))} and {units.count(len(links), 'link')}, emulated; " + (
        f"{units.count(len(broken), 'link')} out of service: {listed}." if broken else "every link is up."
    )
    if broken and believed:
        sentence += f" {_switches(len(believed))} heard of it from packets."
    return FabricSection(
        title=f"fabric {name}",
        sentence=sentence,
        switches=tuple(
            DrawnSwitch(name=n, x=float(at[i, 0]), y=float(at[i, 1]), believes=tuple(believed.get(n, ())))
            for i, n in enumerate(names)
        ),
        links=tuple(DrawnLink(name=link, a=index[a], b=index[b], state=links[link]) for link, (a, b) in ends.items()),
        counters=dict(counters),
        paths=tuple(paths),
    )


def _switches(count: int) -> str:
    return f"{count:,} switch{'' if count == 1 else 'es'}"


def split(link: str, links: Iterable[str]) -> tuple[str, str]:
    """The two switches of "A-B". Names may hold hyphens: of several splits, the one whose halves others share."""
    parts = link.split("-")
    splits = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))] or [(link, link)]
    if len(splits) == 1:
        return splits[0]
    others = [other for other in links if other != link]

    def known(switch: str) -> int:
        return sum(o.startswith(f"{switch}-") or o.endswith(f"-{switch}") for o in others)

    # Two halves that both occur elsewhere; where that does not decide, halves of like length.
    return max(splits, key=lambda ab: (min(1, known(ab[0])) + min(1, known(ab[1])), -abs(len(ab[0]) - len(ab[1]))))


def places(count: int, edges: Sequence[tuple[int, int]]) -> FloatArray:
    """A place in the unit square for each node: distances on paper follow the numbers of hops (stress majorisation)."""
    turn = 2 * np.pi * np.arange(count) / max(count, 1)
    at: FloatArray = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    if 2 < count <= MOST:
        hops = _hops(count, edges)
        weight = 1 / np.maximum(hops, 1) ** 2
        np.fill_diagonal(weight, 0.0)
        total = weight.sum(axis=1, keepdims=True)
        for _ in range(SWEEPS):
            apart = at[:, None, :] - at[None, :, :]
            length = np.maximum(np.linalg.norm(apart, axis=2), 1e-9)
            pulled = at[None, :, :] + apart * (hops / length)[:, :, None]
            at = (weight[:, :, None] * pulled).sum(axis=1) / total
    low, high = at.min(axis=0, initial=np.inf), at.max(axis=0, initial=-np.inf)
    result: FloatArray = (at - low) / np.maximum(high - low, 1e-9)
    return result


def _hops(count: int, edges: Sequence[tuple[int, int]]) -> FloatArray:
    near: list[set[int]] = [set() for _ in range(count)]
    for a, b in edges:
        near[a].add(b)
        near[b].add(a)
    hops = np.full((count, count), float(count))  # far, where no links lead there
    for source in range(count):
        front, seen, distance = {source}, {source}, 0
        while front:
            hops[source, list(front)] = distance
            front = {n for f in front for n in near[f]} - seen
            seen |= front
            distance += 1
    return hops

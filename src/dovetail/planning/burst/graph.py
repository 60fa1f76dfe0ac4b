"""A layer graph taken apart into series and parallel compositions.

Two layers joined by an edge are a table over their two choices. Two reductions shrink a series-parallel graph to one
table: two tables between the same ends become one (parallel), and a layer with one table before it and one behind it
goes away (series). A nested fork is a fork between the ends of another; a skip edge is a branch without a layer. A
graph that neither reduction shrinks any further is not series-parallel.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.errors import Error


@dataclass(frozen=True)
class Composition:
    """Makes one table of two: `through` a layer that goes away (series), or side by side (-1, parallel)."""

    left: int
    right: int
    through: int


@dataclass(frozen=True)
class Decomposition:
    """Tables 0 .. len(edges) − 1 are the edges; step i makes table len(edges) + i; the last table is the whole graph.

    `source` and `sink` are two layers that cost nothing, before everything and behind everything.
    """

    layers: int
    edges: tuple[tuple[int, int], ...]
    steps: tuple[Composition, ...]
    ends: tuple[tuple[int, int], ...]
    """The two end layers of every table."""

    @property
    def source(self) -> int:
        return self.layers

    @property
    def sink(self) -> int:
        return self.layers + 1


def decompose(layers: int, edges: Sequence[tuple[int, int]] = (), *, names: Sequence[str] = ()) -> Decomposition:
    """The reductions of a graph whose layers are numbered in execution order; without edges it is a chain.

    Of all layers that can go, the earliest goes first: then the table before it starts at the source, which has one
    choice, unless the layer lies inside a fork.
    """
    edges = sorted(set(edges)) or [(i, i + 1) for i in range(layers - 1)]
    for u, v in edges:
        if not 0 <= u < v < layers:
            raise Error(f"edges: expected pairs of layers in execution order, each below {layers}, got [{u}, {v}]")
    source, sink = layers, layers + 1
    fed, read = {v for _, v in edges}, {u for u, _ in edges}
    edges = [(source, v) for v in range(layers) if v not in fed] + edges
    edges += [(u, sink) for u in range(layers) if u not in read]
    return _reduced(layers, edges, names)


def _reduced(layers: int, edges: list[tuple[int, int]], names: Sequence[str]) -> Decomposition:
    ends, steps = list(edges), list[Composition]()
    before: list[dict[int, int]] = [{} for _ in range(layers + 2)]  # before[v][u]: the table between u and v
    behind: list[dict[int, int]] = [{} for _ in range(layers + 2)]
    for table, (u, v) in enumerate(edges):
        before[v][u] = behind[u][v] = table
    waiting = list(range(layers))
    reduced = [False] * layers
    while waiting:
        m = heapq.heappop(waiting)
        if reduced[m] or len(before[m]) != 1 or len(behind[m]) != 1:
            continue
        reduced[m] = True
        (u, left), (v, right) = *before[m].items(), *behind[m].items()
        made = _step(ends, steps, len(edges), Composition(left, right, m), (u, v))
        del behind[u][m], before[v][m]
        if v in behind[u]:
            made = _step(ends, steps, len(edges), Composition(behind[u][v], made, -1), (u, v))
        behind[u][v] = before[v][u] = made
        for neighbour in (u, v):
            if neighbour < layers:
                heapq.heappush(waiting, neighbour)
    if not all(reduced):
        left_over = [m for m in range(layers) if not reduced[m]]
        shown = ", ".join(repr(names[m]) if names else str(m) for m in left_over[:4])
        more = f" and {len(left_over) - 4} more" if len(left_over) > 4 else ""
        raise Error(
            f"layer graph: expected forks that join again (series-parallel), but the branches at layers {shown}{more} "
            f"cross each other: profile these as one layer"
        )
    return Decomposition(layers=layers, edges=tuple(edges), steps=tuple(steps), ends=tuple(ends))


def _step(
    ends: list[tuple[int, int]], steps: list[Composition], edges: int, step: Composition, between: tuple[int, int]
) -> int:
    steps.append(step)
    ends.append(between)
    return edges + len(steps) - 1

"""Every plan that no other plan beats in both time and device-time, on a series-parallel graph.

A table holds labels (time, device-time) for each pair of choices at its two ends; a dominated label, which another of
the same pair beats or equals in everything, never becomes part of a plan that nothing dominates, so it is dropped:

    series     out[f, j] = all of  left[f, m] + layer[m] + right[m, j]   over the choices m of the layer between
    parallel   out[f, j] = all of  left[f, j] + right[f, j]              (a Minkowski sum)

Times are whole ticks: the inputs are rounded once, to a grid so fine that the largest sum stays below 2⁴⁶ ticks. Then
sums are exact in any order, equal plans are equal, and dominance needs no tolerance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.core.network import FloatArray

from .graph import Decomposition

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
BITS = 46
"""Bits of the largest sum, in ticks; what is left of 63 bits numbers the pairs of choices."""


@dataclass(frozen=True)
class Problem:
    """Costs of every choice, in ticks. The last two layers are the source and the sink: one choice that costs nothing.

    The device-time of an edge is the time of re-sharding on the devices of the later layer.
    """

    graph: Decomposition
    counts: tuple[IntArray, ...]
    """Devices of every choice of every layer, ascending."""
    time: tuple[IntArray, ...]
    work: tuple[IntArray, ...]
    edge_time: tuple[IntArray, ...]
    """For each edge a matrix [choice of the earlier layer, choice of the later]."""
    edge_work: tuple[IntArray, ...]
    memory: tuple[IntArray, ...]
    """Bytes on rank 0, which runs every layer."""
    most_memory: int | None
    tick: float
    """Seconds of one tick."""

    def value(self, chosen: list[int]) -> tuple[int, int, int]:
        """(time, device-time, memory) of one choice per layer."""
        at = [*chosen, 0, 0]
        edges = [(e, at[u], at[v]) for e, (u, v) in enumerate(self.graph.edges)]
        return (
            sum(int(t[k]) for t, k in zip(self.time, at, strict=True))
            + sum(int(self.edge_time[e][f, j]) for e, f, j in edges),
            sum(int(w[k]) for w, k in zip(self.work, at, strict=True))
            + sum(int(self.edge_work[e][f, j]) for e, f, j in edges),
            sum(int(m[k]) for m, k in zip(self.memory, at, strict=True)),
        )

    def restricted(self, kept: list[IntArray]) -> Problem:
        """The same with only these choices (indices, ascending) of each layer, source and sink included."""

        def of(tables: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
            return tuple(t[k] for t, k in zip(tables, kept, strict=True))

        def between(tables: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
            return tuple(t[kept[u]][:, kept[v]] for t, (u, v) in zip(tables, self.graph.edges, strict=True))

        return Problem(
            graph=self.graph,
            counts=of(self.counts),
            time=of(self.time),
            work=of(self.work),
            edge_time=between(self.edge_time),
            edge_work=between(self.edge_work),
            memory=of(self.memory),
            most_memory=self.most_memory,
            tick=self.tick,
        )


@dataclass(frozen=True)
class Labels:
    """Labels of one table: choices at the two ends, costs, and which labels of the two parts each is made of."""

    first: IntArray
    last: IntArray
    time: IntArray
    work: IntArray
    memory: IntArray
    left: IntArray
    right: IntArray

    def __len__(self) -> int:
        return len(self.time)

    def where(self, kept: IntArray | BoolArray) -> Labels:
        return Labels(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))


Bound = Callable[[int, Labels], BoolArray]
"""(table, its labels) → which of them may still become a wanted plan."""


def label_tables(problem: Problem, *, bound: Bound | None = None) -> list[Labels]:
    """The labels of every table; the last table's are the whole plans, by ascending time."""
    graph = problem.graph
    made = [_edge(problem, e) for e in range(len(graph.edges))]
    if bound is not None:
        made = [labels.where(bound(e, labels)) for e, labels in enumerate(made)]
    for step in graph.steps:
        left, right = made[step.left], made[step.right]
        joined = _series(problem, left, right, step.through) if step.through >= 0 else _parallel(left, right)
        if bound is not None:
            joined = joined.where(bound(len(made), joined))
        choices = len(problem.time[graph.ends[len(made)][1]])
        made.append(joined.where(_survivors(joined, choices, with_memory=problem.most_memory is not None)))
    return made


def chosen(problem: Problem, tables: list[Labels], label: int) -> list[int]:
    """The choice of every layer in one label of the last table."""
    graph = problem.graph
    found = [0] * graph.layers
    waiting = [(len(tables) - 1, label)]
    while waiting:
        table, at = waiting.pop()
        if table < len(graph.edges):
            continue
        step, labels = graph.steps[table - len(graph.edges)], tables[table]
        left, right = int(labels.left[at]), int(labels.right[at])
        if step.through >= 0:
            found[step.through] = int(tables[step.left].last[left])
        waiting += [(step.left, left), (step.right, right)]
    return found


def _edge(problem: Problem, edge: int) -> Labels:
    time, work = problem.edge_time[edge], problem.edge_work[edge]
    first, last = (index.ravel().astype(np.int64) for index in np.indices(time.shape))
    none = np.zeros(time.size, dtype=np.int64)
    return Labels(first, last, time.ravel(), work.ravel(), none, none, none)


def _series(problem: Problem, left: Labels, right: Labels, layer: int) -> Labels:
    sorted_right = np.argsort(right.first, kind="stable")
    number = np.bincount(right.first, minlength=len(problem.time[layer]))
    i, j = _pairs(left.last, number)
    j = sorted_right[j]
    m = left.last[i]
    return Labels(
        first=left.first[i],
        last=right.last[j],
        time=left.time[i] + problem.time[layer][m] + right.time[j],
        work=left.work[i] + problem.work[layer][m] + right.work[j],
        memory=left.memory[i] + problem.memory[layer][m] + right.memory[j],
        left=i,
        right=j,
    )


def _parallel(left: Labels, right: Labels) -> Labels:
    width = 1 + int(max(left.last.max(initial=0), right.last.max(initial=0)))
    keys, others = left.first * width + left.last, right.first * width + right.last
    sorted_right = np.argsort(others, kind="stable")
    most = 1 + int(max(keys.max(initial=0), others.max(initial=0)))
    i, j = _pairs(keys, np.bincount(others, minlength=most))
    j = sorted_right[j]
    return Labels(
        first=left.first[i],
        last=left.last[i],
        time=left.time[i] + right.time[j],
        work=left.work[i] + right.work[j],
        memory=left.memory[i] + right.memory[j],
        left=i,
        right=j,
    )


def _pairs(keys: IntArray, number: IntArray) -> tuple[IntArray, IntArray]:
    """Index pairs (i, j) of all equal keys, where the other side, sorted by key, has `number` of each key."""
    start = np.concatenate([[0], np.cumsum(number)])
    each = number[keys]
    i = np.repeat(np.arange(len(keys)), each)
    within = np.arange(len(i)) - np.repeat(np.cumsum(each) - each, each)
    return i, start[keys][i] + within


def _survivors(labels: Labels, choices: int, *, with_memory: bool) -> IntArray:
    """Labels that no other of the same ends dominates, by ends and then by ascending time; of equals only one."""
    group = labels.first * choices + labels.last
    if with_memory:
        return _survivors_of_three(group, labels)
    key = (group << BITS) + labels.time
    order = np.argsort(key)
    key = key[order]
    # Within a group device-time must fall; the group's number, taken off, lets every group start afresh.
    work = labels.work[order] - (group[order] << BITS)
    least = np.minimum.accumulate(work)
    better = np.ones(len(work), dtype=np.bool_)
    better[1:] = work[1:] < least[:-1]
    kept = np.flatnonzero(better)
    # Of several with the same ends and time the last one kept is the cheapest.
    last = np.ones(len(kept), dtype=np.bool_)
    last[:-1] = key[kept[1:]] != key[kept[:-1]]
    return order[kept[last]]


def _survivors_of_three(group: IntArray, labels: Labels) -> IntArray:
    """The same with memory as a third cost: a staircase of (device-time, memory) for each pair of ends."""
    order = np.lexsort((labels.memory, labels.work, labels.time, group))
    kept: list[int] = []
    works: list[int] = []
    memories: list[int] = []
    at = -1
    rows = zip(
        order.tolist(), group[order].tolist(), labels.work[order].tolist(), labels.memory[order].tolist(), strict=True
    )
    for index, here, work, memory in rows:
        if here != at:
            at, works, memories = here, [], []
        # Everything before is no slower; device-times ascend and memories descend along the staircase.
        at_step = bisect_right(works, work)
        if at_step and memories[at_step - 1] <= memory:
            continue
        stop = at_step
        while stop < len(works) and memories[stop] >= memory:
            stop += 1
        works[at_step:stop], memories[at_step:stop] = [work], [memory]
        kept.append(index)
    return np.array(kept, dtype=np.int64)


def ticks(values: FloatArray, tick: float) -> IntArray:
    return np.rint(np.asarray(values, dtype=np.float64) / tick).astype(np.int64)

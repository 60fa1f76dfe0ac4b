"""Fronts of labels: all that prefixes of a cycle can have reached and that no other prefix of that length beats.

A label is (F, H, E) as in `cycle`. All three are non-decreasing in what the prefix before the last bucket has reached,
for any cost functions, so a label that is no better than another in any of the three can be dropped. Two things keep
fronts short and change no result: an F below the ready time of the next tensor is as good as that time (likewise for H
and the tails of all later tensors), and a label that cannot lead to a period within a limit is dropped.

Where fronts explode nevertheless, labels in the same cube of edge `cell` can count as one. Each of the three values
is then at most `cell` too large for each bucket, and the period, a sum of two of them, at most twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.core.network import FloatArray

from . import exact
from .cycle import Bucketing, Cycle
from .stream import IntArray, Stream

_ROUNDING = 1e-12
_WEIGHTS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 0.5), (0.0, 1.0), (0.0, 0.5))
"""(share of F against E, weight of H) of the bounds by weighted sums; the last four only where updates take time."""
_BLOCK = 128
_FINEST = 1e-5
"""Edge of the smallest cubes, as a share of the limit, where a front is too long."""


@dataclass(frozen=True)
class Fronts:
    """For every prefix, the labels that no other of its labels beats; those of prefix j stand at offsets j to j + 1."""

    offsets: IntArray
    values: FloatArray
    """Rows F, H and E, a column for each label."""
    start: IntArray
    """For each label, the prefix after which its last bucket starts."""
    before: IntArray
    """For each label, the label of that prefix which it extends."""
    way: IntArray
    """For each label, the way of its last bucket."""
    cell: float = 0.0
    """The largest edge of cubes in which labels counted as one, in seconds; 0: nothing was lost."""

    @property
    def last(self) -> FloatArray:
        """The labels of all tensors."""
        return self.values[:, self.offsets[-2] :]


@dataclass(frozen=True)
class CompletionBounds:
    """Lower bounds on every completion of a prefix, and the limit that they are held against.

    Every way of the buckets to come takes at least what the cheapest takes, by itself in each phase; and as the period
    is at least λF + (1 − λ)E + μH + (1 − μ)·forward for all λ and μ from 0 to 1, also by weighted sums of the phases.
    With λ = μ = 1 that is the work of the channel: what is left of it comes after F and H.
    """

    limit: float
    cycle: Cycle
    reduce: tuple[FloatArray, FloatArray]
    """(least total time of the tensors after j, least finish whatever the prefix has reached)."""
    gather: tuple[FloatArray, FloatArray]
    update: FloatArray
    weighted: tuple[tuple[float, float, FloatArray, FloatArray], ...]
    """(λ, μ, least weighted sum of the tensors after j, the least of it and of λF whatever the prefix has reached)."""
    tails: FloatArray
    """For each prefix: H up to here makes no difference to any completion."""

    @staticmethod
    def of(cycle: Cycle, limit: float) -> CompletionBounds:
        n, stream = len(cycle), cycle.backward
        weights = [w for w in _WEIGHTS if cycle.updates or w[0] == 1.0]
        gather = np.zeros(n + 1), np.full(n + 1, -np.inf)
        if all(way.gather is not None for way in cycle.ways):
            ready = tuple(np.maximum.accumulate(cycle.tails).tolist())
            used = Stream(ready, stream.sizes, stream.breaks, stream.cap, cycle.forward)
            gather = _completion(used, _cheapest(cycle, 0.0, 1.0, 0.0))
        return CompletionBounds(
            limit=limit * (1 + _ROUNDING),
            cycle=cycle,
            reduce=_completion(stream, _cheapest(cycle, 1.0, 0.0, 0.0)),
            gather=gather,
            update=_completion(stream, _cheapest(cycle, 0.0, 0.0, 1.0))[0] if cycle.updates else np.zeros(n + 1),
            weighted=tuple((a, b, *_completion(stream, _cheapest(cycle, a, b, 1 - a), a)) for a, b in weights),
            tails=np.minimum.accumulate([cycle.forward, *cycle.tails[::-1]])[::-1],
        )

    def within(self, j: int, values: FloatArray, *, roughly: bool = False) -> IntArray:
        """Which of these labels of prefix j may have a completion within the limit; `roughly`: by two bounds only."""
        index = np.flatnonzero(self._by_phase(j, values) <= self.limit)
        for which in range(1 if roughly else len(self.weighted)):
            index = index[self._by_weight(which, j, values[:, index]) <= self.limit]
        return index

    def least(self, j: int, values: FloatArray) -> FloatArray:
        """Seconds that every completion of these labels of prefix j takes at least."""
        each = [self._by_weight(which, j, values) for which in range(len(self.weighted))]
        total: FloatArray = np.max([self._by_phase(j, values), *each], axis=0)
        return total

    def _by_phase(self, j: int, values: FloatArray) -> FloatArray:
        f, h, e = values[:3]
        reduced = np.maximum(f + self.reduce[0][j], self.reduce[1][j])
        gathered = np.maximum(h + self.gather[0][j], max(self.gather[1][j], self.cycle.forward))
        total: FloatArray = np.maximum(reduced, e + self.update[j]) + gathered
        return total

    def _by_weight(self, which: int, j: int, values: FloatArray) -> FloatArray:
        share, weight, rest, least = self.weighted[which]
        f, h, e = values[:3]
        total = np.maximum(share * f + rest[j], least[j]) + (weight * h + (1 - weight) * self.cycle.forward)
        if share < 1:
            total += (1 - share) * e
        return np.asarray(total)


def lower_bound(cycle: Cycle) -> float:
    """Seconds that no bucketing can go below: by each phase, and by all of the computing and of the channel's work."""
    bounds = CompletionBounds.of(cycle, np.inf)
    nothing = np.array([cycle.backward.ready[0], bounds.tails[0], cycle.backward.backward])
    return float(bounds.least(0, nothing[:, None])[0])


def _cheapest(cycle: Cycle, reduce: float, gather: float, update: float) -> FloatArray:
    """The least weighted sum of what the bucket [i, j) takes in the three phases, over the ways, at row j, column i."""
    terms = [w * t for w, t in zip((reduce, gather, update), cycle.tables, strict=True) if w]
    total: FloatArray = sum(terms[1:], start=terms[0]).min(axis=0)
    return total


def _completion(stream: Stream, table: FloatArray, share: float = 1.0) -> tuple[FloatArray, FloatArray]:
    rest, least = exact.remaining_by(stream, lambda k, low: table[k, low:k])
    ends = share * stream.ready_array + least[1:]
    return rest, np.concatenate([np.maximum.accumulate(ends[::-1])[::-1], [-np.inf]])


def nothing(cycle: Cycle, *, weigh: bool = False) -> Fronts:
    """The fronts of bucketings without any bucket: only the empty prefix has a label."""
    none = np.zeros(1, dtype=np.int64)
    values = np.array([-np.inf, -np.inf, cycle.backward.backward, *[0.0] * weigh])[:, None]
    return Fronts(np.array([0, *[1] * (len(cycle) + 1)]), values, none, none, none)


def extended(
    bounds: CompletionBounds,
    layer: Fronts | None = None,
    *,
    cell: float = 0.0,
    most: int | None = None,
    weigh: bool = False,
) -> Fronts:
    """Fronts of all prefixes: made of one bucket more than those of `layer`, or of any number of buckets if it is None.

    `cell` is the least edge of the cubes in which labels count as one, in seconds. It grows for a front that would have
    more than `most` labels. With `weigh` a label has a fourth value: the bytes in whole buckets, as a share of all,
    times the limit.
    """
    cycle = bounds.cycle
    n, stream, every = len(cycle), cycle.backward, np.arange(len(cycle.ways))
    rows = 4 if weigh else 3
    made = _Growing(n, rows, nothing(cycle, weigh=weigh) if layer is None else None)
    source = made if layer is None else _Growing(n, rows, layer)
    # A whole bucket waits for no layer.
    tails = np.full((len(every), n), -np.inf)
    gathers = [w for w, way in enumerate(cycle.ways) if way.gather is not None]
    edge = cell
    for j in range(1, n + 1):
        for w in gathers:
            np.maximum(tails[w, :j], cycle.tails[j - 1], out=tails[w, :j])
        starts = np.flatnonzero(source.held[:j])
        starts = starts[starts >= stream.lows[j]]
        # Pairs of a start and a way that no label of that start can use go first: most of them do.
        start, way = np.tile(starts, len(every)), np.repeat(every, len(starts))
        near = bounds.within(j, _reached(bounds, j, way, source.ideal[:, start], start, tails), roughly=True)
        start, way = start[near], way[near]
        held = source.held[start]
        label = np.arange(held.sum()) + np.repeat(source.offsets[start] - np.cumsum(held) + held, held)
        start, way = np.repeat(start, held), np.repeat(way, held)
        values = _reached(bounds, j, way, source.values[:, label], start, tails)
        kept = bounds.within(j, values)
        crowded = most is not None and len(kept) > 4 * most and edge > bounds.limit * _FINEST
        edge = max(cell, edge / 4 if crowded else 0.0)
        if edge:
            kept = kept[apart(values[:, kept], edge)]
        kept = kept[undominated(values[:, kept])]
        while most is not None and len(kept) > most:
            edge = 2 * edge if edge else bounds.limit * _FINEST
            kept = kept[apart(values[:, kept], edge)]
        made.add(j, values[:, kept], start[kept], label[kept], way[kept], edge)
    return made.fronts()


class _Growing:
    """Fronts while labels are added, prefix by prefix; `held`, `offsets` and `ideal` (least F, H, E) by prefix."""

    def __init__(self, n: int, rows: int, fronts: Fronts | None) -> None:
        self.held, self.offsets = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
        self.ideal = np.full((rows, n + 1), np.inf)
        self.values = np.zeros((rows, 0))
        self.start = self.before = self.way = np.zeros(0, dtype=np.int64)
        self.used, self.cell = 0, 0.0
        if fronts is not None:
            for j in range(n + 1):
                at = slice(int(fronts.offsets[j]), int(fronts.offsets[j + 1]))
                self.add(j, fronts.values[:, at], fronts.start[at], fronts.before[at], fronts.way[at], 0.0)

    def add(self, j: int, values: FloatArray, start: IntArray, before: IntArray, way: IntArray, cell: float) -> None:
        first, count = self.used, len(start)
        self.used += count
        if self.used > len(self.start):
            room = max(1024, self.used)
            self.values = np.concatenate([self.values, np.empty((len(values), room))], axis=1)
            more = np.zeros(room, dtype=np.int64)
            self.start, self.before, self.way = (np.concatenate([a, more]) for a in (self.start, self.before, self.way))
        at = slice(first, self.used)
        self.values[:, at], self.start[at], self.before[at], self.way[at] = values, start, before, way
        self.held[j], self.offsets[j], self.offsets[j + 1 :] = count, first, self.used
        self.ideal[:, j] = values.min(axis=1, initial=np.inf)
        self.cell = max(self.cell, cell)

    def fronts(self) -> Fronts:
        at = slice(self.used)
        return Fronts(self.offsets, self.values[:, at], self.start[at], self.before[at], self.way[at], self.cell)


def _reached(
    bounds: CompletionBounds, j: int, way: IntArray, values: FloatArray, start: IntArray, tails: FloatArray
) -> FloatArray:
    """The labels of prefix j that these become with the bucket [start, j); `tails[way, i]` is the longest from i on."""
    cycle = bounds.cycle
    n, stream = len(cycle), cycle.backward
    reduce, gather, update = cycle.tables
    f, h, e = values[:3]
    reached = np.empty_like(values)
    reduced = np.maximum(f, stream.ready[j - 1]) + reduce[way, j, start]
    np.add(np.maximum(e, reduced), update[way, j, start], out=reached[2])
    # Nothing happens with these before the next tensor is ready, or before the pass is over.
    np.maximum(reduced, stream.ready[j] if j < n else stream.backward, out=reached[0])
    np.maximum(np.maximum(h, tails[way, start]) + gather[way, j, start], bounds.tails[j], out=reached[1])
    if len(values) > 3:
        unit = bounds.limit / max(1, int(stream.prefix[n]))
        whole = np.array([w.gather is None for w in cycle.ways])[way]
        reached[3] = values[3] + whole * (stream.prefix[j] - stream.prefix[start]) * unit
    return reached


def apart(values: FloatArray, cell: float) -> IntArray:
    """One column, the one with the least sum, of those in each cube of edge `cell`."""
    cubes = np.floor(values / cell).astype(np.int64)
    order = np.lexsort((values.sum(axis=0), *cubes))
    cubes = cubes[:, order]
    new = (cubes[:, 1:] != cubes[:, :-1]).any(axis=0)
    found: IntArray = order[np.concatenate([np.ones(min(1, len(order)), dtype=bool), new])]
    return found


def undominated(values: FloatArray) -> IntArray:
    """Columns that no other column equals or beats in every row; of equal columns one. By ascending sum."""
    # A column is beaten by columns with at most its own sum only. The first few beat most of the others.
    order = np.argsort(values.sum(axis=0), kind="stable")
    kept: list[IntArray] = []
    block = 8
    while len(order):
        rows = values[:, order]
        beaten = _beaten(rows[:, :block], rows[:, :block]) & np.tri(min(block, len(order)), k=-1, dtype=bool)
        here = np.flatnonzero(~beaten.any(axis=1))
        kept.append(order[here])
        order = order[block:][~_beaten(rows[:, block:], rows[:, here]).any(axis=1)]
        block = min(2 * block, _BLOCK)
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)


def _beaten(columns: FloatArray, by: FloatArray) -> npt.NDArray[np.bool_]:
    """For each column and each of the others, whether the other equals or beats it in every row."""
    found = columns[0][:, None] >= by[0]
    for mine, theirs in zip(columns[1:], by[1:], strict=True):
        found &= mine[:, None] >= theirs
    return np.asarray(found)


def walk(layers: list[Fronts]) -> Bucketing:
    """The bucketing of the best label of all tensors: a bucket by layer, the last first, or all within the only one.

    The best has the least fourth value where there are four, and of those the shortest period.
    """
    layer, cuts, ways = len(layers) - 1, list[int](), list[int]()
    fronts = layers[layer]
    _, h, e, *weight = fronts.last
    at, label = len(fronts.offsets) - 2, int(fronts.offsets[-2] + np.lexsort((e + h, *weight))[0])
    while at > 0:
        fronts = layers[layer]
        cuts.append(at)
        ways.append(int(fronts.way[label]))
        at, label = int(fronts.start[label]), int(fronts.before[label])
        layer = max(layer - 1, 0)
    return Bucketing(tuple(cuts[::-1]), tuple(ways[::-1]))

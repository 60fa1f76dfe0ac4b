"""The best plan under a limit, exactly, without making the whole front.

To minimise x while y ≤ Y (time and device-time, in either role), price y at λ per unit:

1. For a given λ the plan with the least x + λ·y is found by the same reductions with one number per pair of choices
   (min-plus products). The line through the best plan above the limit and the best one below it gives the next λ; where
   no plan lies below that line, λ is the best price, and x + λ·y of any plan is at least what the line says.
2. The plan below the limit is a first answer x̂. A plan that beats it has x + λ·y < x̂ + λ·Y. So a choice goes away for
   which every plan through it has more; these minima come from one more sweep, from the whole graph to its parts.
3. On what is left, labels are made as for the front, and a label is dropped for which even the best rest, at price λ,
   reaches x̂ + λ·Y. With many choices a few of them come first, which makes a good λ and a good x̂ cheaply.

Nothing here is approximate: prices and sweeps only bound, labels decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dovetail.core.network import FloatArray

from .pareto import BoolArray, IntArray, Labels, Problem, chosen, label_tables

ROUNDING = 1e-11
"""Relative; prices are floating-point numbers, and rounding must not make a bound cut too much."""
FEW = 12
"""Choices per layer above which a coarser problem is solved first."""
LONG = 40
"""Layers above which a better first answer is sought before all labels are made."""
BEAM = 64
"""Labels per table in that search."""

Minimised = Literal["time", "work"]


@dataclass(frozen=True)
class _Point:
    x: int
    y: int
    fits: bool
    """Whether it fits in memory."""
    chosen: list[int]


def best(problem: Problem, minimised: Minimised, limit: int | None) -> list[int] | None:
    """The choices with the least `minimised` while the other cost stays within the limit; of equals the least other.

    None where no plan stays within it (and in memory).
    """
    return _LimitedSearch(problem, minimised, limit).run()


class _LimitedSearch:
    """One search; `answer` is the best plan within the limit so far."""

    def __init__(self, problem: Problem, minimised: Minimised, limit: int | None) -> None:
        self.problem, self.limit = problem, limit
        self.swapped = minimised == "work"
        self.answer: _Point | None = None

    def run(self) -> list[int] | None:
        fastest = self.at(self.problem, 0.0)
        if self.limit is None or fastest.y <= self.limit:
            # Only ties are left: labels within the least x itself.
            return self.finish(0.0, fastest.x if fastest.fits else None)
        price = self.price(fastest)
        return None if price is None else self.finish(price, None)

    def at(self, problem: Problem, price: float, names: list[IntArray] | None = None) -> _Point:
        """The plan with the least x + price·y (infinite price: the least y)."""
        found = cheapest(problem, *self.prices(price))
        if names is not None:
            found = [int(names[layer][k]) for layer, k in enumerate(found)]
        return self.point(found)

    def prices(self, price: float) -> tuple[float, float]:
        x, y = (0.0, 1.0) if np.isinf(price) else (1.0, price)
        return (y, x) if self.swapped else (x, y)

    def point(self, plan: list[int]) -> _Point:
        time, work, memory = self.problem.value(plan)
        fits = self.problem.most_memory is None or memory <= self.problem.most_memory
        point = _Point(*((work, time) if self.swapped else (time, work)), fits, plan)
        self.offer(point)
        return point

    def offer(self, point: _Point) -> None:
        within = self.limit is None or point.y <= self.limit
        if within and point.fits and (self.answer is None or (point.x, point.y) < (self.answer.x, self.answer.y)):
            self.answer = point

    def price(self, above: _Point) -> float | None:
        """The best price λ for the limit, None if no plan is within it; `answer` is the best plan seen on the way."""
        assert self.limit is not None
        few = _few(self.problem)
        if few is not None:
            coarse = self.problem.restricted(few)
            low, high = self.at(coarse, np.inf, few), self.at(coarse, 0.0, few)
            if low.y <= self.limit < high.y:
                low, high, _ = self.close(coarse, low, high, few)
                above = min(above, high, key=lambda p: _above(p, low, self.limit or 0))
        else:
            low = self.at(self.problem, np.inf)
        if low.y > self.limit:
            low = self.at(self.problem, np.inf)
            if low.y > self.limit:
                return None
        return self.close(self.problem, low, above, None)[2]

    def close(
        self, problem: Problem, low: _Point, high: _Point, names: list[IntArray] | None
    ) -> tuple[_Point, _Point, float]:
        """Moves the two plans around the limit together until no plan lies below the line through them."""
        assert self.limit is not None
        while True:
            price = max(0.0, (low.x - high.x) / (high.y - low.y))
            found = self.at(problem, price, names)
            line = min(low.x + price * low.y, high.x + price * high.y)
            if found.x + price * found.y >= line * (1 - ROUNDING):
                return low, high, price
            if found.y <= self.limit:
                low = found
            else:
                high = found

    def finish(self, price: float, cap: int | None) -> list[int] | None:
        problem = self.problem
        outer, marginals = outside(problem, inside(problem, *self.prices(price)), *self.prices(price))
        if cap is None and self.answer is not None and len(self.problem.counts) > LONG:
            self.labels(price, self.cut(price, cap), outer, marginals, most=BEAM)
        return self.labels(price, self.cut(price, cap), outer, marginals)

    def labels(
        self, price: float, cut: float, outer: list[FloatArray], marginals: list[FloatArray], most: int | None = None
    ) -> list[int] | None:
        """The best plan below the cut; with `most`, made of the `most` most promising labels of each table."""
        kept = [np.flatnonzero(marginal <= cut) for marginal in marginals] + [np.zeros(1, dtype=np.int64)] * 2
        if any(len(k) == 0 for k in kept):
            return None
        small = self.problem.restricted(kept)
        rest = [outer[table][kept[u]][:, kept[v]] for table, (u, v) in enumerate(small.graph.ends)]
        spare = memory_left(small)

        def bound(table: int, labels: Labels) -> BoolArray:
            promise = self.total(labels, price) + rest[table][labels.first, labels.last]
            may = promise <= cut
            if spare is not None:
                may &= labels.memory <= spare[table][labels.first, labels.last]
            if most is not None and len(promise) > most:
                may &= promise <= np.partition(promise, most)[most]
            return np.asarray(may)

        tables = label_tables(small, bound=bound)
        final = tables[-1]
        x, y = (final.work, final.time) if self.swapped else (final.time, final.work)
        within = np.arange(len(final)) if self.limit is None else np.flatnonzero(y <= self.limit)
        if not len(within):
            return None
        first = int(within[np.lexsort((y[within], x[within]))[0]])
        return self.point([int(kept[layer][k]) for layer, k in enumerate(chosen(small, tables, first))]).chosen

    def cut(self, price: float, cap: int | None) -> float:
        if cap is not None:
            return cap * (1 + ROUNDING)
        if self.answer is None or self.limit is None:
            return np.inf
        return (self.answer.x + price * self.limit) * (1 + ROUNDING)

    def total(self, labels: Labels, price: float) -> FloatArray:
        time, work = self.prices(price)
        return time * labels.time + work * labels.work


def _above(point: _Point, low: _Point, limit: int) -> float:
    """The slope from `low` to a plan above the limit: the steeper, the better; infinite for one that is not above."""
    return -(low.x - point.x) / (point.y - low.y) if point.y > limit else np.inf


def _few(problem: Problem) -> list[IntArray] | None:
    """Choices whose devices about double from one to the next, where there are more than a few."""
    if max(len(c) for c in problem.counts) <= FEW:
        return None
    kept = []
    for counts in problem.counts:
        doubling = [0]
        for k in range(1, len(counts)):
            if counts[k] >= 2 * counts[doubling[-1]] or k == len(counts) - 1:
                doubling.append(k)
        kept.append(np.array(doubling, dtype=np.int64))
    return kept


def inside(problem: Problem, time: float, work: float) -> list[FloatArray]:
    """For every table and pair of end choices the least time·t + work·w of what lies between."""
    graph = problem.graph
    made = [time * t + work * w for t, w in zip(problem.edge_time, problem.edge_work, strict=True)]
    for step in graph.steps:
        left, right = made[step.left], made[step.right]
        if step.through >= 0:
            layer = time * problem.time[step.through] + work * problem.work[step.through]
            made.append(_product(left + layer, right))
        else:
            made.append(left + right)
    return made


def cheapest(problem: Problem, time: float, work: float) -> list[int]:
    """The choices with the least time·t + work·w."""
    graph, made = problem.graph, inside(problem, time, work)
    found = [0] * graph.layers
    waiting = [(len(made) - 1, 0, 0)]
    while waiting:
        table, f, j = waiting.pop()
        if table < len(graph.edges):
            continue
        step = graph.steps[table - len(graph.edges)]
        if step.through < 0:
            waiting += [(step.left, f, j), (step.right, f, j)]
            continue
        layer = time * problem.time[step.through] + work * problem.work[step.through]
        m = int((made[step.left][f] + layer + made[step.right][:, j]).argmin())
        found[step.through] = m
        waiting += [(step.left, f, m), (step.right, m, j)]
    return found


def outside(
    problem: Problem, made: list[FloatArray], time: float, work: float
) -> tuple[list[FloatArray], list[FloatArray]]:
    """For every table the least cost of everything else, and for every layer and choice the least of a whole plan."""
    graph = problem.graph
    rest: list[FloatArray] = [np.empty(0)] * len(made)
    rest[-1] = np.zeros((1, 1))
    through: list[FloatArray] = [np.empty(0)] * graph.layers
    for table in range(len(made) - 1, len(graph.edges) - 1, -1):
        step, out = graph.steps[table - len(graph.edges)], rest[table]
        left, right = made[step.left], made[step.right]
        if step.through < 0:
            rest[step.left], rest[step.right] = out + right, out + left
            continue
        layer = time * problem.time[step.through] + work * problem.work[step.through]
        rest[step.left] = _product(out, right.T) + layer
        rest[step.right] = (_product(out.T, left) + layer).T
        through[step.through] = (left + rest[step.left]).min(axis=0)
    return rest, through


def memory_left(problem: Problem) -> list[FloatArray] | None:
    """For every table the most memory that a label may need so that the rest, at its least, still fits."""
    if problem.most_memory is None:
        return None
    graph, most = problem.graph, problem.most_memory
    free = tuple(np.zeros_like(t) for t in problem.edge_time)
    plain = Problem(
        graph, problem.counts, problem.memory, problem.memory, free, free, problem.memory, None, problem.tick
    )
    return [most - rest for rest in outside(plain, inside(plain, 1.0, 0.0), 1.0, 0.0)[0]]


def _product(a: FloatArray, b: FloatArray) -> FloatArray:
    """The min-plus product: out[f, j] = min over m of a[f, m] + b[m, j]."""
    if len(a) == 1:
        return np.asarray((a[0][:, None] + b).min(axis=0)[None, :])
    if b.shape[1] == 1:
        return np.asarray((a + b[:, 0]).min(axis=1)[:, None])
    return np.asarray((a[:, :, None] + b[None, :, :]).min(axis=1))

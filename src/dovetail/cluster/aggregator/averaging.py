"""From the workers' gradients to one per parameter: the mean over those who computed it, weighted by samples.

Gradients lie by segment, so workers of any depths are added up in a few runs of memory. Always in the order of the
workers, whoever came first: the sum has the same bits whatever shares the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dovetail.cluster.job.arena import Arena, Flats
from dovetail.train.partial.courier import Delivery, Word
from dovetail.train.partial.noise import OptimiserMetric

CHUNK = 1 << 16
"""Elements that are summed over all workers before the next ones: the sum stays in the cache meanwhile."""


@dataclass(frozen=True)
class _Sum:
    """One run of elements with the same contributors."""

    into: torch.Tensor
    terms: list[tuple[int, torch.Tensor]]
    """(worker, its gradients), in the order of the workers."""


class Means:
    """Writes every trained parameter's `.grad`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        sizes = arena.layout.gradients.sizes
        # Half precision is added up in single precision: its eight bits would not bear the sum.
        self._sums: Flats = {d: torch.zeros(n, dtype=_wide(d)) for d, n in sizes.items()}
        self._narrow: Flats = {d: torch.zeros(n, dtype=d) for d, n in sizes.items() if _wide(d) != d}
        self._views = arena.layout.gradients.views({**self._sums, **self._narrow})
        self._plans: dict[tuple[int, ...], list[_Sum]] = {}

    def average(self, samples: Sequence[int], depths: Sequence[int]) -> None:
        """`depths`: of each worker, in segments; all of them have handed over."""
        key = tuple(depths)
        if key not in self._plans:
            self._plans[key] = self._plan(key)
        with torch.no_grad():
            for one in self._plans[key]:
                total = sum(samples[worker] for worker, _ in one.terms)
                (first, gradient), *others = one.terms
                if gradient.dtype == one.into.dtype:
                    torch.mul(gradient, samples[first] / total, out=one.into)
                else:
                    one.into.copy_(gradient).mul_(samples[first] / total)
                for worker, gradient in others:
                    one.into.add_(gradient, alpha=samples[worker] / total)
            for dtype, narrow in self._narrow.items():
                narrow.copy_(self._sums[dtype])

    def give(self) -> None:
        """Sets the parameters' `.grad`. None where no worker had one; a shared parameter's is the sum of its uses."""
        used = self._used()
        for leaf, view, has in zip(self._arena.leaves, self._views, used, strict=True):
            if not leaf.alias:
                leaf.parameter.grad = view if has else None
        for leaf, view, has in zip(self._arena.leaves, self._views, used, strict=True):
            if leaf.alias and has:
                if leaf.parameter.grad is None:
                    leaf.parameter.grad = view
                else:
                    leaf.parameter.grad.add_(view)

    def measured(
        self, metric: OptimiserMetric, samples: Sequence[int], depths: Sequence[int], *, step: int, rate: float
    ) -> Delivery:
        """Squared norms of every worker's gradient and of the mean, by segment, for the guard. Before `give`."""
        leaves = [leaf for leaf, has in zip(self._arena.leaves, self._used(), strict=True) if has]
        known = metric.known(leaves)
        scales = self._scales(metric) if known else None
        count = self._arena.layout.segments
        words = [Word(step, float(n), 0.0, known, rate) for n in samples]
        delivery = Delivery(words[0], tuple(depths), count, [], words=words, in_metric=known)
        mean = _squares(self._sums, self._arena.layout.gradients.bounds, scales)
        for worker in range(self._arena.workers):
            flats = {dtype: rows[worker] for dtype, rows in self._arena.rows.items()}
            own = _squares(flats, self._arena.layout.gradients.bounds, scales)
            delivery.squares.append([*own, *(mean if worker == 0 else [0.0] * count)])
        return delivery

    def _used(self) -> list[bool]:
        return [bool(flag) for flag in self._arena.flags.amax(dim=0).tolist()]

    def _plan(self, depths: tuple[int, ...]) -> list[_Sum]:
        count = self._arena.layout.segments
        plan = []
        for dtype, rows in self._arena.rows.items():
            bounds = self._arena.layout.gradients.bounds[dtype]
            at = 0
            for segment in range(count):
                contributors = _contributors(depths, count, segment)
                if segment + 1 < count and _contributors(depths, count, segment + 1) == contributors:
                    continue
                for start in range(at, bounds[segment + 1], CHUNK):
                    stop = min(start + CHUNK, bounds[segment + 1])
                    terms = [(worker, rows[worker, start:stop]) for worker in contributors]
                    plan.append(_Sum(self._sums[dtype][start:stop], terms))
                at = bounds[segment + 1]
        return plan

    def _scales(self, metric: OptimiserMetric) -> Flats:
        """1/√v in the gradients' layout; 0 where the optimiser has no scale."""
        flats = {dtype: torch.zeros_like(flat) for dtype, flat in self._sums.items()}
        for leaf, view in zip(self._arena.leaves, self._arena.layout.gradients.views(flats), strict=True):
            scale = metric(leaf)
            if scale is not None:
                view.copy_(scale)
        return flats


def _contributors(depths: Sequence[int], segments: int, segment: int) -> list[int]:
    return [worker for worker, depth in enumerate(depths) if depth >= segments - segment]


def _squares(flats: Flats, bounds: dict[torch.dtype, tuple[int, ...]], scales: Flats | None) -> list[float]:
    count = max(len(b) for b in bounds.values()) - 1
    found = [0.0] * count
    for dtype, flat in flats.items():
        squares = flat.to(_wide(dtype)).square()
        if scales is not None:
            squares.mul_(scales[dtype])
        for segment in range(count):
            start, stop = bounds[dtype][segment : segment + 2]
            found[segment] += float(squares[start:stop].sum(dtype=torch.float64))
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

"""Averages gradients: for every parameter the mean over the workers that computed it, weighted by samples.

Gradients are stored by segment, so workers of any depths are added up in a few contiguous pieces. They are added in the
order of the workers, whichever ended first: the sum has the same bits whatever else runs on the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dovetail.cluster.job.arena import Arena, Flats
from dovetail.train.partial.noise_monitor import NoiseMeasurement, OptimiserMetric
from dovetail.train.partial.segments import contributors

CHUNK = 1 << 16
"""Number of elements that are summed over all workers before the next ones, so that the sum stays in the cache."""


@dataclass(frozen=True)
class _Sum:
    """A piece of elements with the same contributors."""

    into: torch.Tensor
    terms: list[tuple[int, torch.Tensor]]
    """(worker, its gradients), in the order of the workers."""


class GradientAverager:
    """Averages the gradients in an arena and sets every trained parameter's `.grad`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        sizes = arena.layout.gradients.sizes
        # Half precision is added up in single precision: a sum in half precision would lose too many bits.
        self._sums: Flats = {d: torch.zeros(n, dtype=_wide(d)) for d, n in sizes.items()}
        self._narrow: Flats = {d: torch.zeros(n, dtype=d) for d, n in sizes.items() if _wide(d) != d}
        self._views = arena.layout.gradients.views({**self._sums, **self._narrow})
        self._plans: dict[tuple[int, ...], list[_Sum]] = {}

    def average(self, samples: Sequence[int], depths: Sequence[int]) -> None:
        """Averages the gradients of all workers. `samples` and `depths` (in segments) are by worker."""
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

    def set_gradients(self) -> None:
        """Sets the parameters' `.grad`: None where no worker had one; a shared parameter's is the sum over its uses."""
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
        self, metric: OptimiserMetric, samples: Sequence[int], depths: Sequence[int], *, step: int
    ) -> NoiseMeasurement:
        """Squared norms of every worker's gradient and of the mean, by segment. Call before `set_gradients`."""
        leaves = [leaf for leaf, has in zip(self._arena.leaves, self._used(), strict=True) if has]
        known = metric.known(leaves)
        scales = self._scales(metric) if known else None
        bounds = self._arena.layout.gradients.bounds
        rows = [{dtype: r[worker] for dtype, r in self._arena.rows.items()} for worker in range(self._arena.workers)]
        return NoiseMeasurement(
            step=step,
            depths=tuple(depths),
            samples=[float(n) for n in samples],
            squares=[_squares(flats, bounds, scales) for flats in rows],
            mean_squares=_squares(self._sums, bounds, scales),
            in_metric=known,
        )

    def _used(self) -> list[bool]:
        return [bool(flag) for flag in self._arena.flags.amax(dim=0).tolist()]

    def _plan(self, depths: tuple[int, ...]) -> list[_Sum]:
        count = self._arena.layout.segments
        plan = []
        for dtype, rows in self._arena.rows.items():
            bounds = self._arena.layout.gradients.bounds[dtype]
            at = 0
            for segment in range(count):
                workers = contributors(depths, count, segment)
                if segment + 1 < count and contributors(depths, count, segment + 1) == workers:
                    continue
                for start in range(at, bounds[segment + 1], CHUNK):
                    stop = min(start + CHUNK, bounds[segment + 1])
                    terms = [(worker, rows[worker, start:stop]) for worker in workers]
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

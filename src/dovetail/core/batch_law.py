"""How a layer's time grows with the local batch: t(b) = t0 + t1·b, and the error of that law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .files import Record, Seconds
from .profile import Layer

_SHORTEST = 1e-12
"""Seconds; a shorter time counts as zero."""


class BatchLaw(Record, frozen=True, kw_only=True):
    """Seconds of forward and backward together, as an affine function of the local batch."""

    fixed: Seconds
    """t0: seconds that even an empty batch costs."""
    per_sample: Seconds
    """t1: seconds that each sample adds."""
    error: float
    """Mean relative error over the measured batches; 0 where there are too few of them to show one."""
    worst: float
    """The largest relative error among them."""

    def seconds(self, batch: int) -> float:
        return self.fixed + self.per_sample * batch


def law(layer: Layer) -> BatchLaw:
    """The law through a layer's measured times."""
    return fit([t.batch for t in layer.times], [t.forward.median + t.backward.median for t in layer.times])


def fit(batches: Sequence[int], seconds: Sequence[float]) -> BatchLaw:
    """Least squares of the relative error, neither coefficient below zero.

    Relative, because planning compares a layer with itself at other batches: the smallest batch counts as much as the
    largest. One measured batch says nothing of t0: the time is then taken as proportional.
    """
    b, t = np.asarray(batches, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    assert len(b) == len(t) > 0 and b.min() > 0, "one time for each of at least one batch"
    known = t > _SHORTEST
    if not known.any():
        return BatchLaw(fixed=0.0, per_sample=0.0, error=0.0, worst=0.0)
    b, t = b[known], t[known]
    best = min(_candidates(b, t), key=lambda c: float((((c[0] + c[1] * b) / t - 1) ** 2).sum()))
    off = np.abs((best[0] + best[1] * b) / t - 1)
    return BatchLaw(fixed=best[0], per_sample=best[1], error=float(off.mean()), worst=float(off.max()))


def _candidates(b: np.ndarray, t: np.ndarray) -> list[tuple[float, float]]:
    """The free optimum where it is allowed, and the optima on the two borders."""
    constant, slope = 1 / t, b / t  # the law's relative value is fixed·constant + per_sample·slope; its target is 1
    found = [
        (float(constant.sum() / (constant**2).sum()), 0.0),
        (0.0, float(slope.sum() / (slope**2).sum())),
    ]
    if len(b) > 1:
        fixed, per_sample = np.linalg.lstsq(np.stack([constant, slope], axis=1), np.ones(len(b)), rcond=None)[0]
        if fixed >= 0 and per_sample >= 0:
            found.append((float(fixed), float(per_sample)))
    else:
        found = found[1:]
    return found

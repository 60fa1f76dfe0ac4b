"""Quantiles of repeated measurements. Medians, because one interruption by the system would spoil a mean."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dovetail.core.profile import Quantiles


def quantiles(samples: npt.ArrayLike) -> Quantiles:
    """Median, tenth and ninetieth percentile of some durations in seconds, none below zero."""
    durations = np.maximum(np.asarray(samples, dtype=np.float64), 0.0)
    low, median, high = (float(q) for q in np.quantile(durations, [0.1, 0.5, 0.9]))
    # Interpolation may round the three apart by a last digit.
    return Quantiles(median=median, low=min(low, median), high=max(high, median), samples=durations.size)

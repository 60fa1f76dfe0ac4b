"""The guard's bound at the present learning rate: noise that small steps average out need not be paid for.

Take a step of size η on a loss of curvature H, with n the noise scale over the batch. It gains η − η²H(1 + n)/2 of the
squared gradient: noise costs η², progress brings η. A schedule whose peak rate is the best for the whole batch has
peak · H · (1 + n) = 1. At r times the peak, contributors that leave noise n' instead of n then keep

    (2 − r (1 + n')/(1 + n)) / (2 − r)

of the step's progress. At the peak that is stricter than the guard's own bound, which lets the rate follow the noise;
as the schedule falls, fewer and fewer contributors suffice. Full depth first and partial depth late follows by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .guard import Moments


def kept(noise_scale: float, have: float, batch: float, *, rate: float) -> float:
    """Progress of a step from `have` samples as a share of that from the whole `batch`; below 0 where it does harm.

    `rate` is the learning rate over its peak, above 0 and at most 1.
    """
    growth = batch / have if math.isinf(noise_scale) else (1 + noise_scale / have) / (1 + noise_scale / batch)
    return (2 - rate * growth) / (2 - rate)


def fewest_at(
    segments: Sequence[Moments],
    batches: Sequence[float],
    *,
    epsilon: float,
    rate: float,
    least: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The smallest number of contributors for each segment, from the input to the output, that the bound allows.

    As `guard.fewest`: `batches` stand in the order in which workers join, numbers do not decrease towards the output.
    """
    assert 0 < rate <= 1, "a share of the peak"
    k, total = len(batches), sum(batches)
    counts: list[int] = []
    for index, segment in enumerate(segments):
        needed = next(
            c
            for c in range(1, k + 1)
            if c == k or kept(segment.noise_scale, sum(batches[:c]), total, rate=rate) >= 1 - epsilon - 1e-12
        )
        counts.append(max(needed, counts[-1] if counts else 1, least[index] if least else 1))
    counts[-1] = k
    return tuple(counts)


class Rate:
    """The learning rate over its peak so far; 1 until it begins to fall: a warm-up does not count as late."""

    def __init__(self) -> None:
        self.peak = 0.0

    def __call__(self, learning_rate: float) -> float:
        self.peak = max(self.peak, learning_rate)
        return max(learning_rate / self.peak, 1e-9) if self.peak > 0 else 1.0

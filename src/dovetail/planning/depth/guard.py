"""How many workers each segment needs so that its gradient stays good enough. Pure arithmetic on measured norms.

A worker's gradient from b samples is the true gradient G plus noise, whose variance summed over all elements is
tr(Σ)/b. Both show in squared norms that are at hand when gradients are reduced: with b_i samples on worker i and
b = Σ b_i among the contributors,

    E Σ b_i |g_i|²  =  b |G|² + c tr(Σ)          (c single gradients)
    E b |mean|²     =  b |G|² +   tr(Σ)          (their mean, weighted by samples)

so the difference gives tr(Σ) and the rest |G|², both without bias. The noise scale B_noise = tr(Σ)/|G|², in samples,
says what a batch is worth: a step from b samples makes 1/(1 + B_noise/b) of the progress of one from infinitely many.
In the optimiser's own metric (for Adam, squares divided by √v) the norms are those of the step that is really taken.

The bound at the present learning rate (`kept`): noise that small steps average out need not be paid for. Take a step of
size η on a loss of curvature H, with n the noise scale over the batch. It gains η − η²H(1 + n)/2 of the squared
gradient: noise costs η², progress brings η. A schedule whose peak rate is the best for the whole batch has
peak · H · (1 + n) = 1. At r times the peak, contributors that leave noise n' instead of n then keep

    (2 − r (1 + n')/(1 + n)) / (2 − r)

of the step's progress. At the peak that is stricter than the bound without a rate (`retained`), which lets the rate
follow the noise; as the schedule falls, fewer contributors suffice: full depth first, partial depth late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.errors import Error


@dataclass(frozen=True)
class Guard:
    """How much progress per step partial backpropagation may cost, and how often that is measured."""

    epsilon: float = 0.03
    """Share of a full step's progress that any segment may lose."""
    every: int = 20
    """Iterations from one measurement to the next. A measured iteration runs at full depth."""
    smoothing: float = 0.3
    """Weight of the newest measurement in the running means of tr(Σ) and of |G|², which are kept apart."""
    patience: int = 2
    """Measurements before the first decision; until then all workers run at full depth."""
    annealed: bool = True
    """Whether the bound counts at the present learning rate (`kept`): stricter at its peak, then looser."""

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise Error(f"Guard.epsilon: expected at least 0 and below 1, got {self.epsilon}")
        if not 0 < self.smoothing <= 1:
            raise Error(f"Guard.smoothing: expected above 0 and at most 1, got {self.smoothing}")
        for name in ("every", "patience"):
            if getattr(self, name) < 1:
                raise Error(f"Guard.{name}: expected at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Moments:
    """Noise and signal of one segment's gradient: one measurement, or the running means of several."""

    variance: float
    """tr(Σ) of one sample's gradient."""
    signal: float
    """|G|². An estimate without bias, so noise can make it negative."""

    @property
    def noise_scale(self) -> float:
        """B_noise, in samples; infinite where no signal can be seen."""
        if self.variance <= 0:
            return 0.0
        return self.variance / self.signal if self.signal > 0 else math.inf


def moments(squares: Sequence[float], samples: Sequence[float], mean_square: float) -> Moments:
    """From the contributors' squared norms |g_i|², their samples b_i, and |mean|². Needs two contributors."""
    count, total = len(squares), sum(samples)
    assert count == len(samples) >= 2, "the noise shows only in the difference of two gradients"
    weighted = sum(b * square for b, square in zip(samples, squares, strict=True))
    variance = (weighted - total * mean_square) / (count - 1)
    return Moments(variance=variance, signal=mean_square - variance / total)


def smoothed(before: Moments | None, new: Moments, weight: float) -> Moments:
    """Running means, numerator and denominator apart: the mean of ratios would be far off where |G|² is small."""
    if before is None:
        return new
    return Moments(
        variance=before.variance + weight * (new.variance - before.variance),
        signal=before.signal + weight * (new.signal - before.signal),
    )


def retained(noise_scale: float, have: float, batch: float) -> float:
    """Progress of a step from `have` samples, as a share of that from the whole `batch`."""
    if math.isinf(noise_scale):
        return have / batch
    return (1 + noise_scale / batch) / (1 + noise_scale / have)


def kept(noise_scale: float, have: float, batch: float, *, rate: float) -> float:
    """The same at a learning rate that stays as it is; below 0 where the step does harm.

    `rate` is the learning rate over its peak, above 0 and at most 1.
    """
    growth = batch / have if math.isinf(noise_scale) else (1 + noise_scale / have) / (1 + noise_scale / batch)
    return (2 - rate * growth) / (2 - rate)


def fewest(
    segments: Sequence[Moments],
    batches: Sequence[float],
    *,
    epsilon: float,
    least: Sequence[int] | None = None,
    rate: float | None = None,
) -> tuple[int, ...]:
    """The smallest number of contributors for each segment, from the input to the output, that the bound allows.

    `batches` are the workers' samples in the order in which workers join a segment. A worker that reaches a segment has
    passed all those behind it, so the numbers do not decrease towards the output, where everybody contributes. With a
    `rate`, the bound is that at this share of the peak learning rate.
    """
    assert rate is None or 0 < rate <= 1, "a share of the peak"
    k, total = len(batches), sum(batches)

    def share(noise_scale: float, have: float) -> float:
        return retained(noise_scale, have, total) if rate is None else kept(noise_scale, have, total, rate=rate)

    counts: list[int] = []
    for index, segment in enumerate(segments):
        enough = (c for c in range(1, k) if share(segment.noise_scale, sum(batches[:c])) >= 1 - epsilon - 1e-12)
        counts.append(max(next(enough, k), counts[-1] if counts else 1, least[index] if least else 1))
    counts[-1] = k
    return tuple(counts)


class RelativeRate:
    """The learning rate over its peak so far; 1 until it begins to fall: a warm-up does not count as late."""

    def __init__(self) -> None:
        self.peak = 0.0

    def __call__(self, learning_rate: float) -> float:
        self.peak = max(self.peak, learning_rate)
        return max(learning_rate / self.peak, 1e-9) if self.peak > 0 else 1.0


def progress(segments: Sequence[Moments], counts: Sequence[int], batches: Sequence[float]) -> float:
    """Expected progress per step of the whole model as a share of full backpropagation's.

    A segment's part in it is |G|² in the metric. Where no segment shows a signal, the worst segment's share stands.
    """
    total = sum(batches)
    have = [sum(batches[:c]) for c in counts]
    full = [max(s.signal, 0.0) / (1 + s.noise_scale / total) if s.signal > 0 else 0.0 for s in segments]
    if sum(full) <= 0:
        return min(retained(s.noise_scale, b, total) for s, b in zip(segments, have, strict=True))
    partial = [f * retained(s.noise_scale, b, total) for f, s, b in zip(full, segments, have, strict=True)]
    return sum(partial) / sum(full)


def cost(counts: Sequence[int], batches: Sequence[float], *, forward: float, backward: Sequence[float]) -> float:
    """Device-seconds per step as a share of full backpropagation's.

    `forward` and `backward` (one figure for each segment) are times for one sample in any unit.
    """
    total = sum(batches)
    spent = forward + sum(b * sum(batches[:c]) / total for b, c in zip(backward, counts, strict=True))
    return spent / (forward + sum(backward))


def fewer_workers(
    segments: Sequence[Moments],
    counts: Sequence[int],
    batches: Sequence[float],
    *,
    forward: float,
    backward: Sequence[float],
) -> int | None:
    """How many workers at full depth would make the progress of `counts` for no more device-seconds, if any."""
    spent = cost(counts, batches, forward=forward, backward=backward)
    made = progress(segments, counts, batches)
    if spent >= 1 - 1e-9:
        return None
    for workers in range(1, len(batches)):
        if sum(batches[:workers]) / sum(batches) > spent + 1e-9:
            break
        if progress(segments, [workers] * len(counts), batches) >= made - 1e-9:
            return workers
    return None


def counts_of(depths: Sequence[int], segments: int) -> tuple[int, ...]:
    """How many workers contribute to each segment, from the input to the output."""
    return tuple(sum(d >= segments - s for d in depths) for s in range(segments))


def assign(counts: Sequence[int], order: Sequence[int], limits: Sequence[int] | None = None) -> tuple[int, ...]:
    """A depth for each worker so that segment s gets counts[s] contributors.

    Workers go deep in the given order. `limits` are the depths that workers cannot exceed: where too few can reach a
    segment it gets those who can, and where nobody can, the first in the order goes all the same, since a segment that
    nobody trains would stand still.
    """
    segments = len(counts)
    depths = [0] * len(order)
    reached = 0
    for segment, count in enumerate(counts):
        depth = segments - segment
        waiting = [w for w in order if not depths[w]]
        able = [w for w in waiting if limits is None or limits[w] >= depth]
        if not reached and not able:
            able = waiting[:1]
        for worker in able[: max(count - reached, 0)]:
            depths[worker] = depth
            reached += 1
    for worker in order:
        depths[worker] = depths[worker] or 1
    return tuple(depths)


@dataclass(frozen=True)
class Decision:
    """What the guard measured at an iteration and what follows from it. Its text is one line of the log."""

    step: int
    metric: str
    noise: tuple[float, ...]
    """B_noise of each segment as a multiple of the global batch, from the input to the output."""
    before: tuple[int, ...]
    counts: tuple[int, ...]
    """Contributors of each segment from the next iteration on."""
    progress: float
    cost: float
    workers: int
    fewer: int | None
    """Number of workers at full depth that would make the same progress for no more device-seconds, if any."""
    rate: float | None = None
    """Learning rate over its peak, where the bound depends on it."""

    def __str__(self) -> str:
        noise = " ".join("∞" if math.isinf(n) else f"{n:.2g}" for n in self.noise)
        metric = f"{self.metric} metric" + (f", {self.rate:.0%} of the peak rate" if self.rate is not None else "")
        counts = " ".join(map(str, self.counts))
        change = "stay" if self.counts == self.before else f"were {' '.join(map(str, self.before))}, now"
        line = (
            f"step {self.step}: noise/batch {noise} ({metric}), input to output; contributors {change} "
            f"{counts} of {self.workers}; expected {self.progress:.0%} of full progress at {self.cost:.0%} of its cost"
        )
        if self.fewer is not None:
            line += f"; {self.fewer} of {self.workers} workers at full depth would do as well for no more"
        return line


def decide(
    guard: Guard,
    segments: Sequence[Moments],
    batches: Sequence[float],
    *,
    step: int,
    before: Sequence[int],
    least: Sequence[int] | None = None,
    forward: float = 1.0,
    backward: Sequence[float] | None = None,
    metric: str = "plain",
    counts: Sequence[int] | None = None,
    rate: float | None = None,
) -> Decision:
    """The guard's decision after one measured iteration, from smoothed moments.

    `least` are the plan's own counts: the guard deepens what is too noisy and never goes below the plan. `forward` and
    `backward` default to a backward pass of twice the forward's time in segments of equal time. `counts` are those of
    another rule, in place of `fewest`, with the learning `rate` over its peak if that rule depends on it.
    """
    shares = list(backward) if backward is not None else [2.0 / len(segments)] * len(segments)
    counts = tuple(counts) if counts else fewest(segments, batches, epsilon=guard.epsilon, least=least)
    return Decision(
        step=step,
        metric=metric,
        noise=tuple(s.noise_scale / sum(batches) for s in segments),
        before=tuple(before),
        counts=counts,
        progress=progress(segments, counts, batches),
        cost=cost(counts, batches, forward=forward, backward=shares),
        workers=len(batches),
        fewer=fewer_workers(segments, counts, batches, forward=forward, backward=shares),
        rate=rate,
    )

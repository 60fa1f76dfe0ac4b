"""Which rank is slow, in which phase of an iteration and in which layer: arithmetic on times that ranks take alone.

A collective equalises the ranks: whoever is early waits inside it, so that iterations are equally long everywhere and
timers around backward show nothing. What differs is the time that a rank spends itself before it waits: in its input,
in forward, between one gradient and the next, in handing gradients over. `find_slow` compares these times rank by rank.
A rank counts as slow in a phase if it takes longer than the others typically do, by more than chance and by more than
FLOOR of an iteration. Medians over the iterations leave single disturbed ones out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.core.network import FloatArray
from dovetail.core.timeline import LOST, Span, SpanKind, Timeline

from .rank_times import PHASES, WAITING, Column, Phase

KINDS: dict[Phase, SpanKind] = {
    "input": "idle",
    "forward": "forward",
    "backward": "backward",
    "network": "communication",
    "optimizer": "optimizer",
}
"""How phases are drawn."""
LINK = "(its link)"
"""Stands for the layer where a rank's network is slow."""
SLOW_LINK = 1.5
"""Factor by which a rank's links must be slower than the others' before they count as slow."""

LEAST = 4
"""Iterations, at least, from which ranks are compared."""
FLOOR = 0.03
"""Share of an iteration below which a rank does not count as slow: ranks that do the same differ by as much."""
ERROR = 0.05
"""Chance, at most, of naming any rank where all are equally fast."""
CORRELATED = 1.75
"""Factor on the standard error: disturbances last for several iterations, which are then not independent (a
correlation of one half between neighbours makes sqrt(3))."""
HOLDS = 0.6
"""Share of a phase's loss that must be in one layer, or in the layers below one module, for it to be named."""
STEADY = 0.5
"""Share of a loss that must be in the earlier and in the later half of the iterations: what comes and goes meanwhile is
other work of the machine."""
COSTS = 0.5
"""Share of a loss that must be left over all phases: who makes up for it elsewhere does not delay the others."""
NORMAL = 1.4826
"""Median absolute deviation of a normal distribution, inverted: standard deviations in one of them."""
MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for a normal distribution."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer than the others in one phase."""

    rank: int
    phase: Phase
    layer: str
    """The layer, or the module around several, that has most of it; "" where it is spread or not known."""
    seconds: float
    """What it takes longer than the others typically do, per iteration."""
    share: float
    """Of an iteration: 0.1 is 10 %."""
    confidence: float
    """One less the chance of seeing this in any phase of any rank if all ranks were equally fast."""

    @property
    def place(self) -> str:
        return f"{self.phase} ({self.layer.strip('()')})" if self.layer else self.phase

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: {milliseconds(self.seconds)} a step, in {self.place}"


@dataclass(frozen=True)
class RankTimes:
    """Where one rank's time goes in a typical iteration, in seconds."""

    rank: int
    phases: dict[Phase, float]
    waiting: float
    """Waiting for other ranks, and for communication."""


@dataclass(frozen=True)
class RankComparison:
    """The ranks of a group beside each other."""

    iteration: float
    """A typical iteration, in seconds."""
    iterations: int
    """Watched iterations that this is from."""
    ranks: tuple[RankTimes, ...] = ()
    slow: tuple[SlowRank, ...] = field(default=())
    """The slowest first; empty if no rank is slower than the others."""

    def lines(self) -> list[str]:
        """For `explain()`, without margins."""
        if not self.ranks:
            return []
        if not self.slow:
            return [f"no rank is slow: none loses {FLOOR:.0%} of a step to the others"]
        return [f"{found}; {found.share:.0%} of a step" for found in self.slow]

    def timeline(self, *, name: str = "ranks") -> Timeline:
        """A typical iteration of every rank, phase after phase, with what slow ranks lose apart; to store and view."""
        spans = []
        for times in self.ranks:
            track, at = f"rank {times.rank}/compute", 0.0
            for phase, seconds in times.phases.items():
                lost = next((f for f in self.slow if (f.rank, f.phase) == (times.rank, phase)), None)
                extra = min(seconds, lost.seconds) if lost else 0.0
                for what, length in ((phase, seconds - extra), (f"{LOST}{lost.place if lost else phase}", extra)):
                    if length > 0:
                        spans.append(Span(track=track, name=what, kind=KINDS[phase], start=at, stop=at + length))
                        at += length
            spans.append(Span(track=track, name=WAITING, kind="wait", start=at, stop=at + times.waiting))
        return Timeline(name=name, source="measured", spans=tuple(spans))


def compare(columns: Sequence[Column], times: FloatArray) -> RankComparison:
    """`times[rank, iteration, column]` in seconds, for all ranks of a group."""
    ranks, iterations, _ = times.shape
    iteration = float(np.median(times.sum(axis=2)))
    if ranks < 2 or iterations < LEAST:
        return RankComparison(iteration=iteration, iterations=iterations)
    spent = {phase: times[:, :, _of(columns, phase)].sum(axis=2) for phase in (*PHASES, WAITING)}
    typical = {phase: np.median(seconds, axis=1) for phase, seconds in spent.items()}
    return RankComparison(
        iteration=iteration,
        iterations=iterations,
        ranks=tuple(
            RankTimes(
                rank=rank,
                phases={phase: float(typical[phase][rank]) for phase in PHASES},
                waiting=float(typical[WAITING][rank]),
            )
            for rank in range(ranks)
        ),
        slow=find_slow(columns, times, iteration),
    )


def find_slow(columns: Sequence[Column], times: FloatArray, iteration: float) -> tuple[SlowRank, ...]:
    """The ranks that are slower than the others, the largest loss first; `times` as for `compare`.

    Each phase is looked at as a whole and layer by layer: on a busy machine what one layer loses can be certain where
    the sum of all varies too much.
    """
    own = [c for c, (phase, _) in enumerate(columns) if phase != WAITING]
    late = RankLoss.of(times[:, :, own].sum(axis=2))
    among = {phase: found for phase in PHASES if times[:, :, found := _of(columns, phase)].any()}
    tests = times.shape[0] * sum(1 + len(found) for found in among.values())
    slow = []
    for phase, found in among.items():
        whole, parts = RankLoss.of(times[:, :, found].sum(axis=2)), {c: RankLoss.of(times[:, :, c]) for c in found}
        for rank in range(times.shape[0]):
            loss, layer = whole, None
            if whole.chance(rank, tests) > ERROR or whole.lost[rank] < FLOOR * iteration:
                certain = {c: part.lost[rank] for c, part in parts.items() if part.chance(rank, tests) <= ERROR}
                if not certain:
                    continue
                most = max(certain, key=lambda c: certain[c])
                loss, layer = parts[most], columns[most][1]
            lost = float(loss.lost[rank])
            made_up = late.lost[rank] + 2 * late.error[rank] < COSTS * lost
            if lost < FLOOR * iteration or loss.least[rank] < STEADY * lost or made_up:
                continue
            slow.append(
                SlowRank(
                    rank=rank,
                    phase=phase,
                    layer=_layer(columns, times, phase, rank, lost) if layer is None else layer,
                    seconds=lost,
                    share=lost / iteration,
                    confidence=1 - loss.chance(rank, tests),
                )
            )
    return tuple(sorted(slow, key=lambda f: -f.seconds))


@dataclass(frozen=True)
class RankLoss:
    """By how much each rank takes longer than the others in something, in seconds."""

    lost: FloatArray
    """The median over the iterations."""
    least: FloatArray
    """That of the earlier half of the iterations or that of the later, whichever is less."""
    error: FloatArray
    """Standard error of `lost`."""

    @classmethod
    def of(cls, seconds: FloatArray) -> RankLoss:
        """From `seconds[rank, iteration]`."""
        differences = behind(seconds)
        halves = np.array_split(differences, 2, axis=1)
        return cls(
            lost=np.median(differences, axis=1),
            least=np.min([np.median(half, axis=1) for half in halves], axis=0),
            error=CORRELATED * standard_error(seconds, differences),
        )

    def chance(self, rank: int, tests: int) -> float:
        """Chance of such a loss, or a larger one, in any of so many tests if all ranks were equally fast."""
        lost, error = float(self.lost[rank]), float(self.error[rank])
        if lost <= 0:
            return 1.0
        return min(1.0, tests * math.erfc(lost / error / math.sqrt(2)) / 2) if error > 0 else 0.0


def slow_links(
    comparison: RankComparison, seconds: Sequence[float], probe: int, gradients: int
) -> tuple[SlowRank, ...]:
    """The ranks whose links are slow: `seconds` is what `probe` bytes take on the better link of each.

    A ring carries 2 (n − 1) / n of the gradients' bytes over every link. What a slow link adds can hide behind
    computing: it costs no more than the least that any rank waits, which is for communication and not for a rank.
    """
    ranks, found = len(seconds), []
    exposed = min((r.waiting for r in comparison.ranks), default=0.0)
    for rank in range(ranks):
        others = float(np.median([t for r, t in enumerate(seconds) if r != rank]))
        added = (seconds[rank] - others) / probe * 2 * (ranks - 1) / ranks * gradients
        lost = min(added, exposed)
        if seconds[rank] > SLOW_LINK * others and lost >= FLOOR * comparison.iteration:
            found.append(
                SlowRank(
                    rank=rank,
                    phase="network",
                    layer=LINK,
                    seconds=lost,
                    share=lost / comparison.iteration,
                    confidence=1 - ERROR,
                )
            )
    return tuple(found)


def behind(seconds: FloatArray) -> FloatArray:
    """For `seconds[rank, iteration]`: by how much each rank takes longer than the median of the others."""
    ranks = range(seconds.shape[0])
    return np.stack([seconds[r] - np.median(np.delete(seconds, r, axis=0), axis=0) for r in ranks])


def standard_error(seconds: FloatArray, differences: FloatArray) -> FloatArray:
    """Of the median of each rank's differences to the others, by the deviations of all ranks or its own.

    Ten iterations of one rank tell little of its noise, those of all ranks more; but one rank may be noisier.
    """
    ranks, iterations = seconds.shape
    own = seconds - np.median(seconds, axis=1, keepdims=True)
    pooled = NORMAL * float(np.median(np.abs(own))) * math.sqrt(1 + 1 / (ranks - 1))
    alone = differences - np.median(differences, axis=1, keepdims=True)
    single = NORMAL * np.median(np.abs(alone), axis=1)
    return np.asarray(MEDIAN * np.maximum(pooled, single) / math.sqrt(iterations - 1), dtype=np.float64)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _of(columns: Sequence[Column], phase: str) -> list[int]:
    return [c for c, (p, _) in enumerate(columns) if p == phase]


def _layer(columns: Sequence[Column], times: FloatArray, phase: Phase, rank: int, whole: float) -> str:
    """The innermost module that has most of what a rank loses in a phase; "" if only the whole model has."""
    among = [(c, layer) for c, (p, layer) in enumerate(columns) if p == phase and layer]
    name = ""
    while True:
        depth = len(name.split(".")) if name else 0
        parts = {
            ".".join(layer.split(".")[: depth + 1])
            for _, layer in among
            if layer != name and (not name or layer.startswith(f"{name}."))
        }
        lost = {
            part: float(
                np.median(
                    behind(times[:, :, [c for c, n in among if n == part or n.startswith(f"{part}.")]].sum(axis=2))[
                        rank
                    ]
                )
            )
            for part in parts
        }
        inner = max(lost, key=lambda part: lost[part], default="")
        if not inner or lost[inner] < HOLDS * whole:
            return name
        name = inner

"""Simulated iterations with a known slow rank, as stamps that the wrapper would take; see benchmarks/stragglers.py.

Every run draws a model, a number of ranks, and the rank, phase and layer that get a delay of a known share of an
iteration. Noise has four parts: every layer varies by itself; every rank has a speed that wanders slowly (a correlation
of one half from one iteration to the next); a rank is a little faster or slower for good; and now and then something
else on the machine takes a large part of an iteration away. All ranks end an iteration together, as collectives make
them: what is compared must come from the stamps before that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.train.rank_times import (
    GradientMark,
    LayerVisit,
    Phase,
    RankIteration,
    columns_of,
    rank_iteration,
    table_of,
)
from dovetail.train.stragglers import RankComparison, compare

DELAYED: tuple[Phase, ...] = ("input", "forward", "backward", "network")
WATCHED = 10
"""Iterations, as the wrapper watches by default."""


@dataclass(frozen=True)
class StudyNoise:
    """Standard deviations and chances, as shares of what they disturb."""

    layer: float = 0.05
    """Of one layer, from iteration to iteration."""
    rank: float = 0.02
    """Of a rank's speed, which wanders."""
    lasting: float = 0.01
    """Of a rank's speed, for good."""
    burst: float = 0.05
    """Chance that something else disturbs an iteration of a rank, by up to 60 % of an iteration."""


@dataclass(frozen=True)
class InjectedDelay:
    """A delay at a known place, as a share of an iteration without it."""

    rank: int
    phase: Phase
    layer: str
    share: float


@dataclass(frozen=True)
class StudyModel:
    """Layers in the order of forward, with what they take; seconds."""

    layers: tuple[str, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input: float
    handing: float
    """For one layer's gradients."""

    @property
    def iteration(self) -> float:
        return self.input + sum(self.forward) + sum(self.backward) + self.handing * len(self.layers)


def drawn_model(rng: np.random.Generator) -> StudyModel:
    stages, blocks = int(rng.integers(2, 5)), int(rng.integers(1, 6))
    layers = ["stem", *(f"layer{s}.{b}.conv{c}" for s in range(stages) for b in range(blocks) for c in (1, 2)), "fc"]
    forward = 2e-3 * rng.lognormal(0, 0.5, len(layers))
    return StudyModel(
        layers=tuple(layers),
        forward=tuple(forward.tolist()),
        backward=tuple((forward * rng.uniform(1.5, 2.5, len(layers))).tolist()),
        input=float(rng.uniform(0.02, 0.3) * 3 * forward.sum()),
        handing=2e-5,
    )


def drawn_delay(rng: np.random.Generator, model: StudyModel, ranks: int, phase: Phase, share: float) -> InjectedDelay:
    layer = str(rng.choice(model.layers)) if phase in ("forward", "backward") else ""
    return InjectedDelay(rank=int(rng.integers(ranks)), phase=phase, layer=layer, share=share)


def simulated(
    rng: np.random.Generator, model: StudyModel, ranks: int, noise: StudyNoise, delay: InjectedDelay | None
) -> RankComparison:
    """What the wrapper would report after a run."""
    lasting = 1 + noise.lasting * rng.standard_normal(ranks)
    wandering = noise.rank * rng.standard_normal(ranks)
    seen: list[list[RankIteration]] = [[] for _ in range(ranks)]
    for _ in range(WATCHED):
        wandering = 0.5 * wandering + np.sqrt(0.75) * noise.rank * rng.standard_normal(ranks)
        speed = np.maximum(0.2, lasting + wandering)
        stamps = [
            _stamps(rng, model, float(speed[r]), noise, delay if delay and delay.rank == r else None)
            for r in range(ranks)
        ]
        end = max(computed for *_, computed in stamps) + 0.05 * model.iteration
        for rank, (visits, marks, began, forwarded, computed) in enumerate(stamps):
            seen[rank].append(
                rank_iteration(
                    visits, marks, previous=0.0, began=began, forwarded=forwarded, computed=computed, ended=end
                )
            )
    columns = columns_of(seen[0])
    return compare(columns, np.asarray([table_of(mine, columns) for mine in seen]))


def named_right(found: RankComparison, delay: InjectedDelay) -> bool:
    """Whether the largest loss that is named is the delay."""
    if not found.slow:
        return False
    first = found.slow[0]
    return (first.rank, first.phase, first.layer) == (delay.rank, delay.phase, delay.layer)


def _stamps(
    rng: np.random.Generator, model: StudyModel, speed: float, noise: StudyNoise, delay: InjectedDelay | None
) -> tuple[list[LayerVisit], list[GradientMark], float, float, float]:
    """One rank's iteration: (visits, marks, start of forward, its end, end of backward)."""
    count = len(model.layers)
    extra = {(delay.phase, delay.layer): delay.share * model.iteration} if delay else {}
    if rng.random() < noise.burst:
        at = int(rng.integers(2 * count + 1))
        where: tuple[Phase, str] = (
            ("input", "") if at == 2 * count else ("forward" if at < count else "backward", model.layers[at % count])
        )
        extra[where] = extra.get(where, 0.0) + float(rng.uniform(0.1, 0.6)) * model.iteration

    def takes(seconds: float, phase: Phase, layer: str) -> float:
        varied = seconds * speed * float(rng.lognormal(0, noise.layer))
        return varied + extra.get((phase, layer), 0.0)

    now = began = takes(model.input, "input", "")
    visits: list[LayerVisit] = [("", True, now)]
    for layer, seconds in zip(model.layers, model.forward, strict=True):
        visits.append((layer, True, now))
        now += takes(seconds, "forward", layer)
        visits.append((layer, False, now))
    visits.append(("", False, now))
    forwarded = now
    now += 1e-4 * speed  # the loss
    marks: list[GradientMark] = []
    handed_late = int(rng.integers(count))
    for k, (layer, seconds) in enumerate(reversed(list(zip(model.layers, model.backward, strict=True)))):
        marks.append(("output", layer, now))
        now += takes(seconds, "backward", layer)
        marks.append(("ready", layer, now))
        now += takes(model.handing, "network", "" if k == handed_late else "elsewhere")
        marks.append(("handed", layer, now))
    return visits, marks, began, forwarded, now

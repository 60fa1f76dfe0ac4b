"""How fast jobs run that share devices: the bridge from the task level to the fluid level.

Jobs that share a device, directly or through others, form a group. The rates of a group are measured by playing it at
the task level for some iterations, and remembered: the next group of the same pattern costs nothing. A job alone on
its devices needs no play: its iteration takes the expected maximum of its tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from dovetail.core.job import Shape
from dovetail.planning.priority import Order, Standing
from dovetail.planning.schedulers import Policy

from .tasks import Costs, TaskEngine


@dataclass(frozen=True)
class Effort:
    """How long a group is played, in iterations of its slowest job."""

    warm: int
    measured: int
    tasks: int
    """Enough: with so many of them a large group's measurement may end early, but not before LEAST iterations."""


CAREFUL, QUICK = Effort(4, 40, 1000), Effort(2, 8, 300)
LEAST = 4
FEW = 100
"""Rates of one simulation that are measured carefully. Where there are few, one of them may decide which job ends
last, and eight iterations leave errors of several per cent in it; where there are many, errors cancel out."""

Pattern = tuple[tuple[int, int], ...]
"""One device's residents, by (place in the group's ranking, place of the device among the job's)."""


@lru_cache(maxsize=100_000)
def alone(shape: Shape, jitter: float) -> float:
    """Expected seconds of an iteration on devices of its own, one for each worker."""
    if not jitter:
        return shape.period
    return sum(_expected_maximum(stage, jitter) for stage in shape.tasks) + shape.off_device


def _expected_maximum(tasks: tuple[float, ...], jitter: float) -> float:
    """Of independent tasks with durations t·max(0.3, N(1, jitter)): ∫ (1 − Π F_i(x)) dx from 0."""
    longest = max(tasks)
    low, high = max(0.3, 1 - 6 * jitter) * longest, (1 + 6 * jitter) * longest
    # Tasks that cannot reach `low` do not matter.
    near = [t for t in tasks if t * (1 + 6 * jitter) > low]
    if len(near) == 1:
        return longest
    steps = 200
    width = (high - low) / steps
    total = low
    for i in range(steps):
        x = low + (i + 0.5) * width
        below = 1.0
        for t in near:
            below *= 0.5 * (1 + math.erf((x / t - 1) / (jitter * math.sqrt(2))))
        total += (1 - below) * width
    return total


@lru_cache(maxsize=50_000)
def together(
    shapes: tuple[Shape, ...],
    background: tuple[bool, ...],
    patterns: tuple[Pattern, ...],
    policy: Policy,
    costs: Costs,
    effort: Effort,
) -> tuple[float, ...]:
    """Progress per second of every job of a group, best rank first, its devices given by who resides on each.

    Under least attained service all are taken to have attained the same, so that the rates are fair shares; every
    other order is the order in which the jobs are given.
    """
    order: Order = "las" if policy.order == "las" else "fifo"
    engine = TaskEngine(len(patterns), replace(policy, order=order), replace(costs, seed=1))
    places: list[dict[int, int]] = [{} for _ in shapes]
    for device, pattern in enumerate(patterns):
        for member, place in pattern:
            places[member][place] = device
    standings = []
    for i, shape in enumerate(shapes):
        standing = Standing(serial=i, arrival=float(i), total=math.inf, shape=shape, background=background[i])
        devices = [places[i][p] for p in sorted(places[i])]
        engine.start(standing, shape, devices, until=math.inf)
        standings.append(standing)
    # A job with fewer devices than workers takes turns with itself.
    slowest = max(shape.period * math.ceil(shape.width / len(places[i])) for i, shape in enumerate(shapes))
    engine.run(effort.warm * slowest)
    first = [(s.done, engine.active[i].since) for i, s in enumerate(standings)]
    for round in range(1, effort.measured + 1):
        engine.run((effort.warm + round) * slowest)
        if engine.tasks > effort.tasks and round >= LEAST:
            break
    rates = []
    for i, s in enumerate(standings):
        done, since = s.done - first[i][0], engine.active[i].since - first[i][1]
        rates.append(done / since if done else 0.0)
    return tuple(rates)

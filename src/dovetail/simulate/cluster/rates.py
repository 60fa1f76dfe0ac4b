"""How fast jobs run that share devices: the bridge from the task level to the fluid level.

Jobs that share a device, directly or through others, form a group. The rates of a group are measured by playing it at
the task level for some iterations, and remembered: the next group of the same pattern costs nothing. A play can be
taken up again where it stopped, so that a group which stays together is played longer. A job alone on its devices
needs no play: its iteration takes the expected maximum of its tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from dovetail.core.job import Shape
from dovetail.planning.sharing.policies import Policy
from dovetail.planning.sharing.priority import Standing

from .tasks import Costs, TaskEngine

WARM, ROUNDS, LEAST = 2, 8, 4
"""Iterations of a group's slowest job: before the measurement, in the first measurement, and in one cut short."""
ENOUGH = 300
"""Tasks after which the first measurement of a large group is cut short."""
FAR = 1e9
"""Between jobs that do not tie, in the figure by which they are ranked: no play is so long that they would meet."""

Pattern = tuple[tuple[int, int], ...]
"""One device's residents, by (place in the group's ranking, place of the device among the job's)."""


class Group(NamedTuple):
    """Jobs that share devices, best rank first."""

    shapes: tuple[Shape, ...]
    background: tuple[bool, ...]
    ties: tuple[int, ...]
    """Jobs with the same number overtake each other as they run; empty where the ranking stays as it is."""
    devices: tuple[Pattern, ...]


class Measured(NamedTuple):
    """What a play has shown so far."""

    rates: tuple[float, ...]
    """Progress per second of every job of the group."""
    seconds: float
    """For which the group was played."""
    tasks: int


class Play:
    """A group at the task level: what it shows after a while and, asked again, after twice as long."""

    def __init__(self, measurements: Iterator[Measured]) -> None:
        self._seen: list[Measured] = []
        self._next = measurements

    def after(self, doublings: int) -> Measured:
        while len(self._seen) <= doublings:
            self._seen.append(next(self._next))
        return self._seen[doublings]


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


@lru_cache(maxsize=20_000)
def together(group: Group, policy: Policy, costs: Costs) -> Play:
    """The play of a group. Groups of other patterns and other seeds meet other jitter."""
    return Play(_measurements(group, policy, costs))


def _measurements(group: Group, policy: Policy, costs: Costs) -> Iterator[Measured]:
    engine, standings, slowest = _staged(group, policy, costs)
    engine.run(WARM * slowest)
    first = [(s.done, engine.active[i].since) for i, s in enumerate(standings)]
    played, rounds, least, enough = 0, ROUNDS, LEAST, ENOUGH
    while True:
        while played < rounds and (played < least or engine.tasks <= enough):
            played += 1
            engine.run((WARM + played) * slowest)
        rates = [pace(s.done - done, s.shape.progress, engine.active[i].since - since, engine.now - since)
                 for i, (s, (done, since)) in enumerate(zip(standings, first, strict=True))]  # fmt: skip
        yield Measured(tuple(rates), (WARM + played) * slowest, engine.tasks)
        rounds, least, enough = 2 * rounds, 2 * least, 2 * enough


def pace(done: float, one: float, boundary: float, now: float) -> float:
    """Progress per second of a job that made so much of it, `one` per iteration, in the seconds to its last boundary.

    The iteration under way has not ended `now`: who ran for a while and then found no more gaps is slower than that.
    """
    return min(done / boundary, (done + one) / now) if done else 0.0


def _staged(group: Group, policy: Policy, costs: Costs) -> tuple[TaskEngine, list[Standing], float]:
    """The group on devices of its own, and its slowest job's period.

    Its jobs come one after another, the best ranked first, those that tie together: by the time the next one comes
    those before it are in step. If all began at once, the last would find gaps that close soon, each time that the
    group changes.
    """
    rules = policy.rules
    if rules.guard == "background" and not any(group.background):
        rules = replace(rules, guard="off")  # nobody to guard against: cheaper
    policy = replace(policy, rules=rules, order=policy.order if group.ties else "fifo")
    # Where in the list of jitter to begin: numbers hash to the same in every process.
    drawn = hash((tuple([(shape.work, shape.period) for shape in group.shapes]), group[1:]))
    engine = TaskEngine(len(group.devices), policy, costs, drawn=drawn)
    places: list[dict[int, int]] = [{} for _ in group.shapes]
    for device, pattern in enumerate(group.devices):
        for member, place in pattern:
            places[member][place] = device
    # A job with fewer devices than workers takes turns with itself.
    slowest = max(shape.period * math.ceil(shape.width / len(places[i])) for i, shape in enumerate(group.shapes))
    standings = []
    for i, shape in enumerate(group.shapes):
        s = Standing(serial=i, arrival=float(i), total=math.inf, shape=shape, background=group.background[i])
        if group.ties:
            # Least attained service first, or the longest critical path.
            s.attained = FAR * group.ties[i]
            s.total = FAR * (len(group.ties) - group.ties[i]) * shape.progress / shape.period
        late = (group.ties[i] if group.ties else i) / len(group.shapes) * WARM * slowest
        engine.start(s, shape, [places[i][p] for p in sorted(places[i])], until=math.inf, delay=late)
        engine.active[i].since = late
        standings.append(s)
    return engine, standings, slowest

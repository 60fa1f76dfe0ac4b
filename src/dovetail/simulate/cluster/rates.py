"""How fast jobs run that share devices: the bridge from the task level to the fluid level.

Jobs that share a device, directly or through others, form a group. The rates of a group are measured by simulating it
at the task level for some iterations, and cached: the next group of the same pattern costs nothing. Such a run can be
resumed where it stopped, so that a group which stays together is measured for longer. A job alone on its devices needs
no run: its iteration takes the expected maximum of its tasks.

Some orders change while the jobs run (`in_order`, `overtaken`). First come first served stays as it is. Under least
remaining work, a job that runs more overtakes once, and stays ahead. Under least attained service and under the longest
critical path, the first falls back by running until it meets the next; from then on the two take turns. Such jobs tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple

from dovetail.core.job import Shape
from dovetail.planning.sharing.policies import SchedulingPolicy
from dovetail.planning.sharing.priority import Order, Standing, precedence

from .tasks import Overheads, TaskEngine

WARM, ROUNDS, LEAST = 2, 8, 4
"""Iterations of a group's slowest job: before the measurement, in the first measurement, and in one cut short."""
ENOUGH = 300
"""Tasks after which the first measurement of a large group is cut short."""
FAR = 1e9
"""Distance of jobs that do not tie, in the figure by which they are ordered: no run is so long that they meet."""
CHANGING: frozenset[Order] = frozenset({"srpt", "las", "cp"})
TIED: frozenset[Order] = frozenset({"las", "cp"})
CLOSE = 2
"""Jobs tie that are at most so many iterations apart in the figure by which they are ordered."""

Pattern = tuple[tuple[int, int], ...]
"""The residents of one device: (index of the job in the group, index of the device among the job's)."""


class SharingGroup(NamedTuple):
    """Jobs that share devices, in order of precedence."""

    shapes: tuple[Shape, ...]
    background: tuple[bool, ...]
    ties: tuple[int, ...]
    """Jobs with the same number overtake each other as they run; empty where the order stays as it is."""
    devices: tuple[Pattern, ...]


class Measured(NamedTuple):
    """The rates of a group, as measured so far."""

    rates: tuple[float, ...]
    """Progress per second of every job of the group."""
    seconds: float
    """Simulated time that the measurement covers."""
    tasks: int


class GroupRun:
    """A group simulated at the task level: its rates after a while and, asked again, after twice as long."""

    def __init__(self, measurements: Iterator[Measured]) -> None:
        self._seen: list[Measured] = []
        self._next = measurements

    def after(self, doublings: int) -> Measured:
        while len(self._seen) <= doublings:
            self._seen.append(next(self._next))
        return self._seen[doublings]


@lru_cache(maxsize=100_000)
def alone(shape: Shape, jitter: float) -> float:
    """Expected seconds of a job's iteration on devices of its own, one for each worker."""
    if not jitter:
        return shape.period
    return sum(_expected_maximum(stage, jitter) for stage in shape.tasks) + shape.off_device


def _expected_maximum(tasks: tuple[float, ...], jitter: float) -> float:
    """Expected maximum of independent tasks with durations t·max(0.3, N(1, jitter)): ∫ (1 − Π F_i(x)) dx from 0."""
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
def together(group: SharingGroup, policy: SchedulingPolicy, overheads: Overheads) -> GroupRun:
    """The run of a group. Groups of other patterns, and other seeds, get other jitter."""
    return GroupRun(_measurements(group, policy, overheads))


def _measurements(group: SharingGroup, policy: SchedulingPolicy, overheads: Overheads) -> Iterator[Measured]:
    engine, standings, slowest = _staged(group, policy, overheads)
    engine.run(WARM * slowest)
    first = [(s.done, engine.active[i].since) for i, s in enumerate(standings)]
    done_rounds, rounds, least, enough = 0, ROUNDS, LEAST, ENOUGH
    while True:
        while done_rounds < rounds and (done_rounds < least or engine.tasks <= enough):
            done_rounds += 1
            engine.run((WARM + done_rounds) * slowest)
        rates = [pace(s.done - done, s.shape.progress, engine.active[i].since - since, engine.now - since)
                 for i, (s, (done, since)) in enumerate(zip(standings, first, strict=True))]  # fmt: skip
        yield Measured(tuple(rates), (WARM + done_rounds) * slowest, engine.tasks)
        rounds, least, enough = 2 * rounds, 2 * least, 2 * enough


def pace(done: float, one: float, boundary: float, now: float) -> float:
    """Progress per second of a job that has `done` so much, `one` per iteration, in the seconds to its last `boundary`.

    The iteration under way has not ended by `now`: a job that ran for a while and then finds no more gaps is as slow as
    that says.
    """
    return min(done / boundary, (done + one) / now) if done else 0.0


def _staged(
    group: SharingGroup, policy: SchedulingPolicy, overheads: Overheads
) -> tuple[TaskEngine, list[Standing], float]:
    """The group on devices of its own, and its slowest job's period.

    Its jobs start one after another, in order of precedence, those that tie together: when the next one starts, those
    before it run in a steady rhythm. If all began at once, the last would find gaps that close soon, each time that the
    group changes.
    """
    rules = policy.rules
    if rules.guard == "background" and not any(group.background):
        rules = replace(rules, guard="off")  # no background job: cheaper
    policy = replace(policy, rules=rules, order=policy.order if group.ties else "fifo")
    # Where in the list of jitter the run begins: hashes of numbers are the same in every process.
    drawn = hash((tuple([(shape.work, shape.period) for shape in group.shapes]), group[1:]))
    engine = TaskEngine(len(group.devices), policy, overheads, drawn=drawn)
    places: list[dict[int, int]] = [{} for _ in group.shapes]
    for device, pattern in enumerate(group.devices):
        for member, place in pattern:
            places[member][place] = device
    # Of a job with fewer devices than workers, several workers take turns on a device.
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


def in_order(order: Order, standings: Iterable[Standing]) -> tuple[list[Standing], tuple[int, ...]]:
    """The standings in order, and a number for each: jobs with the same number tie. No numbers where none can tie."""
    found = sorted(standings, key=lambda s: precedence(order, s))
    if order not in TIED:
        return found, ()
    numbers = [0]
    for a, b in pairwise(found):
        near = CLOSE * max(_change(order, a.shape), _change(order, b.shape))
        apart = a.background != b.background or precedence(order, b)[1] - precedence(order, a)[1] > near
        numbers.append(numbers[-1] + apart)
    # Jobs that tie are sorted by shape, so that equal groups compare equal.
    both = sorted(
        zip(numbers, found, strict=True), key=lambda x: (x[0], x[1].shape.tasks, x[1].shape.off_device, x[1].serial)
    )
    return [s for _, s in both], tuple(numbers)


def overtaken(
    order: Order,
    standings: Sequence[Standing],
    ties: Sequence[int],
    rates: Sequence[float],
    devices: Iterable[Sequence[int]],
) -> float:
    """Seconds until, on some device, a job catches up with one before it; infinite if none will.

    `devices` lists the residents of each, as indices of `standings`. At least an iteration of the slowest job: until
    then the change has no effect.
    """
    figures = [precedence(order, s)[1] for s in standings]
    slopes = [_change(order, s.shape) * rate / s.shape.progress for s, rate in zip(standings, rates, strict=True)]
    soonest = float("inf")
    for i, j in {pair for residents in devices for pair in combinations(residents, 2)}:
        if (ties and ties[i] == ties[j]) or standings[i].background != standings[j].background:
            continue
        if slopes[i] > slopes[j]:
            soonest = min(soonest, (figures[j] - figures[i]) / (slopes[i] - slopes[j]))
    return max(soonest, max(s.shape.period for s in standings))


def _change(order: Order, shape: Shape) -> float:
    """What one iteration adds to the figure by which the job is ordered."""
    return shape.period if order == "cp" else shape.work if order == "las" else -shape.work

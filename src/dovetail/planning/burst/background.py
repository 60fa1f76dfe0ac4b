"""The device-time that a burst plan leaves to background tasks, and plans that leave the most.

A device is idle while a layer runs on fewer devices than its number. A background task takes `task` seconds and does
not stop in between, so an idle gap is worth the whole tasks that fit: ⌊gap / task⌋ · task seconds, and nothing where it
is shorter than one. Iterations follow each other without a pause, so the last gap of one is the first of the next; a
device that a plan never uses is worth the whole iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error

from . import rules
from .cost import local_batch
from .planner import BurstPlanner

LIMITS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Amplifications from which the search for a plan with background work starts."""


@dataclass(frozen=True)
class Background:
    """What one iteration leaves to background tasks, in device-seconds."""

    idle: float
    useful: float
    """Device-seconds of gaps that whole background tasks fill."""
    iteration: float
    """Seconds."""

    @property
    def devices(self) -> float:
        """Average number of devices that background tasks get."""
        return self.useful / self.iteration if self.iteration else 0.0


def phases(planner: BurstPlanner, counts: Sequence[int]) -> list[tuple[float, int]]:
    """(seconds, devices) one after the other: forward, then backward, each with its re-sharding, then the gradients."""
    cost = planner.cost
    samples = local_batch(cost.batch, counts).tolist()
    into: list[list[float]] = [[] for _ in counts]
    for u, v in planner.edges:
        into[v].append(float(cost.reshard(u, counts[u], counts[v])) / 2)
    found: list[tuple[float, int]] = []
    for v, g in enumerate(counts):
        found += [*((seconds, g) for seconds in into[v]), (float(cost.forward(v, samples[v])), g)]
    for v, g in reversed(list(enumerate(counts))):
        backward = float(cost.compute(v, samples[v])) - float(cost.forward(v, samples[v]))
        found += [(backward, g), (float(cost.sync(v, g)), g), *((seconds, g) for seconds in into[v])]
    return found


def background(planner: BurstPlanner, counts: Sequence[int], *, task: float = 0.0) -> Background:
    """What the plan leaves; with `task` 0 every gap is worth its length."""
    check_task(task)
    spans = phases(planner, counts)
    iteration = sum(seconds for seconds, _ in spans)
    levels = sorted(set(counts))
    idle = useful = 0.0
    for low, high in zip(levels, [*levels[1:], planner.devices], strict=True):
        # Devices low .. high − 1 are busy exactly while more than `low` are.
        whole = low == levels[-1]
        gaps = [iteration] if whole else _gaps(spans, low)
        idle += (high - low) * sum(gaps)
        useful += (high - low) * sum(gap if whole else worth(gap, task) for gap in gaps)
    return Background(idle=idle, useful=useful, iteration=iteration)


def with_background(planner: BurstPlanner, *, task: float, iteration: float | None = None) -> BurstPlan:
    """The plan that leaves the most device-seconds per second to background tasks, within `iteration` seconds.

    Without `iteration` it is the plan with the most useful work in all: what one device would need for the foreground
    iteration, and what background tasks get, per second.

    Gaps are not a sum over layers, so this one is a search: it starts from points of the front and from data
    parallelism, and gives a run of layers another device count as long as that helps.
    """
    limit = math.inf if iteration is None else iteration * (1 + 1e-9)

    def worth(counts: Sequence[int]) -> float:
        left = background(planner, counts, task=task)
        if left.iteration > limit:
            return -math.inf
        return left.devices + (planner.one_device / left.iteration if iteration is None and left.iteration else 0.0)

    starts = [p.counts for p in [*planner.tradeoff(LIMITS), *rules.data_parallel(planner)]]
    if iteration is not None:
        starts.append(planner.cheapest(iteration=iteration).counts)
    best = max(starts, key=worth)
    choices = sorted({g for counts in starts for g in counts})
    while True:
        tries = [(worth(counts), counts) for counts in _neighbours(best, choices)]
        value, found = max(tries, key=lambda pair: pair[0], default=(-math.inf, best))
        if value <= worth(best) * (1 + 1e-12):
            return planner.predict(best, policy="background")
        best = found


def check_task(task: float) -> None:
    if not 0 <= task < math.inf:
        raise Error(f"task: expected at least 0 and finite seconds, got {task:g}")


def worth(gap: float, task: float) -> float:
    """Seconds of a gap that whole tasks fill; rounding must not lose the last one."""
    tasks = gap / task * (1 + 1e-12) if task else math.inf
    return math.floor(tasks) * task if tasks < math.inf else gap  # tasks that short fill every gap


def _gaps(spans: Sequence[tuple[float, int]], device: int) -> list[float]:
    """Lengths of the times in which a device has nothing to do, around the end of the iteration too."""
    found: list[float] = []
    last_busy = True
    for seconds, devices in spans:
        busy = devices > device
        if not busy:
            if last_busy:
                found.append(0.0)
            found[-1] += seconds
        last_busy = busy
    if len(found) > 1 and spans[0][1] <= device and spans[-1][1] <= device:
        found[0] += found.pop()
    return found


def _neighbours(counts: tuple[int, ...], choices: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Plans in which one layer, or one run of layers with the same count, has another count."""
    runs = [(i, i + 1) for i in range(len(counts))]
    start = 0
    for i in range(1, len(counts) + 1):
        if i == len(counts) or counts[i] != counts[start]:
            if i - start > 1:
                runs.append((start, i))
            start = i
    for first, stop in runs:
        for g in choices:
            if g != counts[first]:
                yield (*counts[:first], *[g] * (stop - first), *counts[stop:])

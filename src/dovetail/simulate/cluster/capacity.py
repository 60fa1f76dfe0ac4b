"""Capacity: the largest load that a policy carries with a bounded queue, by bisection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dovetail.core.job import Job
from dovetail.planning.sharing.pack import Cluster
from dovetail.planning.sharing.policies import Policy

from .report import report
from .run import simulate
from .tasks import Costs
from .workload import sample

LOWEST, HIGHEST = 0.01, 64.0
"""Loads beyond which nothing is tried."""


@dataclass(frozen=True)
class Capacity:
    """In units of devices full of gangs with full backpropagation."""

    policy: str
    load: float
    tried: tuple[tuple[float, float], ...]
    """(load, drift) of every run."""


def capacity(
    jobs: Sequence[Job],
    cluster: Cluster,
    policy: Policy,
    *,
    depths: Literal["full", "ladder", "late"] = "full",
    count: int = 600,
    seed: int = 0,
    low: float = 0.4,
    high: float = 2.2,
    steps: int = 7,
    costs: Costs = Costs(),
) -> Capacity:
    """Bisects between a load that is carried and one that is not, on samples of the jobs.

    `low` and `high` are tried first, and moved by factors of two until they are such loads.
    """
    tried = []

    def carried(load: float) -> bool:
        batch = [j.with_depths(depths) for j in sample(jobs, cluster.devices, load, count=count, seed=seed)]
        found = report(simulate(batch, cluster, policy, level="fluid", costs=costs))
        tried.append((load, found.drift))
        return found.bounded

    if carried(high):
        while high < HIGHEST:
            low, high = high, 2 * high
            if not carried(high):
                break
    else:
        while low > LOWEST and not carried(low):
            low, high = low / 2, low
    for _ in range(steps):
        middle = (low * high) ** 0.5
        if carried(middle):
            low = middle
        else:
            high = middle
    return Capacity(policy.name, (low * high) ** 0.5, tuple(tried))

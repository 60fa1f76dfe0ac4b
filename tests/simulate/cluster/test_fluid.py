"""The fluid level against the task level."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import EXACT, Overheads, simulate
from dovetail.simulate.cluster.rates import alone
from dovetail.simulate.cluster.run import Level

from .cluster_jobs import mix

CLUSTER = ClusterSize(devices=32)
LEVELS: tuple[Level, Level] = ("task", "fluid")


@pytest.mark.parametrize("load", [0.0, 0.9])
@pytest.mark.parametrize(
    "name", ["jigsaw", "jigsaw-srpt", "jigsaw-las", "gang-fifo-backfill", "gang-srsf", "tiresias-las"]
)
def test_the_levels_agree_within_five_percent(name: str, load: float) -> None:
    """Every mix: mean completion and makespan, with jitter, switches, restarts and partial depths.

    Jitter may decide which job finds a whole node free, at both levels: means over the same seeds are compared.
    """
    for seed in range(2):
        jobs = [j.with_depths("ladder") for j in mix(40, seed, load=load, iterations=0.7)]
        arrival = np.array([j.arrival for j in jobs])
        tasks, fluid = (
            [
                simulate(jobs, CLUSTER, policy(name), level=level, overheads=Overheads(seed=seed + 100 * i)).finish
                for i in range(3)
            ]
            for level in LEVELS
        )
        assert np.mean([f.max() for f in fluid]) == pytest.approx(np.mean([f.max() for f in tasks]), rel=0.05)
        assert np.mean(fluid - arrival) == pytest.approx(np.mean(tasks - arrival), rel=0.05)


@pytest.mark.parametrize("name", ["gang-fifo", "gang-fifo-backfill", "static-partition"])
def test_gangs_without_jitter_are_the_same_at_both_levels(name: str) -> None:
    jobs = mix(30, 5, load=0.9, iterations=0.5)
    task = simulate(jobs, CLUSTER, policy(name), level="task", overheads=EXACT)
    fluid = simulate(jobs, CLUSTER, policy(name), level="fluid", overheads=EXACT)
    assert fluid.finish == pytest.approx(task.finish)
    assert fluid.busy == pytest.approx(task.busy)


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_the_expected_period_is_what_the_task_level_shows(workers: int) -> None:
    job = Job(name="j", phases=(JobPhase(iterations=3000 // workers, workers=workers),), forward=1.0, off_device=0.2)
    outcome = simulate([job], CLUSTER, policy("jigsaw"), level="task", overheads=Overheads(jitter=0.08))
    assert outcome.makespan / job.iterations == pytest.approx(alone(job.shape(), 0.08), rel=0.01)


def test_long_jobs_cost_no_more_than_short_ones() -> None:
    """Ten million iterations are one event."""
    jobs = [
        Job(name=str(i), phases=(JobPhase(iterations=10**7, workers=2),), forward=0.3, off_device=0.05)
        for i in range(6)
    ]
    outcome = simulate(jobs, ClusterSize(devices=4), policy("jigsaw"), level="auto")
    assert outcome.level == "fluid"
    assert outcome.makespan > 6 * 2 / 4 * 0.3 * 10**7

"""The fluid level against the task level, and what reports and capacities say."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dovetail.core.errors import Error
from dovetail.core.job import Job, Phase
from dovetail.planning.sharing.pack import Cluster
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import EXACT, Costs, capacity, report, simulate
from dovetail.simulate.cluster.rates import alone
from dovetail.simulate.cluster.report import fairness
from dovetail.simulate.cluster.run import Level
from dovetail.simulate.cluster.study import contenders, study
from dovetail.simulate.cluster.workload import at_load, clipped, offered, sample

from .cluster_jobs import mix

CLUSTER = Cluster(devices=32)
LEVELS: tuple[Level, Level] = ("task", "fluid")


@pytest.mark.parametrize("load", [0.0, 0.9])
@pytest.mark.parametrize(
    "name", ["jigsaw", "jigsaw-srpt", "jigsaw-las", "gang-fifo-backfill", "gang-srsf", "tiresias-las"]
)
def test_the_levels_agree_within_five_percent(name: str, load: float) -> None:
    """Every mix: mean completion and makespan, with jitter, switches, restarts and partial depths.

    Jitter may decide who finds a whole node free, at both levels: means over the same seeds are held together.
    """
    for seed in range(2):
        jobs = [j.with_depths("ladder") for j in mix(40, seed, load=load, iterations=0.7)]
        arrival = np.array([j.arrival for j in jobs])
        tasks, fluid = (
            [
                simulate(jobs, CLUSTER, policy(name), level=level, costs=Costs(seed=seed + 100 * i)).finish
                for i in range(3)
            ]
            for level in LEVELS
        )
        assert np.mean([f.max() for f in fluid]) == pytest.approx(np.mean([f.max() for f in tasks]), rel=0.05)
        assert np.mean(fluid - arrival) == pytest.approx(np.mean(tasks - arrival), rel=0.05)


@pytest.mark.parametrize("name", ["gang-fifo", "gang-fifo-backfill", "static-partition"])
def test_gangs_without_jitter_are_the_same_at_both_levels(name: str) -> None:
    jobs = mix(30, 5, load=0.9, iterations=0.5)
    task = simulate(jobs, CLUSTER, policy(name), level="task", costs=EXACT)
    fluid = simulate(jobs, CLUSTER, policy(name), level="fluid", costs=EXACT)
    assert fluid.finish == pytest.approx(task.finish)
    assert fluid.busy == pytest.approx(task.busy)


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_the_expected_period_is_what_the_task_level_shows(workers: int) -> None:
    job = Job(name="j", phases=(Phase(iterations=3000 // workers, workers=workers),), forward=1.0, off_device=0.2)
    outcome = simulate([job], CLUSTER, policy("jigsaw"), level="task", costs=Costs(jitter=0.08))
    assert outcome.makespan / job.iterations == pytest.approx(alone(job.shape(), 0.08), rel=0.01)


def test_long_jobs_cost_no_more_than_short_ones() -> None:
    """Ten million iterations are one event."""
    jobs = [
        Job(name=str(i), phases=(Phase(iterations=10**7, workers=2),), forward=0.3, off_device=0.05) for i in range(6)
    ]
    outcome = simulate(jobs, Cluster(devices=4), policy("jigsaw"), level="auto")
    assert outcome.level == "fluid"
    assert outcome.makespan > 6 * 2 / 4 * 0.3 * 10**7


def test_a_report_counts_what_a_person_would_count() -> None:
    jobs = [
        Job(name="a", phases=(Phase(iterations=10, workers=1),), forward=1.0),
        Job(name="b", arrival=5.0, phases=(Phase(iterations=10, workers=1),), forward=0.5, off_device=0.5),
    ]
    r = report(simulate(jobs, Cluster(devices=1), policy("gang-fifo"), level="task", costs=EXACT))
    assert (r.makespan, r.all.mean, r.all.median, r.all.queueing) == pytest.approx((20.0, 12.5, 12.5, 2.5))
    assert r.busy == pytest.approx(15 / 20)
    assert r.bound.critical_path == pytest.approx(15.0) and r.bound.area == pytest.approx(15.0)
    assert r.load == pytest.approx(20 / 5)
    assert [g.name for g in r.groups] == ["all", "1 worker"]
    assert r.throughput == pytest.approx(1.0)
    together = [msgspec.structs.replace(j, arrival=0.0) for j in jobs]
    r = report(simulate(together, Cluster(devices=4), policy("gang-fifo"), level="task", costs=EXACT))
    assert r.throughput == pytest.approx(20 / (4 * 10)), "nobody waited"


def test_finish_time_fairness_is_one_on_an_equal_share() -> None:
    """Two jobs of one device each on one device in turns: both end when an equal share would have let them."""
    fair = fairness(np.array([0.0, 0.0]), np.array([20.0, 20.0]), np.array([10.0, 10.0]), np.array([1, 1]), 1)
    assert fair == pytest.approx([1.0, 1.0])
    unfair = fairness(np.array([0.0, 0.0]), np.array([10.0, 20.0]), np.array([10.0, 10.0]), np.array([1, 1]), 1)
    assert unfair == pytest.approx([0.5, 4 / 3])


def test_jitter_alone_is_not_unfair() -> None:
    jobs = mix(20, 0, iterations=0.3)
    r = report(simulate(jobs, Cluster(devices=256), policy("gang-fifo-backfill"), level="task"))
    assert r.all.slowdown > 1.01 and r.all.unfair == 0.0
    crowd = report(simulate(jobs, Cluster(devices=8), policy("gang-fifo"), level="task"))
    assert crowd.all.unfair > 0.2


def test_jigsaw_carries_more_than_gangs_and_gangs_no_more_than_one() -> None:
    jobs = mix(60, 0)
    gang = capacity(jobs, CLUSTER, policy("gang-fifo-backfill"), count=300, steps=4).load
    shared = capacity(jobs, CLUSTER, policy("jigsaw"), depths="ladder", count=300, steps=4).load
    assert 0.8 < gang < 1.1
    assert shared > 1.3 * gang


def test_capacity_is_found_beyond_where_it_is_looked_for() -> None:
    waits = [Job(name="j", phases=(Phase(iterations=100, workers=1),), forward=0.1, off_device=0.9)]
    four = capacity(waits, Cluster(devices=8), policy("jigsaw"), count=200, steps=3).load
    assert four > 2.5, "four residents on each device"
    one = capacity(waits, Cluster(devices=8), policy("gang-fifo"), count=200, steps=3, low=2.0, high=2.2).load
    assert one < 1.5


def test_a_window_without_arrivals_is_refused() -> None:
    jobs = [
        Job(name=n, arrival=at, phases=(Phase(iterations=1, workers=1),), forward=1.0)
        for n, at in (("first", 0.0), ("last", 100.0))
    ]
    with pytest.raises(Error, match=r"window 0.2..0.8: expected a part of the arrivals with jobs"):
        simulate(jobs, CLUSTER, policy("jigsaw"), window=(0.2, 0.8))


def test_loads_and_samples_are_what_they_are_called() -> None:
    jobs = mix(50, 1, load=0.5)
    assert offered(at_load(jobs, 32, 0.8), 32) == pytest.approx(0.8)
    drawn = sample(jobs, 32, 0.7, count=3000, seed=3)
    assert offered(drawn, 32) == pytest.approx(0.7, rel=0.1)
    assert [j.name for j in sample(jobs, 32, 0.7, count=5, seed=3)] == [
        j.name for j in sample(jobs, 32, 0.7, count=5, seed=3)
    ]
    assert max(j.workers for j in clipped(jobs, 4)) == 4
    with pytest.raises(Error, match="same time"):
        at_load(mix(3, 0), 32, 0.5)


def test_a_study_gives_everyone_the_same_jobs_and_shows_the_spread() -> None:
    who = contenders("jigsaw,gang-fifo-backfill,gang-fifo-backfill:ladder", spb="ladder")
    assert [c.name for c in who] == ["jigsaw:ladder", "gang-fifo-backfill", "gang-fifo-backfill:ladder"]
    cells = study(mix(30, 0, load=1.0), CLUSTER, who, loads=[0.5, 1.5], samples=2, count=40, level="fluid")
    assert [(c.contender.name, c.load) for c in cells][:2] == [("jigsaw:ladder", 0.5), ("gang-fifo-backfill", 0.5)]
    assert all(c.figure(lambda r: r.makespan).low < c.figure(lambda r: r.makespan).high for c in cells)
    assert cells[0].reports[0].all.jobs == cells[1].reports[0].all.jobs == 40
    for wrong in ("jigsaw:deep", "nobody", "jigsaw,jigsaw"):
        with pytest.raises(Error, match=r"expected|twice"):
            contenders(wrong)


def test_a_job_that_can_never_run_is_named() -> None:
    big = Job(name="big", phases=(Phase(iterations=1, workers=64),), forward=1.0)
    with pytest.raises(Error, match="'big' needs 64 devices, the cluster has 32"):
        simulate([big], CLUSTER, policy("jigsaw"))
    grows = Job(name="grows", phases=(Phase(iterations=1, workers=1), Phase(iterations=1, workers=64)), forward=1.0)
    with pytest.raises(Error, match="'grows' needs 64 devices"):
        simulate([grows], CLUSTER, policy("jigsaw"))
    heavy = replace(CLUSTER, device_bytes=10)
    job = Job(name="heavy", phases=(Phase(iterations=1, workers=1),), forward=1.0, persistent_bytes=11)
    with pytest.raises(Error, match="'heavy' needs 11 bytes"):
        simulate([job], heavy, policy("jigsaw"))
    assert math.isfinite(simulate([job], CLUSTER, policy("jigsaw")).makespan)

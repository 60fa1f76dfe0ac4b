"""Studies of several policies, workloads at a load, and capacity."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Error
from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import capacity
from dovetail.simulate.cluster.study import at_load, clipped, contenders, offered, sample, study

from .cluster_jobs import mix

CLUSTER = ClusterSize(devices=32)


def test_jigsaw_carries_more_than_gangs_and_gangs_no_more_than_one() -> None:
    jobs = mix(60, 0)
    gang = capacity(jobs, CLUSTER, policy("gang-fifo-backfill"), count=300, steps=4).load
    shared = capacity(jobs, CLUSTER, policy("jigsaw"), depths="ladder", count=300, steps=4).load
    assert 0.8 < gang < 1.1
    assert shared > 1.3 * gang


def test_capacity_is_found_outside_the_first_bounds_too() -> None:
    waits = [Job(name="j", phases=(JobPhase(iterations=100, workers=1),), forward=0.1, off_device=0.9)]
    four = capacity(waits, ClusterSize(devices=8), policy("jigsaw"), count=200, steps=3).load
    assert four > 2.5, "four residents on each device"
    one = capacity(waits, ClusterSize(devices=8), policy("gang-fifo"), count=200, steps=3, low=2.0, high=2.2).load
    assert one < 1.5


def test_workloads_have_the_load_asked_for_and_samples_depend_on_the_seed_alone() -> None:
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


def test_a_study_gives_every_policy_the_same_jobs_and_shows_the_spread() -> None:
    who = contenders("jigsaw,gang-fifo-backfill,gang-fifo-backfill:ladder", spb="ladder")
    assert [c.name for c in who] == ["jigsaw:ladder", "gang-fifo-backfill", "gang-fifo-backfill:ladder"]
    cells = study(mix(30, 0, load=1.0), CLUSTER, who, loads=[0.5, 1.5], samples=2, count=40, level="fluid")
    assert [(c.contender.name, c.load) for c in cells][:2] == [("jigsaw:ladder", 0.5), ("gang-fifo-backfill", 0.5)]
    assert all(c.figure(lambda r: r.makespan).low < c.figure(lambda r: r.makespan).high for c in cells)
    assert cells[0].reports[0].all.jobs == cells[1].reports[0].all.jobs == 40
    for wrong in ("jigsaw:deep", "nobody", "jigsaw,jigsaw"):
        with pytest.raises(Error, match=r"expected|twice"):
            contenders(wrong)

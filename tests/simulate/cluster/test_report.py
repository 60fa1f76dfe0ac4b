"""Reports: completion times, throughput and fairness as a person would count them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import EXACT, report, simulate
from dovetail.simulate.cluster.report import fairness

from .cluster_jobs import mix


def test_a_report_has_the_figures_of_a_calculation_by_hand() -> None:
    jobs = [
        Job(name="a", phases=(JobPhase(iterations=10, workers=1),), forward=1.0),
        Job(name="b", arrival=5.0, phases=(JobPhase(iterations=10, workers=1),), forward=0.5, off_device=0.5),
    ]
    r = report(simulate(jobs, ClusterSize(devices=1), policy("gang-fifo"), level="task", overheads=EXACT))
    assert (r.makespan, r.all.mean, r.all.median, r.all.queueing) == pytest.approx((20.0, 12.5, 12.5, 2.5))
    assert r.busy == pytest.approx(15 / 20)
    assert r.bound.critical_path == pytest.approx(15.0) and r.bound.area == pytest.approx(15.0)
    assert r.load == pytest.approx(20 / 5)
    assert [g.name for g in r.groups] == ["all", "1 worker"]
    assert r.throughput == pytest.approx(1.0)
    together = [msgspec.structs.replace(j, arrival=0.0) for j in jobs]
    r = report(simulate(together, ClusterSize(devices=4), policy("gang-fifo"), level="task", overheads=EXACT))
    assert r.throughput == pytest.approx(20 / (4 * 10)), "no job waited"


def test_finish_time_fairness_is_one_on_an_equal_share() -> None:
    """Two jobs of one device each on one device in turns: both end when an equal share would have let them."""
    fair = fairness(np.array([0.0, 0.0]), np.array([20.0, 20.0]), np.array([10.0, 10.0]), np.array([1, 1]), 1)
    assert fair == pytest.approx([1.0, 1.0])
    unfair = fairness(np.array([0.0, 0.0]), np.array([10.0, 20.0]), np.array([10.0, 10.0]), np.array([1, 1]), 1)
    assert unfair == pytest.approx([0.5, 4 / 3])


def test_jitter_alone_is_not_unfair() -> None:
    jobs = mix(20, 0, iterations=0.3)
    r = report(simulate(jobs, ClusterSize(devices=256), policy("gang-fifo-backfill"), level="task"))
    assert r.all.slowdown > 1.01 and r.all.unfair == 0.0
    crowd = report(simulate(jobs, ClusterSize(devices=8), policy("gang-fifo"), level="task"))
    assert crowd.all.unfair > 0.2

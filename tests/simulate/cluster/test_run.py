"""Simulating a list of jobs: what is refused, in one line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dovetail.core.errors import Error
from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import simulate

CLUSTER = ClusterSize(devices=32)


def test_a_window_without_arrivals_is_refused() -> None:
    jobs = [
        Job(name=n, arrival=at, phases=(JobPhase(iterations=1, workers=1),), forward=1.0)
        for n, at in (("first", 0.0), ("last", 100.0))
    ]
    with pytest.raises(Error, match=r"window 0.2..0.8: expected a part of the arrivals with jobs"):
        simulate(jobs, CLUSTER, policy("jigsaw"), window=(0.2, 0.8))


def test_a_job_that_can_never_run_is_named() -> None:
    big = Job(name="big", phases=(JobPhase(iterations=1, workers=64),), forward=1.0)
    with pytest.raises(Error, match="'big' needs 64 devices, the cluster has 32"):
        simulate([big], CLUSTER, policy("jigsaw"))
    grows = Job(
        name="grows", phases=(JobPhase(iterations=1, workers=1), JobPhase(iterations=1, workers=64)), forward=1.0
    )
    with pytest.raises(Error, match="'grows' needs 64 devices"):
        simulate([grows], CLUSTER, policy("jigsaw"))
    heavy = replace(CLUSTER, device_bytes=10)
    job = Job(name="heavy", phases=(JobPhase(iterations=1, workers=1),), forward=1.0, persistent_bytes=11)
    with pytest.raises(Error, match="'heavy' needs 11 bytes"):
        simulate([job], heavy, policy("jigsaw"))
    assert math.isfinite(simulate([job], CLUSTER, policy("jigsaw")).makespan)

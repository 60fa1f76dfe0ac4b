"""Small mixes in which one thing happens that both levels must see: an order that changes, a move, a long stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dovetail.core.job import Job, JobPhase, ladder
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import EXACT, Overheads, simulate
from dovetail.simulate.cluster.rates import SharingGroup, pace, together
from dovetail.simulate.cluster.run import Level

from .cluster_jobs import mix

LEVELS: tuple[Level, Level] = ("task", "fluid")


def one(
    name: str, iterations: int, *, workers: int = 1, on: float = 1.0, off: float = 0.0, arrival: float = 0.0
) -> Job:
    phase = JobPhase(iterations=iterations, workers=workers)
    return Job(name=name, phases=(phase,), forward=on, off_device=off, arrival=arrival)


NEWCOMER = [one("old", 300), one("new", 100, arrival=100.0)]
UNEQUAL = [one("long", 200), one("short", 100)]
OVERTAKES = [one("narrow", 300), one("wide", 120, workers=4)]
CROWD = [one(str(i), 60 + 40 * i, off=0.1, arrival=30.0 * i) for i in range(4)]


@pytest.mark.parametrize("name", ["jigsaw", "jigsaw-srpt", "jigsaw-las", "jigsaw-cp"])
@pytest.mark.parametrize("workload", [NEWCOMER, UNEQUAL, OVERTAKES, CROWD], ids=["new", "unequal", "wide", "crowd"])
def test_jobs_change_places_at_both_levels(name: str, workload: list[Job]) -> None:
    """The job with the least attained service goes first until it has caught up, the one with the longest path until
    its path is as short as the next one's; under least remaining work a job that runs more overtakes. Job by job."""
    devices = max(job.workers for job in workload)
    found = [
        simulate(workload, ClusterSize(devices=devices), policy(name, duty_cap=9), level=level, overheads=EXACT).finish
        for level in LEVELS
    ]
    assert found[1] == pytest.approx(found[0], rel=0.03)


def test_neighbours_have_a_device_to_themselves_while_weights_are_copied() -> None:
    """The job that moves slows a neighbour on its new device, but not before it is there."""
    jobs = [
        one("moves", 300, on=2.4, off=0.6),
        one("goes", 50, on=0.7, off=0.3, arrival=0.1),
        one("small", 200, on=0.2, off=0.8, arrival=0.2),
        one("stays", 900, arrival=0.3),
    ]
    overheads = replace(EXACT, move=40.0)
    found = [
        simulate(jobs, ClusterSize(devices=2), policy("jigsaw", duty_cap=2.0), level=level, overheads=overheads)
        for level in LEVELS
    ]
    assert any(len({d for k, devices, _, _ in o.leases for d in devices if k == 0}) == 2 for o in found), "it moved"
    assert found[1].finish == pytest.approx(found[0].finish, rel=0.01)


def test_jobs_of_one_device_never_run_more_than_it_can() -> None:
    """Once the first two run in a steady rhythm, the third finds no more gaps: what it ran before is not its rate."""
    narrow, wide = (
        Job(
            name="j",
            phases=(JobPhase(iterations=1, workers=w, depths=ladder(w)),),
            forward=0.055,
            backward=0.109,
            off_device=0.027,
        ).shape()
        for w in (1, 2)
    )
    group = SharingGroup((narrow, wide, narrow), (False,) * 3, (), (((0, 0), (1, 0), (2, 0)), ((1, 1),)))
    for seed in range(12):
        rates = together(group, policy("jigsaw"), Overheads(seed=seed)).after(3).rates
        assert (rates[0] + rates[2]) * narrow.work <= 0.9, "the second, of two devices, uses some of it too"
    assert pace(3, 1, 1.0, 40.0) == pytest.approx(4 / 40), "three iterations in a second, and then none"
    assert pace(8, 1, 4.0, 4.3) == pytest.approx(2.0), "the ninth is under way"
    assert pace(0, 1, 0.0, 9.0) == 0.0


def test_a_run_that_is_resumed_gives_the_rates_of_one_that_never_stopped() -> None:
    """Results depend on the jobs and the seed alone, not on what was simulated before."""
    shapes = (mix(1, 0)[0].shape(), mix(1, 1)[0].shape())
    devices = tuple(((0, i), (1, i)) for i in range(min(s.width for s in shapes)))
    group = SharingGroup(shapes, (False, False), (), devices)
    run = together.__wrapped__(group, policy("jigsaw"), Overheads())
    first = run.after(0)
    longer = run.after(3)
    assert run.after(0) == first
    assert longer == together.__wrapped__(group, policy("jigsaw"), Overheads()).after(3)
    assert longer.seconds > 5 * first.seconds and longer.tasks > 5 * first.tasks
    assert together.__wrapped__(group, policy("jigsaw"), Overheads(seed=1)).after(0).rates != first.rates


def test_seeds_of_jitter_reach_both_levels() -> None:
    jobs = [j.with_depths("ladder") for j in mix(20, 0, devices=16, iterations=0.3)]
    for level in LEVELS:
        ends = [
            simulate(jobs, ClusterSize(devices=16), policy("jigsaw"), level=level, overheads=Overheads(seed=s)).makespan
            for s in (1, 2, 1)
        ]
        assert ends[0] == ends[2] != ends[1]
        assert np.ptp(ends) < 0.1 * ends[0]

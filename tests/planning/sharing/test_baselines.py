"""The baselines: which jobs may pass the first in the queue under EASY, and how devices are divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.baselines import may_pass, part_of, partition, reserve
from dovetail.planning.sharing.pack import ClusterSize

RUNNING = st.lists(st.tuples(st.integers(1, 9).map(float), st.integers(1, 4)), min_size=1, max_size=5)


def free_at(time: float, free: int, running: list[tuple[float, int]]) -> int:
    return free + sum(devices for end, devices in running if end <= time)


@given(running=RUNNING, free=st.integers(0, 3), data=st.data())
def test_a_reservation_is_the_first_moment_with_enough_devices(
    running: list[tuple[float, int]], free: int, data: st.DataObject
) -> None:
    width = data.draw(st.integers(free + 1, free + sum(d for _, d in running)))
    found = reserve(width, free, running)
    moments = sorted({end for end, _ in running})
    assert found.time == next(t for t in moments if free_at(t, free, running) >= width)
    assert found.spare == free_at(found.time, free, running) - width


@given(running=RUNNING, free=st.integers(1, 4), data=st.data())
def test_whoever_may_pass_leaves_the_first_its_moment_and_nobody_else_does(
    running: list[tuple[float, int]], free: int, data: st.DataObject
) -> None:
    width = data.draw(st.integers(free + 1, free + sum(d for _, d in running)))
    held = reserve(width, free, running)
    mine, end = data.draw(st.integers(1, free)), float(data.draw(st.integers(1, 12)))
    after = reserve(width, free - mine, [*running, (end, mine)])
    assert may_pass(held, mine, end) == (after.time == held.time)


def test_a_static_partition_follows_the_work_and_fits_the_widest_job() -> None:
    def tenant(name: str, workers: int, iterations: int) -> Job:
        phase = JobPhase(iterations=iterations, workers=workers)
        return Job(name=name, phases=(phase,), forward=1.0, tenant=name)

    cluster = ClusterSize(devices=12, node=4)
    jobs = [tenant("small", 4, 1), tenant("large", 2, 100)]
    parts = partition(jobs, cluster)
    assert {name: int(mask.sum()) for name, mask in parts.items()} == {"tenant large": 8, "tenant small": 4}
    assert not (parts["tenant large"] & parts["tenant small"]).any()
    assert part_of(jobs[0], parts) == "tenant small"
    alike = [tenant("same", 1, 1), tenant("same", 3, 1)]
    assert set(partition(alike, cluster)) == {"one worker", "several workers"}
    with pytest.raises(Error, match="need 14 devices, the cluster has 12"):
        partition([tenant("a", 7, 1), tenant("b", 7, 1)], cluster)

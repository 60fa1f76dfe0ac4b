"""Placement on the cluster's devices: the simulator's rules, promised speed, nodes of different size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cluster.coordinator.job_state import ActiveJob, shape_now, shape_of
from dovetail.cluster.coordinator.placement import Placement, admissions, queue_key, to_prepare
from dovetail.cluster.coordinator.strikes import CLEAN
from dovetail.cluster.engines.base import ClusterDevice
from dovetail.cluster.job.submission import Options, Share
from dovetail.cluster.transport.messages import Described, Progress
from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing import pack
from dovetail.planning.sharing.policies import POLICIES
from dovetail.planning.sharing.priority import Standing

GIB = 2**30


def devices(*nodes: int, size: int = 16 * GIB) -> list[ClusterDevice]:
    found: list[ClusterDevice] = []
    for n, count in enumerate(nodes):
        found += [ClusterDevice(len(found) + i, f"node {n}", "emulated", size) for i in range(count)]
    return found


def active(
    number: int, workers: int = 1, *, share: Share = "normal", gang: int = 0, off: float = 0.0, persistent: int = 0,
    task: float = 1.0, most: int = 64,
) -> ActiveJob:  # fmt: skip
    described = None
    if not gang:
        described = Described(
            job=str(number), attempt=1, workers=workers, iterations=10, forward=task, off_device=off,
            persistent_bytes=persistent,
        )  # fmt: skip
    shape = shape_now(described, None, gang, most=most)
    standing = Standing(serial=number, arrival=float(number), total=10, shape=shape, background=share == "background")
    return ActiveJob(
        id=number, name=f"job-{number}", gang=gang, share=share, bound=0.05, options=Options(), submitted=float(number),
        state="queued" if gang else "preparing", attempt=1, iteration=0, loss=None, checkpoint=0, record=CLEAN,
        standing=standing, described=described, process=not gang, connected=not gang,
    )  # fmt: skip


def admit(placement: Placement, jobs: Sequence[ActiveJob], ready: Sequence[int] | None = None) -> list[int]:
    queue = sorted(jobs, key=lambda j: queue_key(placement.policy, j))
    everybody = set(placement.devices) if ready is None else set(ready)
    return [j.id for j in admissions(placement, queue, everybody, may={j.id for j in jobs})]


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 3.0), st.integers(0, 8)), max_size=20))
@settings(max_examples=60)
def test_on_equal_nodes_it_decides_what_the_simulator_decides(asked: list[tuple[int, float, int]]) -> None:
    placement = Placement(devices(4, 4), POLICIES["jigsaw"])
    books = pack.Devices(pack.ClusterSize(devices=8, node=4))
    for number, (workers, off, gib) in enumerate(asked, 1):
        job = active(number, workers, off=off, persistent=gib * GIB)
        shape = Job(
            name="x", phases=(JobPhase(iterations=10, workers=workers),), forward=1.0, off_device=off,
            persistent_bytes=gib * GIB,
        ).shape()  # fmt: skip
        expected = pack.admit(books, shape, placement.rules)
        assert admit(placement, [job]) == ([number] if expected is not None else [])
        if expected is not None:
            assert list(job.devices) == expected
            books.add(number, shape, expected)


@given(
    st.lists(
        st.tuples(st.sampled_from(("foreground", "normal", "background")), st.integers(0, 3), st.integers(1, 3)),
        max_size=25,
    )
)
@settings(max_examples=80)
def test_a_device_with_a_promised_job_takes_background_jobs_only_besides(asked: list[tuple[Share, int, int]]) -> None:
    placement = Placement(devices(4, 2), POLICIES["jigsaw"])
    jobs = {n: active(n, w, share=s, gang=g) for n, (s, g, w) in enumerate(asked, 1)}
    admit(placement, list(jobs.values()))
    for slot, residents in enumerate(placement.books.residents):
        firm = [jobs[k] for k in residents if not jobs[k].background]
        assert len(firm) <= 1 or not any(j.promised for j in firm), f"slot {slot}"
    for job in jobs.values():
        placement.release(job)
    assert not placement._regular.any() and not placement._promised.any()


def test_slots_that_pad_a_smaller_node_are_never_leased() -> None:
    placement = Placement(devices(3, 1), POLICIES["jigsaw"])
    jobs = [active(n) for n in range(1, 20)]
    admit(placement, jobs)
    assert {d for j in jobs for d in j.devices} == {0, 1, 2, 3}


def test_a_gang_policy_gives_every_job_devices_of_its_own_and_lets_others_pass() -> None:
    placement = Placement(devices(4), POLICIES["gang-fifo-backfill"])
    assert admit(placement, [active(1, 3), active(2, 2), active(3, 1), active(4, 1)]) == [1, 3]
    strict = Placement(devices(4), POLICIES["gang-fifo"])
    assert admit(strict, [active(1, 3), active(2, 2), active(3, 1)]) == [1]


def test_a_job_that_is_not_described_yet_is_passed_unless_the_order_is_strict() -> None:
    for name, expected in (("jigsaw", [2]), ("gang-fifo", [])):
        placement = Placement(devices(4), POLICIES[name])
        assert [j.id for j in admissions(placement, [active(1), active(2)], {0, 1, 2, 3}, may={2})] == expected


def test_devices_that_are_not_ready_get_no_job() -> None:
    placement = Placement(devices(4), POLICIES["jigsaw"])
    job = active(1, 2)
    assert admit(placement, [job], ready=[1, 3]) == [1]
    assert sorted(job.devices) == [1, 3]


def test_more_workers_than_devices_take_turns() -> None:
    shape = shape_of([1.0, 2.0, 3.0, 4.0], 0.5, 0, 0, most=2)
    assert shape.width == 2
    assert sorted(shape.tasks[0]) == [5.0, 5.0]
    assert shape.duty == pytest.approx(10 / (5.5 * 2))
    placement = Placement(devices(2), POLICIES["jigsaw"])
    assert admit(placement, [active(1, 8, most=2)]) == [1]


def test_a_lease_takes_the_measured_shape() -> None:
    job = active(1, 2, task=1.0)
    progress = Progress(
        job="1", attempt=1, iteration=5, loss=1.0, checkpoint=0, task_seconds=(0.2, 0.4), off_device=0.6
    )
    measured = shape_now(job.described, progress, 0, most=8)
    assert measured.duty == pytest.approx(0.6 / (1.0 * 2))
    placement = Placement(devices(2), POLICIES["jigsaw"])
    admit(placement, [job])
    assert placement.books.load.sum() == pytest.approx(2.0)
    assert placement.resize(job, measured)
    assert placement.books.load.sum() == pytest.approx(0.6)


def test_unknown_times_count_as_always_busy() -> None:
    described = Described(job="1", attempt=1, workers=3, iterations=10)
    assert shape_now(described, None, 0, most=8).duty == 1.0


def test_at_most_sixteen_are_prepared_ahead_in_order_of_rank() -> None:
    queue = [active(n) for n in range(1, 1001)]
    for job in queue:
        job.process = False
    assert [j.id for j in to_prepare(queue, now=0.0, most=16)] == list(range(1, 17))
    for job in queue[:10]:
        job.process = True
    queue[10].retry_at = 5.0
    assert [j.id for j in to_prepare(queue, now=0.0, most=16)] == [12, 13, 14, 15, 16, 17]
    assert to_prepare([active(1, gang=2)], now=0.0, most=16) == []  # nothing to load


def test_foreground_jobs_are_first_in_the_queue_and_background_jobs_last() -> None:
    jobs = [active(1, share="background"), active(2), active(3, share="foreground")]
    assert [j.id for j in sorted(jobs, key=lambda j: queue_key(POLICIES["jigsaw"], j))] == [3, 2, 1]


def test_a_crowded_job_moves_to_a_freed_device() -> None:
    placement = Placement(devices(2), POLICIES["jigsaw"])
    jobs = [active(n) for n in (1, 2, 3)]
    admit(placement, jobs)
    [single] = [j for j in jobs if len(placement.books.residents[placement.slot[j.devices[0]]]) == 1]
    assert placement.better(jobs, {0, 1}, now=99.0) is None
    placement.release(single)
    left = [j for j in jobs if j is not single]
    found = placement.better(left, {0, 1}, now=99.0)
    assert found is not None and found[1] == list(single.devices)
    assert placement.better(left, {0}, now=99.0) is None  # not while a device is lost

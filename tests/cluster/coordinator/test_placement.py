"""Placement on live devices: the simulator's rules, promises, nodes of different size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cluster.coordinator.job_state import Live, shape_now, shape_of
from dovetail.cluster.coordinator.placement import Floor, admissions, place, to_prepare
from dovetail.cluster.coordinator.strikes import CLEAN
from dovetail.cluster.coordinator.why import why
from dovetail.cluster.engines.base import Device
from dovetail.cluster.job.submission import Options, Share
from dovetail.cluster.transport.messages import Described, Progress
from dovetail.core.job import Job, Phase
from dovetail.planning.sharing import pack
from dovetail.planning.sharing.policies import POLICIES
from dovetail.planning.sharing.priority import Standing

GIB = 2**30


def devices(*nodes: int, size: int = 16 * GIB) -> list[Device]:
    found: list[Device] = []
    for n, count in enumerate(nodes):
        found += [Device(len(found) + i, f"node {n}", "emulated", size) for i in range(count)]
    return found


def live(
    number: int, workers: int = 1, *, share: Share = "normal", gang: int = 0, off: float = 0.0, persistent: int = 0,
    task: float = 1.0, most: int = 64,
) -> Live:  # fmt: skip
    described = None
    if not gang:
        described = Described(
            job=str(number), epoch=1, workers=workers, iterations=10, forward=task, off_device=off,
            persistent_bytes=persistent,
        )  # fmt: skip
    shape = shape_now(described, None, gang, most=most)
    standing = Standing(serial=number, arrival=float(number), total=10, shape=shape, background=share == "background")
    return Live(
        id=number, name=f"job-{number}", gang=gang, share=share, bound=0.05, options=Options(), submitted=float(number),
        state="queued" if gang else "preparing", epoch=1, iteration=0, loss=None, checkpoint=0, record=CLEAN,
        standing=standing, described=described, process=not gang, linked=not gang,
    )  # fmt: skip


def admit(floor: Floor, jobs: Sequence[Live], ready: Sequence[int] | None = None) -> list[int]:
    queue = sorted(jobs, key=lambda j: place(floor.policy, j))
    everybody = set(floor.devices) if ready is None else set(ready)
    return [j.id for j in admissions(floor, queue, everybody, may={j.id for j in jobs})]


def explain(floor: Floor, job: Live, queue: Sequence[Live] = (), jobs: Sequence[Live] = ()) -> str:
    found = why(
        job, {j.id: j for j in (*jobs, job)}, queue, floor, set(floor.devices), floor.policy, now=0.0, delay=None
    )
    return " | ".join(found["why"])


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 3.0), st.integers(0, 8)), max_size=20))
@settings(max_examples=60)
def test_on_equal_nodes_it_decides_what_the_simulator_decides(asked: list[tuple[int, float, int]]) -> None:
    floor = Floor(devices(4, 4), POLICIES["jigsaw"])
    books = pack.Devices(pack.Cluster(devices=8, node=4))
    for number, (workers, off, gib) in enumerate(asked, 1):
        job = live(number, workers, off=off, persistent=gib * GIB)
        shape = Job(
            name="x", phases=(Phase(iterations=10, workers=workers),), forward=1.0, off_device=off,
            persistent_bytes=gib * GIB,
        ).shape()  # fmt: skip
        expected = pack.admit(books, shape, floor.rules)
        assert admit(floor, [job]) == ([number] if expected is not None else [])
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
def test_beside_a_promise_there_is_only_background_work(asked: list[tuple[Share, int, int]]) -> None:
    floor = Floor(devices(4, 2), POLICIES["jigsaw"])
    jobs = {n: live(n, w, share=s, gang=g) for n, (s, g, w) in enumerate(asked, 1)}
    admit(floor, list(jobs.values()))
    for slot, residents in enumerate(floor.books.residents):
        firm = [jobs[k] for k in residents if not jobs[k].background]
        assert len(firm) <= 1 or not any(j.firm for j in firm), f"slot {slot}"
    for job in jobs.values():
        floor.free(job)
    assert not floor._firm.any() and not floor._closed.any()


def test_slots_that_pad_a_smaller_node_are_never_given() -> None:
    floor = Floor(devices(3, 1), POLICIES["jigsaw"])
    jobs = [live(n) for n in range(1, 20)]
    admit(floor, jobs)
    assert {d for j in jobs for d in j.devices} == {0, 1, 2, 3}


def test_a_gang_policy_gives_every_job_devices_of_its_own_and_lets_others_pass() -> None:
    floor = Floor(devices(4), POLICIES["gang-fifo-backfill"])
    assert admit(floor, [live(1, 3), live(2, 2), live(3, 1), live(4, 1)]) == [1, 3]
    strict = Floor(devices(4), POLICIES["gang-fifo"])
    assert admit(strict, [live(1, 3), live(2, 2), live(3, 1)]) == [1]


def test_a_job_that_is_not_described_yet_is_passed_unless_the_order_is_strict() -> None:
    for name, expected in (("jigsaw", [2]), ("gang-fifo", [])):
        floor = Floor(devices(4), POLICIES[name])
        assert [j.id for j in admissions(floor, [live(1), live(2)], {0, 1, 2, 3}, may={2})] == expected


def test_devices_that_are_away_get_nothing() -> None:
    floor = Floor(devices(4), POLICIES["jigsaw"])
    job = live(1, 2)
    assert admit(floor, [job], ready=[1, 3]) == [1]
    assert sorted(job.devices) == [1, 3]


def test_more_workers_than_devices_take_turns() -> None:
    shape = shape_of([1.0, 2.0, 3.0, 4.0], 0.5, 0, 0, most=2)
    assert shape.width == 2
    assert sorted(shape.tasks[0]) == [5.0, 5.0]
    assert shape.duty == pytest.approx(10 / (5.5 * 2))
    floor = Floor(devices(2), POLICIES["jigsaw"])
    assert admit(floor, [live(1, 8, most=2)]) == [1]


def test_what_was_measured_is_booked() -> None:
    job = live(1, 2, task=1.0)
    progress = Progress(job="1", epoch=1, iteration=5, loss=1.0, checkpoint=0, task_seconds=(0.2, 0.4), off_device=0.6)
    measured = shape_now(job.described, progress, 0, most=8)
    assert measured.duty == pytest.approx(0.6 / (1.0 * 2))
    floor = Floor(devices(2), POLICIES["jigsaw"])
    admit(floor, [job])
    assert floor.books.load.sum() == pytest.approx(2.0)
    assert floor.rebook(job, measured)
    assert floor.books.load.sum() == pytest.approx(0.6)


def test_unknown_times_count_as_always_busy() -> None:
    described = Described(job="1", epoch=1, workers=3, iterations=10)
    assert shape_now(described, None, 0, most=8).duty == 1.0


def test_at_most_sixteen_are_prepared_ahead_in_order_of_rank() -> None:
    queue = [live(n) for n in range(1, 1001)]
    for job in queue:
        job.process = False
    assert [j.id for j in to_prepare(queue, now=0.0, most=16)] == list(range(1, 17))
    for job in queue[:10]:
        job.process = True
    queue[10].not_before = 5.0
    assert [j.id for j in to_prepare(queue, now=0.0, most=16)] == [12, 13, 14, 15, 16, 17]
    assert to_prepare([live(1, gang=2)], now=0.0, most=16) == []  # nothing to load


def test_foreground_jobs_stand_first_background_jobs_last() -> None:
    jobs = [live(1, share="background"), live(2), live(3, share="foreground")]
    assert [j.id for j in sorted(jobs, key=lambda j: place(POLICIES["jigsaw"], j))] == [3, 2, 1]


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        ([], live(9, gang=5), "width: needs 5 devices, the cluster offers 2"),
        ([], live(9, persistent=99 * GIB), "memory: needs"),
        (
            [live(1, persistent=15 * GIB), live(2, persistent=15 * GIB)],
            live(9, persistent=2 * GIB),
            "memory: 0 devices",
        ),
        ([live(n, 2, off=9.0) for n in range(1, 5)], live(9, off=9.0), "residents: 0 devices have fewer than 4"),
        ([live(1, 2), live(2, 2)], live(9), "duty: 0 devices stay under 2.5"),
        ([live(1, 2, share="foreground")], live(9), "promise: 0 devices are free of jobs of promised speed"),
        ([live(1, 2)], live(9, share="foreground"), "promise: 0 devices are free of other jobs"),
    ],
)
def test_why_says_what_a_waiting_job_lacks(held: list[Live], asked: Live, expected: str) -> None:
    floor = Floor(devices(2), POLICIES["jigsaw"])
    assert len(admit(floor, held)) == len(held)
    assert admit(floor, [asked]) == []
    assert expected in explain(floor, asked, [asked])


def test_why_says_locality_where_no_node_has_enough() -> None:
    floor = Floor(devices(2, 2), POLICIES["jigsaw"])
    assert len(admit(floor, [live(1, share="foreground"), live(2, share="foreground")])) == 2
    taken = [j for j in (live(3, 2),) if admit(floor, [j])]
    assert taken or "node" in explain(floor, live(3, 2))


def test_why_says_who_is_before_it_and_what_happened_to_it() -> None:
    from dovetail.cluster.coordinator.strikes import Record, Strike

    floor = Floor(devices(1), POLICIES["jigsaw"])
    held = [live(1), live(2)]
    admit(floor, held)
    queue = [live(3), live(4), live(5)]
    queue[2].record = Record((Strike(3, "it raised"),), 1)
    told = explain(floor, queue[2], queue)
    assert "priority: job 3 (job-3) and 1 more before it" in told
    assert "strikes: 1 so far, the last: it raised" in told
    queue[2].not_before = 2.0
    assert "strikes: tries again in 2.0 s after it raised" in explain(floor, queue[2], queue)
    fresh = live(6)
    fresh.described, fresh.linked = None, False
    assert "preparing: its file is being loaded" in explain(floor, fresh, [fresh])
    fresh.process = False
    assert "preparing: its turn to be loaded has not come" in explain(floor, fresh, [fresh])
    fresh.state = "paused"
    assert explain(floor, fresh).startswith("paused")


def test_why_tells_a_running_job_who_shares_its_devices_and_what_it_costs() -> None:
    floor = Floor(devices(1), POLICIES["jigsaw"])
    first, second = live(1), live(2, share="background")
    admit(floor, [first, second])
    first.state = second.state = "running"
    first.progress = Progress(
        job="1",
        epoch=1,
        iteration=5,
        loss=1.0,
        checkpoint=0,
        task_seconds=(0.4,),
        off_device=0.1,
        iteration_seconds=0.6,
    )
    told = explain(floor, first, jobs=[second])
    assert "shares device 0 with job 2 (job-2) (background), duty 1.00" in told
    assert "50% of what is asked" in told
    assert "0.6 s per iteration, 0.5 s alone: 20.0% slower" in told
    floor.free(second)
    assert "alone on device 0" in explain(floor, first)


def test_a_crowded_job_moves_to_a_freed_device() -> None:
    floor = Floor(devices(2), POLICIES["jigsaw"])
    jobs = [live(n) for n in (1, 2, 3)]
    admit(floor, jobs)
    [single] = [j for j in jobs if len(floor.books.residents[floor.slot[j.devices[0]]]) == 1]
    assert floor.better(jobs, {0, 1}, now=99.0) is None
    floor.free(single)
    left = [j for j in jobs if j is not single]
    found = floor.better(left, {0, 1}, now=99.0)
    assert found is not None and found[1] == list(single.devices)
    assert floor.better(left, {0}, now=99.0) is None  # not while a device is away

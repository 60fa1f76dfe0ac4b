"""Admission, dispatch, order and re-packing: pure functions of what the devices hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.core.job import Job, Phase, Shape, Stage
from dovetail.planning.sharing.dispatch import Resident, pick
from dovetail.planning.sharing.pack import Cluster, Devices, Rules, admit, open_devices, why
from dovetail.planning.sharing.partition import part_of, partition
from dovetail.planning.sharing.policies import POLICIES, policy
from dovetail.planning.sharing.priority import Standing, chosen, classes, rank
from dovetail.planning.sharing.repack import crowded, narrow, relocate, widen

CLUSTER = Cluster(devices=7, node=4, device_bytes=100)
BASE: tuple[bool, float, float, int] = (False, 0.0, 0.0, 0)


def shape(workers: int = 1, *, device: float = 0.5, persistent: int = 10, ephemeral: int = 20) -> Shape:
    """An iteration of one second, `device` of it on the device."""
    phase = Phase(iterations=1, workers=workers)
    return Job(
        name="j", phases=(phase,), forward=device, off_device=1 - device, persistent_bytes=persistent,
        ephemeral_bytes=ephemeral,
    ).shape()  # fmt: skip


@st.composite
def books(draw: st.DrawFn) -> tuple[Devices, Rules]:
    rules = Rules(
        duty_cap=draw(st.sampled_from([1.0, 1.6, 2.0])),
        max_residents=draw(st.integers(1, 4)),
        locality=draw(st.sampled_from(["node", "any"])),
    )
    devices = Devices(CLUSTER)
    for key in range(draw(st.integers(0, 10))):
        s = draw(shapes())
        found = admit(devices, s, rules)
        if found is not None:
            devices.add(key, s, found)
    return devices, rules


def shapes() -> st.SearchStrategy[Shape]:
    return st.builds(
        shape,
        st.integers(1, 7),
        device=st.sampled_from([0.1, 0.4, 0.5, 0.9, 1.0]),
        persistent=st.integers(0, 40),
        ephemeral=st.integers(0, 60),
    )


@given(state=books(), wanted=shapes())
def test_admission_finds_the_least_loaded_devices_iff_there_are_enough(
    state: tuple[Devices, Rules], wanted: Shape
) -> None:
    devices, rules = state
    mask = open_devices(devices, wanted, rules)
    fitting = [
        d
        for d in range(CLUSTER.devices)
        if len(devices.residents[d]) < rules.max_residents
        and (
            rules.max_residents == 1
            or not devices.residents[d]
            or sum(devices.holdings[k].duty for k in devices.residents[d]) + wanted.duty <= rules.duty_cap + 1e-6
        )
        and sum(devices.holdings[k].shape.persistent_bytes for k in devices.residents[d]) + wanted.persistent_bytes
        + max([wanted.ephemeral_bytes, *(devices.holdings[k].shape.ephemeral_bytes for k in devices.residents[d])])
        <= CLUSTER.device_bytes
    ]  # fmt: skip
    assert fitting == [d for d in range(CLUSTER.devices) if mask[d]]
    anywhere = list(combinations(fitting, wanted.width))
    local = [c for c in anywhere if len({d // CLUSTER.node for d in c}) == 1]
    possible = anywhere
    if wanted.width <= CLUSTER.node and rules.locality == "node":
        possible = local
    found = admit(devices, wanted, rules)
    assert (found is None) == (not possible)
    assert (why(devices, wanted, rules) == "") == (found is not None)
    if found is not None:

        def load(c: tuple[int, ...]) -> float:
            return float(devices.load[list(c)].sum())

        assert tuple(sorted(found)) in possible
        assert load(tuple(found)) == pytest.approx(min(map(load, possible)))


@given(state=books(), data=st.data())
def test_what_is_added_and_removed_leaves_the_books_as_they_were(
    state: tuple[Devices, Rules], data: st.DataObject
) -> None:
    devices, rules = state
    before = [a.copy() for a in (devices.load, devices.persistent, devices.ephemeral, devices.count)]
    wanted = data.draw(shapes())
    found = admit(devices, wanted, rules)
    if found is not None:
        devices.add(99, wanted, found)
        assert devices.remove(99) == found
    for a, b in zip(before, (devices.load, devices.persistent, devices.ephemeral, devices.count), strict=True):
        assert a == pytest.approx(b)


@pytest.mark.parametrize(
    ("held", "wanted", "rules", "reason"),
    [
        ([], shape(8), Rules(), "width: needs 8 devices"),
        ([], shape(persistent=60, ephemeral=60), Rules(), "memory: needs 120 bytes"),
        ([shape(7, device=0.1, persistent=60)], shape(persistent=30), Rules(), "memory: 0 devices"),
        ([shape(7, device=0.1)], shape(device=0.1), Rules(max_residents=1), "residents: 0 devices"),
        ([shape(7)], shape(device=0.9), Rules(duty_cap=1.2), "duty: 0 devices stay under 1.2 with its 0.90"),
        ([shape(2, device=0.9), shape(device=0.9)], shape(4), Rules(duty_cap=1.0), "locality: 4 devices are open"),
    ],
)
def test_a_waiting_job_is_told_what_it_lacks(held: list[Shape], wanted: Shape, rules: Rules, reason: str) -> None:
    devices = Devices(CLUSTER)
    if len(held) == 2:  # one in each node
        devices.add(0, held[0], [0, 1])
        devices.add(1, held[1], [4])
    elif held:
        devices.add(0, held[0], range(7))
    assert why(devices, wanted, rules).startswith(reason)


def test_background_jobs_keep_only_each_other_waiting() -> None:
    devices, rules = Devices(Cluster(devices=1, node=1, device_bytes=100)), Rules(duty_cap=2.0)
    for key in (0, 1):
        devices.add(key, shape(device=0.9), [0], background=True)
    assert admit(devices, shape(device=0.9), rules, background=True) is None
    assert "duty" in why(devices, shape(device=0.9), rules, background=True)
    assert admit(devices, shape(device=0.9), rules) == [0]
    devices.replace(1, shape(device=0.8), [0])
    assert devices.firm[0] == 0.0, "it stays a background job in another shape"
    assert admit(devices, shape(persistent=70, device=0.1), rules) is None, "memory is held by whoever holds it"


def test_whole_nodes_are_left_whole() -> None:
    devices = Devices(Cluster(devices=8, node=4, device_bytes=100))
    first = admit(devices, shape(), Rules())
    assert first is not None
    devices.add(0, shape(), first)
    second = admit(devices, shape(), Rules())
    assert second is not None and second[0] // 4 == first[0] // 4 and second != first


def test_orders_say_who_goes_first() -> None:
    old = Standing(serial=0, arrival=0.0, total=10, shape=shape(2))
    new = Standing(serial=1, arrival=5.0, total=2, shape=shape(2))
    old.attained, old.turn = 100.0, 9.0
    assert rank("fifo", old) < rank("fifo", new)
    for order in ("srpt", "las", "turns"):
        assert rank(order, new) < rank(order, old)  # type: ignore[arg-type]
    assert rank("cp", old) < rank("cp", new)
    assert rank("queues", new, thresholds=(50.0,)) < rank("queues", old, thresholds=(50.0,))
    assert rank("queues", old, thresholds=(500.0,)) < rank("queues", new, thresholds=(500.0,))
    old.slice_end = 12.0
    assert rank("turns", old, now=11.0) < rank("turns", new, now=11.0)
    filler = Standing(serial=2, arrival=0.0, total=1, shape=shape(), background=True)
    assert all(rank(o, filler) > rank(o, old) for o in ("fifo", "srpt", "las"))  # type: ignore[arg-type]


def test_a_gang_is_charged_for_the_time_that_it_holds_its_devices() -> None:
    busy = Standing(serial=0, arrival=0.0, total=10, shape=shape(device=1.0))
    waits = Standing(serial=1, arrival=0.0, total=20, shape=shape(device=0.1))  # for input, most of each second
    assert rank("srpt", waits) < rank("srpt", busy)
    assert rank("srsf", busy) < rank("srsf", waits)


def test_fewer_workers_do_not_make_the_work_that_is_left_less() -> None:
    job = Job(name="j", phases=(Phase(iterations=10, workers=4, min_workers=1),), forward=1.0)
    full, narrow = (Standing(serial=0, arrival=0.0, total=10, shape=job.shape(0, w)) for w in (4, 1))
    assert rank("srpt", full) == rank("srpt", narrow) and rank("srsf", full) == rank("srsf", narrow)
    assert rank("cp", narrow) < rank("cp", full)


def test_a_slice_that_is_over_gives_way_to_whoever_waits() -> None:
    first = Standing(serial=0, arrival=0.0, total=10, shape=shape())
    second = Standing(serial=1, arrival=5.0, total=10, shape=shape())
    first.slice_end = 60.0
    assert rank("turns", first, now=59.0) < rank("turns", second, now=59.0)
    assert rank("turns", second, now=60.0) < rank("turns", first, now=60.0)
    first.turn, first.slice_end = 60.0, float("-inf")
    assert rank("turns", second, now=70.0) < rank("turns", first, now=70.0), "its turn is over until the other's is"


def test_classes_of_service_divide_the_jobs_there_are() -> None:
    assert classes(float(i) for i in range(101)) == (50.0, 90.0)
    assert classes([7.0]) == (7.0, 7.0)


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(1, 10))
def test_chosen_gangs_are_the_best_ranked_that_fit(widths: list[int], devices: int) -> None:
    took = chosen(list(enumerate(widths)), devices)
    free = devices
    for i, w in enumerate(widths):
        assert (i in took) == (w <= free)
        if w <= free:
            free -= w


def test_an_idle_device_takes_the_longest_ready_task_of_the_best_rank() -> None:
    tasks = Job(
        name="j", phases=(Phase(iterations=1, workers=3, depths=(0.2, 0.6, 1.0)),), forward=1.0, backward=1.0
    ).shape()
    first, second = Resident(0, tasks, range(3), BASE), Resident(1, tasks, range(3), (False, 1.0, 0.0, 1))
    residents = [first, second]
    assert pick(residents, 0, 0.0, "off") is None
    second.release()
    assert pick(residents, 0, 0.0, "off") is second
    first.release()
    assert pick(residents, 0, 0.0, "off") is first
    assert [first.take(d) for d in (0, 1, 2)] == [2, 1, 0]
    assert [first.ended() for _ in range(3)] == [False, False, True]


def test_a_guarded_task_starts_only_if_it_ends_before_it_is_in_the_way() -> None:
    burst = Job(
        name="b", phases=(Phase(iterations=1, workers=2),),
        stages=(Stage(seconds=1.0, workers=2), Stage(seconds=2.0, workers=1)), off_device=0.5,
    ).shape()  # fmt: skip
    foreground = Resident(0, burst, (0, 1), BASE)
    foreground.release()
    for d in (0, 1):
        foreground.take(d)
    foreground.eta = 1.0
    assert not foreground.ended() and not foreground.ended()  # the second stage, on device 0 only, is ready
    assert foreground.take(0) == 0
    foreground.eta = 3.0
    assert foreground.wanted(1) == pytest.approx(3.5)
    for seconds, fits in ((2.5, True), (2.6, False)):
        filler = Resident(1, shape(device=1.0), (1,), (True, 0.0, 0.0, 1))
        filler.place(Job(name="f", phases=(Phase(iterations=1, workers=1),), forward=seconds).shape(), (1,))
        filler.release()
        assert (pick([foreground, filler], 1, 1.0, "background") is filler) == fits
        assert pick([foreground, filler], 1, 1.0, "off") is filler


def test_the_guard_learns_how_long_tasks_of_each_depth_take() -> None:
    """A filler whose tasks take longer than its profile says is passed over; its other depth is judged by itself."""
    foreground = Resident(0, shape(device=0.5), (0,), BASE)
    foreground.next_release = 1.0
    depths = Phase(iterations=1, workers=2, depths=(0.5, 1.0))
    tasks = Job(name="f", phases=(depths,), forward=0.2, backward=0.6).shape()
    filler = Resident(1, tasks, (0, 1), (True, 0.0, 0.0, 1))
    filler.release()
    assert pick([foreground, filler], 0, 0.0, "background") is filler
    for _ in range(20):
        filler.observe(filler.offers(0), 1.2)
    assert filler.predicted(filler.offers(0)) == pytest.approx(1.2, rel=0.01)
    assert pick([foreground, filler], 0, 0.0, "background") is None
    filler.take(1)
    assert filler.predicted(filler.offers(0)) == pytest.approx(0.5), "nothing was seen of this depth"
    assert pick([foreground, filler], 0, 0.0, "background") is filler


def test_a_crowded_job_moves_to_the_emptier_node_and_only_then() -> None:
    devices = Devices(Cluster(devices=8, node=4, device_bytes=100))
    for key in (0, 1):
        devices.add(key, shape(4, device=0.9), range(4))
    assert crowded(devices) == [1, 0]
    assert sorted(relocate(devices, 1, Rules()) or ()) == [4, 5, 6, 7]
    assert devices.holdings[1].devices == [0, 1, 2, 3], "asking changes nothing"
    devices.add(2, shape(4, device=0.9), range(4, 8))
    assert relocate(devices, 1, Rules()) is None


def test_elastic_jobs_take_an_open_device_and_give_one_where_that_helps() -> None:
    devices = Devices(Cluster(devices=4, node=4, device_bytes=100))
    rules = replace(Rules(), duty_cap=1.0)
    devices.add(0, shape(3, device=1.0), [0, 1, 2])
    assert widen(devices, 0, shape(4, device=1.0), rules) == 3
    narrower = [shape(2, device=1.0), shape(1, device=1.0)]
    assert narrow(devices, shape(2, device=1.0), [(0, narrower)], rules) == (0, 1)
    assert narrow(devices, shape(3, device=1.0), [(0, narrower)], rules) == (0, 2)
    assert narrow(devices, shape(4, device=1.0), [(0, narrower)], rules) is None
    assert devices.holdings[0].devices == [0, 1, 2]


def test_policies_have_names_and_a_wrong_one_is_told_the_right_ones() -> None:
    wanted = {
        "jigsaw",
        "gang-fifo",
        "gang-fifo-backfill",
        "gang-easy-backfill",
        "gang-srsf",
        "tiresias-las",
        "gandiva-timeslice",
        "static-partition",
    }
    assert wanted <= set(POLICIES)
    assert policy("jigsaw", duty_cap=1.3).rules.duty_cap == 1.3
    with pytest.raises(Error, match="gang-srsf"):
        policy("fifo")


def test_a_static_partition_follows_the_work_and_fits_the_widest_job() -> None:
    def tenant(name: str, workers: int, iterations: int) -> Job:
        phase = Phase(iterations=iterations, workers=workers)
        return Job(name=name, phases=(phase,), forward=1.0, tenant=name)

    cluster = Cluster(devices=12, node=4)
    jobs = [tenant("small", 4, 1), tenant("large", 2, 100)]
    parts = partition(jobs, cluster)
    assert {name: int(mask.sum()) for name, mask in parts.items()} == {"tenant large": 8, "tenant small": 4}
    assert not (parts["tenant large"] & parts["tenant small"]).any()
    assert part_of(jobs[0], parts) == "tenant small"
    alike = [tenant("same", 1, 1), tenant("same", 3, 1)]
    assert set(partition(alike, cluster)) == {"one worker", "several workers"}
    with pytest.raises(Error, match="need 14 devices, the cluster has 12"):
        partition([tenant("a", 7, 1), tenant("b", 7, 1)], cluster)

"""Admission: pure functions of what the devices hold."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.job import Shape
from dovetail.planning.sharing.pack import ClusterSize, Devices, Rules, admit, open_devices, waiting_reason

from .made_shapes import shape

CLUSTER = ClusterSize(devices=7, node=4, device_bytes=100)


@st.composite
def devices_with_residents(draw: st.DrawFn) -> tuple[Devices, Rules]:
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


@given(state=devices_with_residents(), wanted=shapes())
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
            or sum(devices.residencies[k].duty for k in devices.residents[d]) + wanted.duty <= rules.duty_cap + 1e-6
        )
        and sum(devices.residencies[k].shape.persistent_bytes for k in devices.residents[d]) + wanted.persistent_bytes
        + max([wanted.ephemeral_bytes, *(devices.residencies[k].shape.ephemeral_bytes for k in devices.residents[d])])
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
    assert (waiting_reason(devices, wanted, rules) == "") == (found is not None)
    if found is not None:

        def load(c: tuple[int, ...]) -> float:
            return float(devices.load[list(c)].sum())

        assert tuple(sorted(found)) in possible
        assert load(tuple(found)) == pytest.approx(min(map(load, possible)))


@given(state=devices_with_residents(), data=st.data())
def test_a_job_that_is_added_and_removed_leaves_all_loads_as_they_were(
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
def test_the_reason_of_a_waiting_job_names_what_it_lacks(
    held: list[Shape], wanted: Shape, rules: Rules, reason: str
) -> None:
    devices = Devices(CLUSTER)
    if len(held) == 2:  # one in each node
        devices.add(0, held[0], [0, 1])
        devices.add(1, held[1], [4])
    elif held:
        devices.add(0, held[0], range(7))
    assert waiting_reason(devices, wanted, rules).startswith(reason)


def test_background_jobs_keep_only_each_other_waiting() -> None:
    devices, rules = Devices(ClusterSize(devices=1, node=1, device_bytes=100)), Rules(duty_cap=2.0)
    for key in (0, 1):
        devices.add(key, shape(device=0.9), [0], background=True)
    assert admit(devices, shape(device=0.9), rules, background=True) is None
    assert "duty" in waiting_reason(devices, shape(device=0.9), rules, background=True)
    assert admit(devices, shape(device=0.9), rules) == [0]
    devices.replace(1, shape(device=0.8), [0])
    assert devices.foreground[0] == 0.0, "it stays a background job in another shape"
    assert admit(devices, shape(persistent=70, device=0.1), rules) is None, "background jobs hold memory as all do"


def test_empty_nodes_are_left_empty_where_a_job_fits_a_used_one() -> None:
    devices = Devices(ClusterSize(devices=8, node=4, device_bytes=100))
    first = admit(devices, shape(), Rules())
    assert first is not None
    devices.add(0, shape(), first)
    second = admit(devices, shape(), Rules())
    assert second is not None and second[0] // 4 == first[0] // 4 and second != first

"""On an accelerator: the CPU's losses, no race, no wait of the host; whatever the device, its stream and the backend.

Every scenario here ends with a look at the emulated accelerator's race detector (`tests.devices`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all, run_ranks

from . import accelerator_scenarios as scenarios
from .accelerator_scenarios import COUNTED, WAYS

BARE = ("partial", "burst")
"""With a backend that nobody named torch's own DDP cannot be made on a device that torch does not know."""
OTHER_KERNELS = 5e-6
"""Difference of losses where the accelerator has another kernel than the CPU: attention, and LSTM's cells."""

Results = dict[str, list[dict[str, Any]]]


def results(ways: tuple[str, ...], device: str, backend: str = "", **given: Any) -> Results:
    """What each way came to on both ranks."""
    reports = run_all([(scenarios.trains, {"way": way, **given}) for way in ways], device=device, backend=backend)
    return {way: [rank[k] for rank in reports] for k, way in enumerate(ways)}


@pytest.fixture(scope="module")
def on_cpu() -> Results:
    return results(tuple(WAYS), "cpu")


@pytest.fixture(scope="module")
def plain(accelerator: str) -> Results:
    """On the current device, in its current stream, with its own backend."""
    return results(tuple(WAYS), accelerator)


@pytest.fixture(scope="module")
def elsewhere(accelerator: str) -> Results:
    """On the second device, in a stream beside the default one, with two backends; kernels vary in length."""
    return results(tuple(WAYS), f"{accelerator}:1", "cpu:gloo,emu:eccl", where="side", jitter=3e-4)


NEVER_CURRENT = ("planned", "split", "bf16", "partial", "burst")


@pytest.fixture(scope="module")
def never_current(accelerator: str) -> Results:
    """On the second device while the first is the current one: entering a stream would make the second current."""
    return results(NEVER_CURRENT, f"{accelerator}:1", "cpu:gloo,emu:eccl", jitter=3e-4)


def difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """The largest difference between two runs' losses, on any rank."""
    pairs = zip(one, other, strict=True)
    return max(abs(float(a) - float(b)) for x, y in pairs for a, b in zip(x["losses"], y["losses"], strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_the_cpus(plain: Results, on_cpu: Results, way: str) -> None:
    same = WAYS[way][1] == "cnn"
    assert difference(plain[way], on_cpu[way]) <= (0.0 if same else OTHER_KERNELS)


@pytest.mark.parametrize("way", WAYS)
def test_another_device_and_stream_and_kernels_of_any_length_change_nothing(
    elsewhere: Results, plain: Results, way: str
) -> None:
    assert difference(elsewhere[way], plain[way]) == 0.0


@pytest.mark.parametrize("way", NEVER_CURRENT)
def test_the_current_device_makes_no_difference(never_current: Results, plain: Results, way: str) -> None:
    assert difference(never_current[way], plain[way]) == 0.0


@pytest.mark.parametrize("way", [way for way in WAYS if way != "partial, guarded"])
def test_the_host_never_waits_for_the_device(plain: Results, elsewhere: Results, way: str) -> None:
    assert [rank["waits"] for rank in (*plain[way], *elsewhere[way])] == [[]] * 4


def test_the_guard_of_partial_backpropagation_waits_once_in_a_step_that_it_measures(plain: Results) -> None:
    assert scenarios.GUARD.every == COUNTED, "so one of the counted steps is measured"
    for rank in plain["partial, guarded"]:
        assert len(rank["waits"]) == 1 and rank["waits"][0].startswith("1 x copy to the host at partial/courier.py")


def test_a_backend_that_nobody_named_is_the_devices_own(accelerator: str, plain: Results) -> None:
    for way, found in results(BARE, accelerator, "default").items():
        assert difference(found, plain[way]) == 0.0


@pytest.fixture(scope="module")
def groups(accelerator: str) -> dict[str, Any]:
    (found,) = run_ranks(scenarios.groups, device=accelerator, ranks=1)
    return dict(found)


def test_the_backend_of_the_tensors_decides_whose_collectives_are_used(groups: dict[str, Any]) -> None:
    assert all(groups["own"].values()) and not groups["of the host"]


def test_second_groups_have_the_first_ones_time_out(groups: dict[str, Any]) -> None:
    assert groups["patience"] == {"own": 300.0, "both": 60.0, "own, 7 s": 7.0, "both, 7 s": 7.0}


def test_a_group_that_cannot_carry_the_devices_tensors_is_refused_in_one_line(groups: dict[str, Any]) -> None:
    assert "expected a process group with a backend of emu's own, got one with none for it" in groups["said"]
    assert "\n" not in groups["said"]

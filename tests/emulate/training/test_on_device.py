"""A process in which CUDA devices are emulated: what names them, and layers that take the times of a profile."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dovetail.emulate.launch import launch
from dovetail.emulate.training.cuda_stand_in import group_in_place_of, stand_in
from tests.paths import ROOT

GENEROUS = 1.5
"""What a loaded machine may add to a time: the promise is that nothing is shorter."""


@pytest.fixture(scope="module")
def found(accelerator: str) -> Any:
    """What all scenarios returned; one process for all, since starting it takes longer than they do."""
    argv = ["-m", "tests.emulate.training.scenarios_on_device"]
    (result,) = launch(argv, ranks=1, timeout=600, env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"})
    return result.report


def test_whatever_names_a_cuda_device_names_an_emulated_one(found: Any) -> None:
    assert set(found["names_of_devices"]["made"].values()) == {"emu:1"}
    assert found["names_of_devices"]["untouched"] == ["cpu", "cpu", "meta", "cpu"]


def test_the_functions_of_torch_cuda_are_those_of_the_emulated_accelerator(found: Any) -> None:
    told = found["functions_of_cuda"]
    assert told.pop("milliseconds") >= 20 and told.pop("memory") == 16 << 30 and told.pop("inside") == 1
    assert (told.pop("count"), told.pop("outside")) == (2, 0)
    assert all(told.values()), told


def test_autocast_and_gradient_scalers_work_by_the_name_of_cuda(found: Any) -> None:
    assert found["mixed_precision"] == {"dtype": "torch.bfloat16", "moved": True, "scaled": True}


def test_checkpoints_go_where_the_script_says(found: Any) -> None:
    assert found["checkpoints"] == ["emu:0", "cpu", "emu:1", "emu:1", "emu:1"]
    assert found["pinned_batches"] == [[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]], True]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nccl", "eccl"),
        ("NCCL", "eccl"),
        ("gloo", "cpu:gloo,emu:eccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,emu:eccl"),
        ("mpi", "mpi"),
        ("cpu:gloo", "cpu:gloo"),
        (None, None),
    ],
)
def test_process_groups_of_cuda_are_the_accelerators_own(given: str | None, expected: str | None) -> None:
    assert group_in_place_of(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("cuda", "emu"), ("cuda:3", "emu:3"), ("cpu", "cpu"), ("cudax", "cudax"), (3, 3), (None, None)],
)
def test_names_that_are_not_cudas_stay(given: Any, expected: Any) -> None:
    assert stand_in(given) == expected


def test_layers_and_gradients_take_the_profiles_times_and_the_host_runs_ahead(found: Any) -> None:
    once, half = found["in_a_row"]["once"], found["in_a_row"]["half"]
    assert once["ahead"] and found["in_a_row"]["mismatch"] == ""
    assert 0.3 <= once["forward"] < 0.3 * GENEROUS and 0.3 <= once["backward"] < 0.3 * GENEROUS
    for name, ready in (("2.bias", 0.08), ("2.weight", 0.10), ("1.weight", 0.24), ("1.bias", 0.26), ("0.weight", 0.30)):
        assert ready <= once["ready"][name] < ready + 0.3 * (GENEROUS - 1), name
    assert 0.15 <= half["forward"] < 0.3 and 0.15 <= half["backward"] < 0.3, "half the samples, half the time"
    assert 1 <= once["stretch"] < GENEROUS


def test_waiting_for_another_stream_is_not_part_of_a_layers_time(found: Any) -> None:
    # The other stream is busy until 0.3 s; the layer of 0.15 s that waits for it begins then, one of 0.05 s follows.
    assert 0.5 <= found["waits_for_others"]["forward"] < 0.5 * GENEROUS


def test_a_backward_pass_that_ends_early_does_not_wait_for_the_rest(found: Any) -> None:
    shallow = found["shallow"]
    assert set(shallow["ready"]) == {"2.bias", "2.weight", "1.bias", "1.weight"} and shallow["stretch"] is None
    assert 0.26 <= shallow["backward"] < 0.26 * GENEROUS


def test_layers_inside_others_and_repeated_calls_count_once(found: Any) -> None:
    first, second, third = found["nested"]
    assert first >= 0.56, "how often a layer is called is not known before the first pass"
    assert all(0.36 <= seconds < 0.36 * GENEROUS for seconds in (second, third))


def test_recomputing_a_checkpoint_is_part_of_backward(found: Any) -> None:
    assert 0.25 <= found["recomputed"]["forward"] < 0.25 * GENEROUS
    assert 0.15 <= found["recomputed"]["backward"] < 0.15 * GENEROUS


def test_what_does_not_match_is_said_in_one_line(found: Any) -> None:
    assert found["stranger"] == (
        "1 of the profile's 2 layers are not in the model (9), with 25% of its forward time; "
        "4 of the model's parameters are not in the profile (1.weight, 1.bias, 2.weight, …)"
    )

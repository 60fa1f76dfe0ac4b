"""dovetail.optimizer: the model is a DistributedDataParallel in every way in which others look at one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import surface_scenarios
from .test_forward_overlap import CLOSE


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each scenario came to on both ranks. They run once, in the same processes."""
    names = ("logging_data", "static_graph", "prepared", "inside_out", "copied", "exported", "joined", "hooked")
    calls: dict[str, Any] = {name: (getattr(surface_scenarios, name), {}) for name in names}
    calls["checkpointed"] = (surface_scenarios.checkpointed, {"folder": str(tmp_path_factory.mktemp("kept"))})
    reports = run_all(list(calls.values()))
    return {name: [rank[k] for rank in reports] for k, name in enumerate(calls)}


def test_logging_data_has_all_that_torchs_has_and_the_buckets_of_the_moment(found: dict[str, list[Any]]) -> None:
    for result in found["logging_data"]:
        assert result["missing"] == [] and result["iteration"] == 3
        assert result["buckets"] == result["bytes"] and len(result["bytes"]) == 2
        assert result["parameters"] == 2 and not result["can be static"]


def test_a_static_graph_leaves_unused_parameters_alone(found: dict[str, list[Any]]) -> None:
    assert all(difference < CLOSE for result in found["static_graph"] for difference in result.values())


def test_a_backward_pass_that_others_have_prepared_synchronises(found: dict[str, list[Any]]) -> None:
    assert all(difference < CLOSE for result in found["prepared"] for difference in result.values())


def test_backward_passes_and_steps_inside_forward_work_as_with_torch(found: dict[str, list[Any]]) -> None:
    assert all(difference < CLOSE for difference in found["inside_out"])


def test_a_copy_of_the_wrapper_is_a_plain_one_and_a_copy_of_the_module_has_the_new_values(
    found: dict[str, list[Any]],
) -> None:
    for result in found["copied"]:
        assert result["wrapper"] == "DistributedDataParallel" and result["trains"] and result["plain"]
        assert result["inner"] < CLOSE and result["pickled"] < CLOSE


def test_torchs_distributed_checkpoint_takes_model_and_optimiser_even_before_the_first_step(
    found: dict[str, list[Any]],
) -> None:
    for result in found["checkpointed"]:
        assert result["fresh"] > 0 and result["difference"] < CLOSE


def test_an_exported_module_has_the_new_values(found: dict[str, list[Any]]) -> None:
    assert all(result["difference"] < CLOSE for result in found["exported"])


def test_ranks_with_uneven_inputs_join_under_torchs_reducer_for_the_time_of_the_block(
    found: dict[str, list[Any]],
) -> None:
    assert all(result["difference"] < CLOSE and result["in charge"] for result in found["joined"])


def test_forward_hooks_are_called_and_gradients_made_by_hand_are_taken_as_they_are(
    found: dict[str, list[Any]],
) -> None:
    assert all(result["difference"] < CLOSE and result["seen"] for result in found["hooked"])

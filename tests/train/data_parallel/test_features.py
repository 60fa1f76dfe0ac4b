"""What docs/integrations.md says to work: each feature with torch's DDP, with one line and with two, compared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import feature_scenarios
from .feature_scenarios import BOTH, ONE, SECOND

CLOSE = {"autocast": 1e-6}
"""Differences that rounding leaves, where it is not that of float64."""
REFUSED = {
    "twice": "was the second of one forward pass",
    "inside backward": "optimisers that run inside backward need whole gradients",
    "hook": "a communication hook reduces whole gradients",
    "delayed": "delayed all-reduces",
    "caps": "a list of bucket caps",
    "subclass of Parameter": "is a Marked; expected a plain torch.nn.Parameter",
    "ZeroRedundancyOptimizer": "cannot be shared out by parameters",
    "mixed_precision": "DDP's own mixed precision",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each scenario came to on both ranks. They run once, in the same processes."""
    calls: dict[str, Any] = {name: (feature_scenarios.compared, {"name": name}) for name in BOTH | ONE}
    for name in ("batch_norm_of_all_ranks", "meshed", "regrouped", "converted", "refusals", "pickled"):
        calls[name] = (getattr(feature_scenarios, name), {})
    calls["checkpointed"] = (feature_scenarios.checkpointed, {"folder": str(tmp_path_factory.mktemp("kept"))})
    reports = run_all(list(calls.values()))
    return {name: [rank[k] for rank in reports] for k, name in enumerate(calls)}


@pytest.mark.parametrize("name", [*BOTH, *ONE])
def test_one_line_equals_torch(found: dict[str, list[Any]], name: str) -> None:
    for result in found[name]:
        assert result["different"] == []
        assert result["state"] == "done" and result["plan"], result["reason"]


@pytest.mark.parametrize("name", BOTH)
def test_two_lines_equal_torch(found: dict[str, list[Any]], name: str) -> None:
    for result in found[name]:
        assert result["worst"] < CLOSE.get(name, 1e-10) and result["exchanged"] == SECOND


def test_sync_batch_norm_needs_an_accelerator_with_torchs_wrapper_too(found: dict[str, list[Any]]) -> None:
    for said in found["batch_norm_of_all_ranks"]:
        assert said["torch"] == said["one line"] == said["two lines"] and "GPU" in said["torch"]


def test_distributed_checkpoint_stores_and_loads_as_with_torch(found: dict[str, list[Any]]) -> None:
    assert found["checkpointed"] == [0.0, 0.0]


def test_a_device_mesh_is_a_process_group_with_one_line(found: dict[str, list[Any]]) -> None:
    for result in found["meshed"]:
        assert result["same"] and "a device mesh" in result["said"]


def test_a_new_process_group_takes_effect_with_one_line(found: dict[str, list[Any]]) -> None:
    for result in found["regrouped"]:
        assert result["same"] and "its process group cannot change" in result["said"]


def test_a_model_that_is_converted_after_it_was_wrapped_is_no_longer_reduced_by_torch(
    found: dict[str, list[Any]],
) -> None:
    for result in found["converted"]:
        assert result["torch"] == result["one line"] > 1e-4


@pytest.mark.parametrize("what", REFUSED)
def test_the_second_line_refuses_in_one_line(found: dict[str, list[Any]], what: str) -> None:
    for said in found["refusals"]:
        assert REFUSED[what] in said[what] and "\n" not in said[what]


def test_pickles_compute_what_the_wrapper_does(found: dict[str, list[Any]]) -> None:
    assert all(all(result.values()) for result in found["pickled"])

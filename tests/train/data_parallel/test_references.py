"""dovetail.optimizer: whoever refers to a parameter sees finished values, however the reference was made."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import reference_scenarios
from .reference_scenarios import KEPT, LOOKS
from .test_forward_overlap import CLOSE

WHEN = ("before wrapping", "after wrapping")


@pytest.fixture(scope="module")
def found() -> dict[Any, list[Any]]:
    """What each scenario came to on both ranks. They run once, in the same processes."""
    calls: dict[Any, Any] = {
        **{
            (way, when): (reference_scenarios.kept_reference, {"way": way, "when": when})
            for way in KEPT
            for when in WHEN
        },
        "looks": (reference_scenarios.looks, {}),
        "refused": (reference_scenarios.refused, {}),
        "converted": (reference_scenarios.converted, {}),
    }
    reports = run_all(list(calls.values()))
    return {name: [rank[k] for rank in reports] for k, name in enumerate(calls)}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("way", KEPT)
def test_a_kept_reference_reads_the_new_values_right_after_a_step_and_through_new_buckets(
    found: dict[Any, list[Any]], way: str, when: str
) -> None:
    for result in found[way, when]:
        assert max(result["differences"]) < CLOSE, result


def test_steps_that_wait_for_other_references_are_counted(found: dict[Any, list[Any]]) -> None:
    line = "2 parameters are read through other references: step() waits for these"
    for way in ("data", "arrays", "state dict", "scripted twin", "shared"):
        assert all(line in result["explained"] for result in found[way, "after wrapping"])
    for way in ("parameters", "functional", "shallow copy"):
        assert all("other references" not in result["explained"] for result in found[way, "after wrapping"])


@pytest.mark.parametrize("way", LOOKS)
def test_reading_a_parameter_right_after_a_step_waits_for_its_new_values(found: dict[Any, list[Any]], way: str) -> None:
    assert all(result[way] < CLOSE for result in found["looks"])


def test_the_readers_had_to_wait_and_the_steps_did_not(found: dict[Any, list[Any]]) -> None:
    for result in found["looks"]:
        assert result["held up"] and result["old at the address"] and result["read elsewhere"] == 0


def test_parameters_without_a_dense_memory_of_their_own_are_refused_in_one_line(found: dict[Any, list[Any]]) -> None:
    for said in found["refused"]:
        assert "leave gaps" in said["gaps"] and "share memory" in said["twice"]
        assert said["flat"] == "nothing was refused"


def test_a_model_is_converted_before_it_is_wrapped_or_not_at_all(found: dict[Any, list[Any]]) -> None:
    for result in found["converted"]:
        assert "nothing was changed" in result["said"] and result["same"]
        assert result["difference"] < CLOSE and result["shared"]

"""dovetail.optimizer: compiled and scripted code computes with the new values, and is compiled once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import compiled_scenarios
from .test_forward_overlap import CLOSE

COMPILED = (*("blocks", "blocks in place", "module", "wrapper", "wrapper in place", "blocks after wrapping"),)
WAYS = (*COMPILED, "scripted block", "scripted module")


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each way came to on both ranks. They run once, in the same processes."""
    reports = run_all([(compiled_scenarios.compiled, {"way": way}) for way in WAYS])
    return {way: [rank[k] for rank in reports] for k, way in enumerate(WAYS)}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_those_of_torch_without_a_compiler(found: dict[str, list[Any]], way: str) -> None:
    assert all(result["difference"] < CLOSE for result in found[way])


@pytest.mark.parametrize("way", COMPILED)
def test_nothing_is_compiled_anew_when_new_values_are_on_their_way(found: dict[str, list[Any]], way: str) -> None:
    for result in found[way]:
        first, *rest = result["graphs"]
        assert first > 0 and all(count == first for count in rest), result


@pytest.mark.parametrize("way", ["blocks", "blocks in place", "module", "blocks after wrapping"])
def test_waiting_breaks_no_graph(found: dict[str, list[Any]], way: str) -> None:
    assert all(result["breaks"] == {} for result in found[way])


def test_explain_says_who_waits_at_its_start_and_for_whom_the_step_waits(found: dict[str, list[Any]]) -> None:
    for result in found["blocks"]:
        assert "12 parameters are in compiled modules: these wait at their start" in result["explained"]
    for result in found["scripted block"]:
        assert "4 parameters are read through other references" in result["explained"]

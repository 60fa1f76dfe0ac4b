"""The second line with the optimisers that scripts have: subclasses, several of them, groups and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_all

from . import optimizer_scenarios as scenarios
from .test_forward_overlap import CLOSE

Runs = Callable[[str], list[Any]]

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "subclassed": (scenarios.subclassed, {}),
    "several": (scenarios.several, {}),
    "several planned": (scenarios.several_planned, {}),
    "grown": (scenarios.grown, {}),
    "strangers": (scenarios.strangers, {}),
    "looked up": (scenarios.looked_up, {}),
    "dtypes": (scenarios.several_dtypes, {"tuned": False}),
    "dtypes planned": (scenarios.several_dtypes, {"tuned": True}),
}


@pytest.fixture(scope="module")
def two() -> Runs:
    """Results of the scenarios on two ranks, by name: one per rank. They run once, in the same processes."""
    reports = run_all(list(CALLS.values()))
    return lambda name: [rank[list(CALLS).index(name)] for rank in reports]


def test_a_subclass_that_leaves_the_arithmetic_alone_is_cut_and_another_gets_whole_parameters(two: Runs) -> None:
    for found in two("subclassed"):
        assert found["difference"] < CLOSE and found["normalised"] < CLOSE
        assert found["owners"] == [0, found["parameters"]]


def test_a_model_may_have_several_optimisers(two: Runs) -> None:
    for found in two("several"):
        assert found["difference"] < CLOSE and found["state"] < CLOSE
        assert "in another optimiser already" in found["said"]


def test_planning_sees_several_optimisers_as_one_iteration(two: Runs) -> None:
    for found in two("several planned"):
        assert found["difference"] < CLOSE
        assert (found["state"], found["reason"]) == ("done", "")


def test_groups_are_added_and_parameters_unfrozen_as_with_torch(two: Runs) -> None:
    for found in two("grown"):
        assert found["difference"] < CLOSE and found["same form"]


def test_parameters_of_other_models_are_updated_on_every_rank(two: Runs) -> None:
    assert all(found < 1e-6 for found in two("strangers"))  # one of them is float32


def test_state_is_found_with_a_parameter_in_hand(two: Runs) -> None:
    for found in two("looked up"):
        assert not found.pop("before") and all(found.values()), found


@pytest.mark.parametrize("name", ["dtypes", "dtypes planned"])
def test_a_model_may_have_several_dtypes(two: Runs, name: str) -> None:
    for found in two(name):
        assert found["difference"] < 1e-6 and found["state"] < 1e-6 and found["dtypes"]  # half of it is float32
        assert found["planning"] == ("done" if name == "dtypes planned" else "off")

"""Planning does not disturb what training scripts do besides plain iterations, on all ranks or on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_all

from . import tuner_scenarios

Runs = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Results of the scenarios, by name: one per rank. They run once, in the same two processes."""
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        **{name: (tuner_scenarios.keeps, {"habit": name}) for name in tuner_scenarios.HABITS},
        "hook": (tuner_scenarios.hook_while_trying, {}),
        "join": (tuner_scenarios.nothing_to_join, {}),
        "interrupted": (tuner_scenarios.interrupted, {}),
        "idle": (tuner_scenarios.idle_in_a_static_graph, {}),
        "different": (tuner_scenarios.different_arguments, {}),
        "dropped": (tuner_scenarios.dropped_while_planning, {}),
    }
    reports = run_all(list(calls.values()))
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


@pytest.mark.parametrize("habit", tuner_scenarios.HABITS)
def test_gradients_equal_torchs_and_planning_comes_to_its_end(runs: Runs, habit: str) -> None:
    for result in runs(habit):
        assert result == {"different": [], "state": "done", "kept": True}


def test_a_hook_registered_during_a_trial_is_used_with_torchs_own_buckets(runs: Runs) -> None:
    for result in runs("hook"):
        assert result["different"] == [] and result["same buckets"]
        assert "communication hook" in result["reason"]


def test_a_rank_without_inputs_stops_planning_with_the_others(runs: Runs) -> None:
    for result in runs("join"):
        assert result["same"] and "uneven" in result["reason"]


def test_an_interrupt_ends_planning_and_training_can_go_on(runs: Runs) -> None:
    for result in runs("interrupted"):
        assert result["caught"] == 1 and result["same"]
        assert result["state"] == "off" and "KeyboardInterrupt" in result["reason"]


def test_a_parameter_that_is_never_used_ends_planning_with_a_reason(runs: Runs) -> None:
    for reason in runs("idle"):
        assert "not every parameter got a gradient" in reason


def test_ranks_with_different_arguments_find_out_at_once(runs: Runs) -> None:
    first, second = runs("different")
    assert "another rank" in first[0] and "switched off" in second[0]
    for said in (first, second):
        assert "DDP_SET_LAST_BUCKET_CAP" in said[1]
        assert "expected the same on all ranks" in said[2]
        assert "bucket_cap_mb_list" in said[3]


def test_a_module_that_nobody_holds_is_freed_at_every_stage_of_planning(runs: Runs) -> None:
    for freed in runs("dropped"):
        assert all(freed), freed

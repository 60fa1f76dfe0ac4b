"""A kept plan is looked at again, on all ranks together; nothing is left of a training that is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail import planning
from dovetail.train.data_parallel.tuning.look_back import DRIFT, GLANCES, LookBack
from dovetail.train.data_parallel.tuning.trials import TrialPlan
from tests.planning.merge.oracle import made_network, made_profile
from tests.ranks import run_all

from . import look_back_scenarios

Runs = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Results of the scenarios, by name: one per rank. They run once, in the same two processes."""
    folder = str(tmp_path_factory.mktemp("stores"))
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "stays": (look_back_scenarios.looks_back, {"gain": 0.04}),
        "goes back": (look_back_scenarios.looks_back, {"gain": -0.02}),
        "drifts": (look_back_scenarios.looks_back, {"gain": -0.02, "drift": True}),
        "records": (look_back_scenarios.looks_back, {"gain": 0.04, "record": True}),
        "attached, stays": (look_back_scenarios.looks_back_attached, {"gain": 0.04}),
        "attached, goes back": (look_back_scenarios.looks_back_attached, {"gain": -0.02}),
        "logged, plan": (look_back_scenarios.logged_iterations, {"keep": 1}),
        "logged, own": (look_back_scenarios.logged_iterations, {"keep": 0}),
        "logged, static": (look_back_scenarios.logged_iterations, {"keep": 1, "static_graph": True}),
        "left": (look_back_scenarios.left_over, {"folder": folder}),
    }
    reports = run_all(list(calls.values()))
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


def test_a_plan_that_still_gains_stays_and_is_looked_at_again(runs: Runs) -> None:
    for result in runs("stays"):
        assert result["different"] == [] and result["rested"] > 5
        assert result["review"]["stays"] and result["review"]["gain"] == pytest.approx(0.04)
        assert result["plan"] and result["gain"] == pytest.approx(0.04) and result["looks_on"]
        assert result["buckets"] == result["planned"]
        assert "look back step" in result["explained"] and "still 4.0 % less time a step" in result["explained"]


def test_a_plan_that_no_longer_gains_gives_way_to_torchs_buckets(runs: Runs) -> None:
    for result in runs("goes back"):
        assert result["different"] == []
        assert result["review"]["stays"] is False
        assert result["kept"] == "torch's own buckets" and not result["plan"] and result["gain"] == 0.0
        assert result["buckets"] == result["own"] != result["planned"]
        assert not result["looks_on"] and result["hooks_left"] == 0
        assert "no longer gains, so torch's own buckets are in force again" in result["explained"]


def test_the_first_rank_says_it_in_one_line(runs: Runs) -> None:
    for name, words in (("stays", "still 4.0 % less"), ("goes back", "in force again")):
        first, second = runs(name)
        assert len(first["lines"]) == 1 and words in first["lines"][0] and "\n" not in first["lines"][0]
        assert second["lines"] == []


def test_steps_that_take_much_longer_are_reason_enough_to_look(runs: Runs) -> None:
    for result in runs("drifts"):
        assert result["review"] == {"stays": False, "drifted": True, "gain": pytest.approx(-0.02, abs=1e-3)}
        assert result["rested"] < 80 and "a step takes" in result["explained"]


def test_a_recording_puts_a_look_back_off_and_shows_the_kept_plan(runs: Runs) -> None:
    for result in runs("records"):
        assert result["different"] == [] and result["recorded"] > 0
        assert result["review"]["stays"] and result["buckets"] == result["planned"]


def test_an_attached_optimisers_plan_is_looked_at_too(runs: Runs) -> None:
    for result in runs("attached, stays"):
        assert result["stays"] == [True] and result["plan"] == "forward" and result["exchange"]
        assert result["apart"] < 1e-5
    for result in runs("attached, goes back"):
        assert result["stays"] == [False] and result["plan"] is None and not result["exchange"]
        assert result["kept"] == "torch's own buckets" and result["apart"] < 1e-5
        assert "in force again" in result["explained"]


@pytest.mark.parametrize("name", ["plan", "own", "static"])
def test_torchs_count_of_iterations_goes_on_with_a_new_reducer(runs: Runs, name: str) -> None:
    for result in runs(f"logged, {name}"):
        assert all(theirs == ours for theirs, ours in result["counted"]), result["counted"]
        assert result["counted"][-1][0] >= 40 and result["plan"] == (name != "own")


def test_no_thread_and_no_descriptor_is_left_of_a_training(runs: Runs) -> None:
    for result in runs("left"):
        for name, counts in result.items():
            assert counts[1] == counts[2], f"{name}: (threads, descriptors) {counts}"
        assert result["ours, model first"][-1] <= result["torch, model first"][-1]
        assert result["ours, group first"][-1] <= result["torch, group first"][-1]


class Reduced:
    """A reducer as far as a look back sees it."""

    def __init__(self) -> None:
        self.passes = 0

    def get_backward_stats(self) -> list[int]:
        return [0, 0] if not self.passes else [5, 100 + self.passes]


def rest(every: int) -> LookBack:
    plan = planning.plan(made_profile([1000] * 3, [0.1] * 3), made_network(0.05, 1e-4))
    entered = TrialPlan(plan=plan, label="", predicted=1.0)
    return LookBack(order=[0, 1, 2], first=entered, kept=entered, own=None, spread=0.01, every=every)


def test_only_backward_passes_that_were_reduced_are_counted() -> None:
    look, reducer = rest(4 * GLANCES), Reduced()
    assert not look.due(reducer) and look.rested == 0, "a new reducer has reduced nothing"
    for passes in (1, 1, 1, 2, 3, 3):
        reducer.passes = passes
        assert not look.due(reducer)
    assert look.rested == 3
    reducer.passes = 4
    assert look.due(reducer)


def test_plans_are_compared_when_it_is_time_or_when_steps_drift() -> None:
    look = rest(10)
    look.rested = 4
    assert look.glanced(1.0) == (False, False) and look.since == 4 and look.rested == 0 and look.seconds == 1.0
    assert look.glanced(1.0 + 2 * DRIFT) == (True, True)
    assert look.glanced(1.0 - 2 * DRIFT) == (True, True), "faster steps are a change too"
    look.rested = 6
    assert look.glanced(1.01) == (True, False)
    look.found_faster()
    assert look.glanced(1.3) == (False, False) and look.seconds == 1.3

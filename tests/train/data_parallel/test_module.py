"""dovetail's DistributedDataParallel: torch's gradients, planned buckets, and never in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.emulate.launch import LaunchError
from tests.ranks import run_all, run_ranks

from . import scenarios

FOLLOWING: dict[str, dict[str, Any]] = {
    "keeps torch's": {"keep": 0},
    "keeps a plan": {"keep": 1},
    "gradient views": {"keep": 2, "gradient_as_bucket_view": True},
    "static graph": {"keep": 1, "static_graph": True},
    "user's own cap": {"keep": 1, "bucket_cap_mb": 0.01},
}
Runs = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Results of the scenarios, by name: one per rank. They run once, in the same two processes."""
    plan = tmp_path_factory.mktemp("plans") / "plan.json"
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        **{name: (scenarios.follows_torch, given) for name, given in FOLLOWING.items()},
        "half a percent": (scenarios.near_tie, {"gain": 0.005}),
        "three percent": (scenarios.near_tie, {"gain": 0.03}),
        "accumulates": (scenarios.accumulates, {}),
        "says so once": (scenarios.says_so_once, {}),
        "uneven": (scenarios.uneven, {}),
        "planner fails": (scenarios.planner_fails, {}),
        "given plan": (scenarios.given_plan, {"path": str(plan)}),
        "wrong plans": (scenarios.wrong_plans, {}),
        "states": (scenarios.states, {}),
        "subclasses": (scenarios.subclasses, {}),
    }
    reports = run_all(list(calls.values()))
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


@pytest.mark.parametrize("name", FOLLOWING)
def test_parameters_equal_those_of_torch_bit_for_bit_while_planning_and_after(runs: Runs, name: str) -> None:
    for result in runs(name):
        assert result["different"] == []
        assert result["state"] == "done"
        assert (result["kept"] == "torch's own buckets") == (FOLLOWING[name]["keep"] == 0)
        assert result["buckets"] == result["planned"]
        assert not result["tuner_left"] and result["hooks_left"] == 0


def test_candidates_that_are_clearly_slower_run_one_round_only(runs: Runs) -> None:
    first, second = runs("keeps a plan")
    assert first["dropped"] == second["dropped"] == [False, False, True]
    pairs = first["trials"][0]
    assert pairs in (6, 7), "seven where the plan is predicted to be slower"
    assert first["trials"] == second["trials"] == [pairs, pairs + 4, 2]
    assert "kept" in first["explained"] and "50.0 % less time a step (50.0 to 50.0 %)" in first["explained"]


def test_a_plan_must_be_measurably_faster_to_replace_torchs_buckets(runs: Runs) -> None:
    assert runs("half a percent") == ["torch's own buckets"] * 2
    assert runs("three percent") == ["plan threshold:0.02"] * 2


def test_accumulation_and_evaluation_on_one_rank_only_do_not_disturb_planning(runs: Runs) -> None:
    for result in runs("accumulates"):
        assert result["equal"] and result["state"] == "done"


def test_three_ranks_agree_too() -> None:
    results = run_ranks(scenarios.follows_torch, ranks=3, keep=1)
    assert all(r["different"] == [] and r["buckets"] == r["planned"] == results[0]["planned"] for r in results)


def test_the_reason_is_logged_once_on_the_first_rank_only(runs: Runs) -> None:
    first, second = runs("says so once")
    assert len(first) == 1 and "bucket_cap_mb_list" in first[0] and second == []


def test_one_rank_has_nothing_to_plan() -> None:
    (reason,) = run_ranks(scenarios.alone, ranks=1)
    assert "nobody to communicate with" in reason


def test_ranks_with_uneven_inputs_end_planning(runs: Runs) -> None:
    for result in runs("uneven"):
        assert "uneven" in result["reason"]


def test_a_planner_that_fails_on_one_rank_ends_planning_on_all(runs: Runs) -> None:
    for result in runs("planner fails"):
        assert result["state"] == "off" and "no numbers today" in result["reason"]


@pytest.mark.parametrize("step", [2, 4, 9], ids=["while measuring", "at the agreement", "while trying"])
def test_a_rank_that_dies_ends_the_others_with_an_error(step: int) -> None:
    with pytest.raises(LaunchError) as caught:
        run_ranks(scenarios.dies, step_of_death=step, timeout=400)
    assert "did not end" not in str(caught.value)


def test_a_given_plan_is_followed_exactly_from_its_file_its_keywords_and_the_environment(runs: Runs) -> None:
    for result in runs("given plan"):
        assert len(result["planned"]) > 2
        assert all(used == result["planned"] for used in result["used"].values()), result
        assert "switched off" in result["off"]
        assert "threshold:0.02" in result["explained"]


def test_a_plan_that_does_not_fit_is_refused_in_one_line(runs: Runs) -> None:
    for said in runs("wrong plans"):
        depth, width, both, word, tuning = said
        assert "only in the plan" in depth
        assert "does not fit" in width
        assert "bucket_cap_mb" in both
        assert "'auto', a Plan or None" in word
        assert "Tuning.steps: expected at least 1" in tuning


def test_state_goes_both_ways_between_torchs_ddp_and_ours(runs: Runs) -> None:
    for result in runs("states"):
        assert all(result.values()), result


def test_subclasses_are_made_as_themselves_with_a_second_line_and_without(runs: Runs) -> None:
    for result in runs("subclasses"):
        assert result == {"plain": "Mine", "overlapping": "Mine"}

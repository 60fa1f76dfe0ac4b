"""PartialBackprop and what user code does besides plain steps: checkpointing, freezing, dropped passes, interrupts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_all, run_ranks

from . import depth_user_code

SCENARIOS: list[Callable[..., Any]] = [
    depth_user_code.reentrant,
    depth_user_code.other_gradients,
    depth_user_code.kept_as_they_were,
    depth_user_code.thrown_away,
    depth_user_code.without_samples,
    depth_user_code.interrupted,
    depth_user_code.given_up,
    depth_user_code.awaiting_plan,
    depth_user_code.released,
]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    """What each scenario returned on each of two ranks."""
    reports = run_all([(scenario, {}) for scenario in SCENARIOS], timeout=900)
    return {scenario.__name__: [rank[i] for rank in reports] for i, scenario in enumerate(SCENARIOS)}


@pytest.mark.parametrize("case", ["last layer", "used often", "boxed", "accumulated"])
def test_reentrant_checkpointing_ends_on_all_ranks_with_a_line_that_says_what_to_do(
    runs: dict[str, list[Any]], case: str
) -> None:
    for said in runs["reentrant"]:
        assert "got a gradient in a backward pass inside another" in said[case]
        assert "use_reentrant=False" in said[case] and "\n" not in said[case]
        assert said["boxed and plain"] == "went on"


def test_a_rank_alone_with_reentrant_checkpointing_says_so_and_the_others_do_not_wait(
    runs: dict[str, list[Any]],
) -> None:
    first, last = runs["reentrant"]
    assert first["alone"] == "step 2: rank 1 has failed; its own message says why"
    assert last["alone"].startswith("step 1: parameter 'b.") and "use_reentrant=False" in last["alone"]


def test_gradients_of_something_else_are_not_a_step(runs: dict[str, list[Any]]) -> None:
    for result in runs["other_gradients"]:
        assert result == {"steps": [0, 1, 3], "same": True}


def test_frozen_and_unused_parameters_do_not_move(runs: dict[str, list[Any]]) -> None:
    for result in runs["kept_as_they_were"]:
        assert len(result["moved"]) == 4 and not any(result["moved"].values())
        assert not any(result["gradients"].values())
        assert result["used"], "one contributor's gradient reaches every rank"
        assert result["same"]
        assert result["entries"], "the user's optimiser has no entry that it did not make"


def test_a_pass_that_was_thrown_away_leaves_nothing_behind(runs: dict[str, list[Any]]) -> None:
    for result in runs["thrown_away"]:
        dropped = {name: equal for name, equal in result["equal"].items() if "masked" not in name}
        assert len(dropped) == 7 and all(dropped.values()), dropped
        # Its gradient is zero, but its samples are among those over which the mean is taken.
        assert not result["equal"]["Layers masked"] and not result["equal"]["TiedLayers masked"]


def test_a_measured_step_with_an_empty_batch_is_not_judged(runs: dict[str, list[Any]]) -> None:
    for result in runs["without_samples"]:
        assert result == {"measured": [1, 3, 7], "same": True}


def test_an_interrupted_rank_tells_the_others_and_keeps_its_exception(runs: dict[str, list[Any]]) -> None:
    first, last = (result["said"] for result in runs["interrupted"])
    assert last == "KeyboardInterrupt: from the user"
    assert first == "Error: step 1: rank 1 has failed; its own message says why"


def test_a_backward_pass_that_raises_leaves_no_thread_waiting(runs: dict[str, list[Any]]) -> None:
    for result in runs["given_up"]:
        assert result["raised"] == "in backward" and result["waiting"]
        assert result["again"] == ["step 1: its backward pass did not end: training cannot go on from here"] * 2
        assert result["ended"] and result["trainable"] and result["state"] == "BROKEN"


def test_without_a_plan_it_waits_for_the_first_forward_pass_with_gradients(runs: dict[str, list[Any]]) -> None:
    for result in runs["awaiting_plan"]:
        explained = "partial backpropagation, 2 workers: the plan (ladder) follows the first batch"
        assert result["before"] == ["AWAITING_PLAN", [], 0, 0, explained]
        assert result["refused"] == [
            "resume: expected before the first step, and with a plan",
            "batches: the plan is made on the first batch: give a plan to let it make the batches",
        ]
        assert (result["evaluated"], result["armed"]) == ("AWAITING_PLAN", "ARMED")
        assert result["after"] == ["IDLE", [1, 2], 1]


def test_a_dropped_wrapper_is_freed_and_the_model_works_without_it(runs: dict[str, list[Any]]) -> None:
    for result in runs["released"]:
        assert result == {"released": [True, True], "gradient": True}


def test_one_rank_is_told_that_it_has_no_noise_to_measure() -> None:
    (explained,) = run_ranks(depth_user_code.one_rank, ranks=1)
    assert explained.splitlines()[-1] == "guard: one rank has no noise to measure; full depth"

"""The second line in scripts as they are: gradients are clipped, scaled, read and written as with torch's DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.emulate.launch import launch
from tests.paths import ROOT
from tests.ranks import run_all

from . import gradient_scenarios as scenarios
from .test_forward_overlap import CLOSE

Runs = Callable[[str], list[Any]]

THEN = ("barrier", "train this model", "train another model")
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{f"clip {way}": (scenarios.clips, {"way": way}) for way in scenarios.CLIPS},
    "not finite": (scenarios.not_finite, {}),
    "scaled": (scenarios.scaled, {"clip": False}),
    "scaled and clipped": (scenarios.scaled, {"clip": True}),
    "reads": (scenarios.reads, {}),
    **{f"write {way}": (scenarios.writes, {"way": way}) for way in scenarios.WRITES},
    **{f"alone, then {then}": (scenarios.alone, {"then": then}) for then in THEN},
    "late": (scenarios.late, {}),
    "kept": (scenarios.kept, {}),
    "at odds": (scenarios.at_odds, {}),
    "full": (scenarios.full, {}),
}


@pytest.fixture(scope="module")
def two() -> Runs:
    """Results of the scenarios on two ranks, by name: one per rank. They run once, in the same processes."""
    reports = run_all(list(CALLS.values()))
    return lambda name: [rank[list(CALLS).index(name)] for rank in reports]


@pytest.mark.parametrize("way", scenarios.CLIPS)
def test_torchs_own_functions_clip_by_the_norm_of_all_ranks(two: Runs, way: str) -> None:
    for found in two(f"clip {way}"):
        assert found["difference"] < CLOSE and found["norms"] < CLOSE
        # One for all norms of a call; values are clipped without any.
        assert found["collectives"] == (0 if way.startswith("value") else 1)


def test_a_norm_that_is_not_finite_is_seen_by_all_ranks(two: Runs) -> None:
    for said in two("not finite"):
        assert said[:2] == said[2:4] and said[4:6] == said[6:]
        assert "order 2.0" in said[0] and "order inf" in said[4] and said[1::2] == ["nan"] * 4


@pytest.mark.parametrize("name", ["scaled", "scaled and clipped"])
def test_gradscaler_skips_the_same_steps_on_all_ranks(two: Runs, name: str) -> None:
    for found in two(name):
        assert found["difference"] < 1e-9  # GradScaler's factors are float32
        assert found["same scales"] and found["skipped"] == [2, 2, 5, 5]


def test_gradients_read_whole_are_torchs_and_are_counted(two: Runs) -> None:
    for result in two("reads"):
        wrong = {way: difference for way, difference in result["found"].items() if not difference < CLOSE}
        assert not wrong
        assert "read whole" not in result["before"]
        assert f"{result['split']} read whole" in result["line"] and "MiB gathered" in result["line"]


@pytest.mark.parametrize("way", scenarios.WRITES)
def test_gradients_that_are_written_take_effect_as_in_torch(two: Runs, way: str) -> None:
    assert all(found < CLOSE for found in two(f"write {way}"))


@pytest.mark.parametrize("then", THEN)
def test_a_rank_alone_gets_one_line_within_seconds_and_training_goes_on(two: Runs, then: str) -> None:
    first, second = two(f"alone, then {then}")
    assert second["said"] == {} and set(first["said"]) == set(scenarios.ALONE)
    for what, (line, seconds) in first["said"].items():
        assert "by rank 0 and not by rank 1" in line and "\n" not in line and seconds < 8, (what, line)
        assert ("dovetail.full_state(optimizer)" in line) == ("state" in what)
    assert all(found["difference"] < CLOSE and found["state"] < CLOSE for found in (first, second))


def test_a_rank_that_computes_is_waited_for(two: Runs) -> None:
    for found in two("late"):
        assert found["said"] == "nothing was refused" and found["seconds"] > 2 * found["patience"]


def test_a_gradient_kept_beyond_its_iteration_does_not_show_another(two: Runs) -> None:
    for said in two("kept"):
        assert "no longer in .grad" in said and "p.grad.clone()" in said and "\n" not in said


def test_ranks_that_ask_for_different_gradients_are_told_so(two: Runs) -> None:
    first, second = two("at odds")
    assert first == second and "rank 0 asks for the gradient of" in first and ", rank 1 for the gradient of" in first


def test_full_state_gives_rank_0_torchs_format(two: Runs) -> None:
    first, second = two("full")
    assert first["worst"] < CLOSE and first["groups"] and second["empty"]


def test_a_rank_that_outlives_the_first_one_has_nothing_to_say() -> None:
    results = launch(
        ["-m", "tests.train.data_parallel.gradient_scenarios"],
        ranks=2,
        timeout=120,
        env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert [r.code for r in results] == [0, 0] and not any("TCPStore" in line for r in results for line in r.stderr)

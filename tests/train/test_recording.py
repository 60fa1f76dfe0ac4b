"""Recordings of real iterations: the same promise in every training mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_all

from . import recording_scenarios

MODES = ("merge", "overlap", "burst")
Runs = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Results of the scenarios, by name: one per rank. They run once, in the same two processes."""
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "merged": (recording_scenarios.merged, {}),
        "overlapped": (recording_scenarios.overlapped, {}),
        **{mode: (recording_scenarios.nested, {"mode": mode}) for mode in MODES},
    }
    reports = run_all(list(calls.values()))
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


def test_a_merged_recording_shows_every_bucket_and_leaves_gradients_alone(runs: Runs) -> None:
    for rank, result in enumerate(runs("merged")):
        assert result["equal"] and result["iterations"] == 3
        assert result["bytes"] == 3 * result["parameters"]
        assert result["buckets"] == 3 * len(result["used"])
        assert result["tracks"] == [f"rank {rank}/compute", f"rank {rank}/network"]
        assert "planning is still going on" in result["refused"]


def test_an_overlapped_recording_shows_both_halves_of_every_bucket(runs: Runs) -> None:
    for rank, result in enumerate(runs("overlapped")):
        assert result["kinds"] == ["backward", "communication", "forward", "optimizer"]
        assert result["tracks"] == [f"rank {rank}/compute", f"rank {rank}/network"]
        assert result["scatters"] == result["gathers"] == 3 * result["buckets"] and result["backwards"] == 3
        assert result["start"] == 0 and not result["watching"]


@pytest.mark.parametrize("mode", MODES)
def test_a_recording_inside_another_has_its_own_iterations_and_the_outer_one_has_all(runs: Runs, mode: str) -> None:
    for result in runs(mode):
        starts = result.pop("starts")
        lost = 2 if mode == "merge" else 0  # iterations in which torch puts the buckets of a new reducer in order
        per = result["inner"]  # backward spans of one iteration: one for each bucket where torch reduces them
        assert per > 0
        assert result == {"outer": (9 - lost) * per, "inner": per, "second": 2 * per, "later": (3 - lost) * per}
        assert all(start >= 0 for start in starts)

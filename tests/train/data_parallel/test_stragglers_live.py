"""Ranks that are slow at a known place in real training are named, while planning and later on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.emulate.shaped_network import available, shaped
from tests.ranks import run_all

from . import straggler_scenarios as scenarios

Check = Callable[[list[Any]], None]
Runs = Callable[[str, Check], None]
TRIES = 3
"""Runs of a scenario: on a machine that others use, a rank that waits for a core is slow, and may be named for it."""


def results(calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]], ranks: int) -> Runs:
    """Checks results by name, one for each rank. All scenarios run in the same processes; one that fails runs again."""
    reports = run_all(list(calls.values()), ranks=ranks)

    def checked(name: str, check: Check) -> None:
        found = [rank[list(calls).index(name)] for rank in reports]
        for _ in range(TRIES - 1):
            try:
                check(found)
            except AssertionError:
                found = [rank[0] for rank in run_all([calls[name]], ranks=ranks)]
            else:
                return
        check(found)

    return checked


@pytest.fixture(scope="module")
def two() -> Runs:
    slow_at = scenarios.slow_at
    return results(
        {
            **{phase: (slow_at, {"phase": phase, "rank": 0}) for phase in ("input", "forward", "backward", "network")},
            "equal": (slow_at, {"phase": "", "rank": 0}),
            **{
                f"{phase}, overlap": (slow_at, {"phase": phase, "rank": 1, "overlap": True})
                for phase in ("input", "forward", "backward")
            },
            "equal, overlap": (slow_at, {"phase": "", "rank": 0, "overlap": True}),
            "dropped": (scenarios.dropped_while_watched, {}),
            "later": (scenarios.becomes_slow, {"rank": 1, "overlap": False}),
            "later, overlap": (scenarios.becomes_slow, {"rank": 1, "overlap": True}),
            "never": (scenarios.becomes_slow, {"rank": -1, "overlap": False}),
            "apart": (scenarios.looks_apart, {}),
        },
        ranks=2,
    )


@pytest.fixture(scope="module")
def three() -> Runs:
    return results(
        {phase: (scenarios.slow_at, {"phase": phase, "rank": 2}) for phase in ("input", "forward", "backward")},
        ranks=3,
    )


LAYERS = {"input": "", "network": "", "forward": "blocks.1", "backward": "blocks.1"}


def check_named(results: list[Any], phase: str, rank: int) -> None:
    for result in results:
        assert result["slow"], result
        found_rank, found_phase, layer, seconds, share = result["slow"][0]
        assert (found_rank, found_phase, layer) == (rank, phase, LAYERS[phase]), result
        assert seconds == pytest.approx(scenarios.DELAY, rel=0.5)
        assert share == pytest.approx(seconds / result["iteration"])
        assert f"rank {rank} is slow" in result["explained"][0] and f"in {phase}" in result["explained"][0]
        assert min(result["waiting"]) == result["waiting"][rank], "the others wait for it"
        assert result["hooks"] == 0


def check_unnamed(results: list[Any]) -> None:
    for result in results:
        assert result["slow"] == [] and "no rank is slow" in result["explained"][0], result


def check_named_later(results: list[Any]) -> None:
    first, second = results
    assert (first["state"], first["before"]) == ("done", [])
    (line,) = first["lines"]
    assert line.startswith("dovetail: rank 1 is slow: ") and line.endswith("ms a step, in forward (blocks.1)")
    assert first["slow"][0] == [1, "forward", "blocks.1"]
    assert second["lines"] == []


def check_silent(results: list[Any]) -> None:
    assert [result["lines"] for result in results] == [[], []]


def check_equal(results: list[Any]) -> None:
    first, second = results
    assert first == second


def check_gone(results: list[Any]) -> None:
    assert results == [0, 0]


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "network"])
def test_a_slow_rank_of_two_is_named_by_phase_and_layer_on_both(two: Runs, phase: str) -> None:
    two(phase, lambda found: check_named(found, phase, 0))


@pytest.mark.parametrize("phase", ["input", "forward", "backward"])
def test_so_it_is_with_an_optimiser_of_dovetails(two: Runs, phase: str) -> None:
    two(f"{phase}, overlap", lambda found: check_named(found, phase, 1))


@pytest.mark.parametrize("phase", ["input", "forward", "backward"])
def test_a_slow_rank_of_three_is_named(three: Runs, phase: str) -> None:
    three(phase, lambda found: check_named(found, phase, 2))


@pytest.mark.parametrize("name", ["equal", "equal, overlap"])
def test_equal_ranks_are_not_named(two: Runs, name: str) -> None:
    two(name, check_unnamed)


def test_a_model_that_is_dropped_while_it_is_watched_leaves_no_hooks(two: Runs) -> None:
    two("dropped", check_gone)


@pytest.mark.parametrize("name", ["later", "later, overlap"])
def test_a_rank_that_becomes_slow_later_is_named_once_in_the_first_ranks_log(two: Runs, name: str) -> None:
    two(name, check_named_later)


def test_looks_ask_nothing_of_ranks_that_look_at_other_times(two: Runs) -> None:
    two("apart", check_equal)


def test_where_no_rank_becomes_slow_nothing_is_logged(two: Runs) -> None:
    two("never", check_silent)


@pytest.mark.skipif(available() is not None, reason=available() or "")
def test_a_rank_behind_a_slow_link_is_named_though_all_ranks_wait_alike() -> None:
    with shaped(3, rate="500mbit", burst="32kb") as network:
        slow = f"tc -n {network.namespaces[1]} qdisc change dev {network.interface} root tbf"
        subprocess.run(f"{slow} rate 50mbit burst 32kb latency 200ms".split(), check=True, timeout=20)
        call = scenarios.slow_at, {"phase": "", "rank": 0, "width": 160}
        for (result,) in run_all([call], ranks=3, network=network):
            assert result["slow"][0][:3] == [1, "network", "(its link)"], result
            assert "rank 1 is slow" in result["explained"][0] and "in network (its link)" in result["explained"][0]

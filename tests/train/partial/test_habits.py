"""PartialBackprop beside what user code does: checkpointing, freezing, dropped passes, interruptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.train.partial.noise import OptimiserMetric
from dovetail.train.partial.segments import Leaf
from dovetail.train.words import plain
from tests.ranks import run_all, run_ranks

from . import depth_habits as habits

SCENARIOS: list[Callable[..., Any]] = [
    habits.reentrant,
    habits.other_gradients,
    habits.kept_as_they_were,
    habits.thrown_away,
    habits.without_samples,
    habits.interrupted,
    habits.given_up,
]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    """What each scenario returned on each of two ranks."""
    reports = run_all([(scenario, {}) for scenario in SCENARIOS])
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


def test_gradients_that_somebody_asks_for_besides_are_no_step(runs: dict[str, list[Any]]) -> None:
    for result in runs["other_gradients"]:
        assert result == {"steps": [0, 1, 3], "same": True}


def test_what_is_frozen_or_unused_stays_where_it_is(runs: dict[str, list[Any]]) -> None:
    for result in runs["kept_as_they_were"]:
        assert len(result["moved"]) == 4 and not any(result["moved"].values())
        assert not any(result["gradients"].values())
        assert result["used"], "one contributor's gradient reaches everybody"
        assert result["same"]
        assert result["entries"], "the user's optimiser has no entry that it did not make"


def test_a_pass_that_was_thrown_away_leaves_nothing_behind(runs: dict[str, list[Any]]) -> None:
    for result in runs["thrown_away"]:
        dropped = {name: equal for name, equal in result["equal"].items() if "masked" not in name}
        assert len(dropped) == 4 and all(dropped.values())
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
        assert "its backward pass did not end" in result["again"]
        assert result["gone"]


def test_one_rank_is_told_that_it_has_no_noise_to_measure() -> None:
    (explained,) = run_ranks(habits.one_rank, ranks=1)
    assert explained.splitlines()[-1] == "guard: one rank has no noise to measure; full depth"


def test_a_parameter_without_gradients_does_not_hide_the_optimisers_metric() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    leaves = [Leaf("used", 0, used, used), Leaf("unused", 0, unused, unused)]
    for optimizer, known in (
        (torch.optim.Adam([used, unused]), True),
        (torch.optim.SGD([used, unused], lr=0.1), False),
    ):
        metric = OptimiserMetric([used, unused])
        used.grad = torch.full((2,), 2.0)
        optimizer.step()
        metric.seen(optimizer)
        assert metric.known(leaves) == known
        assert unused not in optimizer.state
    metric.seen(torch.optim.Adam([used, unused]))
    assert not metric.known(leaves), "before its first step"


def test_gloos_messages_lose_the_place_in_its_sources() -> None:
    raw = "[/__w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer. This is typically…"
    assert plain(RuntimeError(raw)) == "Read error [127.0.0.1]:9: Connection reset by peer"
    assert plain(KeyboardInterrupt()) == "KeyboardInterrupt"

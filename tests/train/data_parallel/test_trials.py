"""The contest of plans in real iterations: which plan runs how often, and what is reported of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail import planning
from dovetail.train import agree
from dovetail.train.data_parallel import trials
from dovetail.train.data_parallel.trials import Trial
from tests.planning.merge.oracle import made_network, made_profile


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "smallest", lambda mine, group, device: mine)
    monkeypatch.setattr(agree, "from_first", lambda value, group, device: value)


def contest(*seconds: list[float], rounds: int) -> tuple[int, list[int], tuple[Trial, ...]]:
    """(the kept plan, turns that each plan got, the last report); `seconds` are those of each plan by round."""
    plans = [planning.plan(made_profile([1000] * 6, [0.1] * 6), made_network(0.05, 1e-4))] * len(seconds)
    told: list[tuple[Trial, ...]] = []
    turns = [0] * len(plans)
    now = [0]

    def use(i: int) -> None:
        now[0] = i
        turns[i] += 1

    tuning, nobody = trials.Tuning(rounds=rounds, steps=2), None
    going: Any = trials.compete(
        plans, tuning, nobody, torch.device("cpu"), use=use, seconds=lambda step: step, tell=told.append  # type: ignore[arg-type]
    )  # fmt: skip
    next(going)
    while True:
        try:
            going.send(seconds[now[0]][turns[now[0]] - 1])
        except StopIteration as end:
            return end.value, turns, told[-1]


def test_a_plan_that_is_slow_in_the_last_round_was_not_dropped_early() -> None:
    kept, turns, told = contest([1.0, 1.0], [1.05, 1.3], rounds=2)
    assert (kept, turns) == (0, [2, 2]) and [t.dropped for t in told] == [False, False]
    kept, turns, told = contest([1.0], [1.2], rounds=1)
    assert (kept, turns) == (0, [1, 1]) and [t.dropped for t in told] == [False, False]


def test_a_plan_that_is_slow_in_an_earlier_round_does_not_run_again() -> None:
    kept, turns, told = contest([1.0, 1.0], [1.2, 0.1], [0.5, 0.5], rounds=2)
    assert (kept, turns) == (2, [2, 1, 2]) and [t.dropped for t in told] == [False, True, False]

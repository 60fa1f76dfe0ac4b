"""The contest of plans in real iterations: which plan runs how often, who wins, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail import planning
from dovetail.core.errors import Error
from dovetail.train import agree
from dovetail.train.data_parallel.tuning import trials
from dovetail.train.data_parallel.tuning.trials import Trial, TrialPlan, Tuning, Verdict
from dovetail.train.data_parallel.tuning.tuning_report import TuningReport
from tests.planning.merge.oracle import made_network, made_profile

Array = npt.NDArray[np.float64]
PLAN = planning.plan(made_profile([1000] * 6, [0.1] * 6), made_network(0.05, 1e-4))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "smallest", lambda mine, group, device: mine)
    coins = count()
    monkeypatch.setattr(agree, "from_first", lambda value, group, device: next(coins))


class Contest:
    """A contest of plans whose iteration `number` takes `seconds(plan, number)`."""

    def __init__(self, plans: int, seconds: Callable[[int, int], float], tuning: Tuning) -> None:
        self.told: list[tuple[Trial, ...]] = []
        self.used: list[int] = []
        self.iterations = 0
        contenders = [TrialPlan(plan=PLAN, label=f"plan {i}", predicted=1.0) for i in range(plans)]
        nobody: Any = None
        course: Any = trials.compete(
            contenders,
            tuning,
            nobody,
            torch.device("cpu"),
            use=self.used.append,
            seconds=lambda step: step,
            tell=self.told.append,
        )
        next(course)
        while True:
            try:
                course.send(seconds(self.used[-1], self.iterations))
                self.iterations += 1
            except StopIteration as end:
                self.verdict: Verdict = end.value
                return


def test_the_fastest_of_steady_plans_is_kept_with_its_gain() -> None:
    contest = Contest(4, lambda plan, _: (1.0, 1.1, 0.8, 0.9)[plan], Tuning())
    assert contest.verdict.kept == contest.verdict.challenger == 2
    duel = contest.verdict.duel
    assert duel is not None and duel.gain == duel.low == duel.high == pytest.approx(0.2)
    assert set(contest.used[4:]) == {0, 2}, "only two are left in the duel"
    assert contest.iterations <= 70


def test_a_contest_that_the_first_plan_wins_at_once_has_no_duel() -> None:
    contest = Contest(3, lambda plan, _: 1.0 + 0.1 * plan, Tuning())
    assert contest.verdict == Verdict(kept=0) and contest.used == [0, 1, 2]


def test_a_gain_below_the_margin_is_not_worth_a_change() -> None:
    contest = Contest(2, lambda plan, _: 1.0 - 0.005 * plan, Tuning(margin=0.01))
    assert contest.verdict.kept == 0 and contest.verdict.duel is not None
    assert Contest(2, lambda plan, _: 1.0 - 0.015 * plan, Tuning(margin=0.01)).verdict.kept == 1


def test_a_plan_that_is_slow_in_an_earlier_heat_does_not_run_again() -> None:
    tuning = Tuning(rounds=2, steps=2)
    contest = Contest(3, lambda plan, number: (1.0, 1.2 if number < 12 else 0.1, 0.5)[plan], tuning)
    assert contest.used.count(1) == 1 and contest.verdict.kept == 2
    assert [t.dropped for t in contest.told[-1]] == [False, True, False]
    last = Contest(2, lambda plan, number: (1.0, 1.05 if number < 8 else 1.3)[plan], tuning)
    assert [t.steps for t in last.told[-1]] == [4, 4]
    assert not any(t.dropped for t in last.told[-1]), "after the last heat nobody drops out"


def test_a_contest_never_takes_longer_than_it_said() -> None:
    rng = np.random.default_rng(0)
    tuning = Tuning()
    others = tuning.warmup + 2 * tuning.measure + tuning.settle
    for _ in range(50):
        assert Contest(4, lambda *_: float(np.exp(rng.normal(0, 0.2))), tuning).iterations + others < tuning.most


NOISES: dict[str, Callable[[np.random.Generator, float, int], Array]] = {
    "normal": lambda rng, size, n: rng.normal(0, size, n),
    "heavy tails": lambda rng, size, n: size * rng.standard_t(2, n),
    "spikes": lambda rng, size, n: rng.normal(0, size, n) + (rng.random(n) < 0.1) * rng.exponential(0.7, n),
    "drift": lambda rng, size, n: rng.normal(0, size, n) + np.linspace(0, 0.5, n),
    "random walk": lambda rng, size, n: rng.normal(0, size, n) + np.cumsum(rng.normal(0, size / 3, n)),
    "bursts": lambda rng, size, n: rng.normal(0, size, n) + 0.4 * (np.cumsum(rng.random(n) < 0.1) % 2),
}
RUNS = 120


def verdicts(noise: str, size: float, gain: float) -> list[Verdict]:
    """Of many contests in which the second of four plans is faster by `gain`, and all meet the same noise."""
    rng = np.random.default_rng(list(NOISES).index(noise))

    def contest() -> Verdict:
        factors = np.exp(NOISES[noise](rng, size, Tuning().most))
        return Contest(4, lambda plan, k: float(factors[k]) * (1 - gain * (plan == 1)), Tuning()).verdict

    return [contest() for _ in range(RUNS)]


@pytest.mark.parametrize("size", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_wins_no_contest(noise: str, size: float) -> None:
    assert sum(v.kept > 0 for v in verdicts(noise, size, 0.0)) <= 0.05 * RUNS


@pytest.mark.parametrize("noise", ["normal", "drift", "spikes"])
def test_a_gain_of_five_percent_is_found_in_noise_of_two_and_claimed_as_it_is(noise: str) -> None:
    found = verdicts(noise, 0.02, 0.05)
    gains = [v.duel.gain for v in found if v.kept == 1 and v.duel is not None]
    assert len(gains) >= 0.9 * RUNS
    assert np.mean(gains) == pytest.approx(0.05, abs=0.003)
    inside = [v.duel.low <= 0.05 <= v.duel.high for v in found if v.kept == 1 and v.duel is not None]
    assert np.mean(inside) >= 0.8


def test_a_gain_found_in_much_noise_is_measured_again_by_pairs_that_did_not_choose_the_plan() -> None:
    noisy = [v.duel for v in verdicts("normal", 0.1, 0.1) if v.kept == 1]
    gains = [duel.gain for duel in noisy if duel is not None]
    assert len(gains) > 10 and np.mean(gains) == pytest.approx(0.1, abs=0.03)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_the_signed_rank_test_counts_the_signs_that_are_as_good(values: list[int]) -> None:
    sizes = np.abs(values)
    ranks = [(np.sum(sizes < s) + np.sum(sizes <= s) + 1) / 2 if s else 0.0 for s in sizes]
    seen = sum(r for r, v in zip(ranks, values, strict=True) if v > 0)
    as_good = [np.dot(ranks, signs) >= seen - 1e-9 for signs in product((0, 1), repeat=len(values))]
    assert trials.signed_rank(values) == pytest.approx(np.mean(as_good))


@given(st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=12), st.floats(-0.2, 0.2))
def test_a_comparison_moves_with_what_it_compares(differences: list[float], shift: float) -> None:
    one, other = trials.compared(differences), trials.compared([d + shift for d in differences])
    assert one.low <= one.gain <= one.high
    for before, after in ((one.low, other.low), (one.gain, other.gain), (one.high, other.high)):
        assert 1 - after == pytest.approx((1 - before) * np.exp(-shift))


def test_an_interval_excludes_zero_where_the_test_is_sure() -> None:
    for signs in product((1, -1), repeat=6):
        found = trials.compared([s * (k + 1) for k, s in enumerate(signs)])
        assert (found.low > 0) == (found.chance <= trials.ERROR)


def report(verdict: Verdict, told: tuple[Trial, ...]) -> str:
    done = TuningReport(state="done", trials=told, verdict=verdict, kept=told[verdict.kept])
    assert done.gain == (verdict.duel.gain if verdict.kept and verdict.duel else 0.0)
    return str(done)


def test_explain_gives_a_gain_with_its_interval_and_the_noise() -> None:
    contest = Contest(2, lambda plan, k: (1.5 if k in (3, 30, 31) else 1.0) * (1 - 0.2 * plan), Tuning())
    text = report(contest.verdict, contest.told[-1])
    assert "20.0% less time a step than plan 0 (between " in text and "pairs of turns" in text
    assert "disturbed ones cost" in text and "cost 0.0%" not in text


def test_explain_claims_no_gain_within_the_noise() -> None:
    told = Contest(2, lambda plan, _: 1.0 - 0.1 * plan, Tuning()).told[-1]
    unsure = trials.compared([0.3, -0.2, 0.25, -0.1, 0.2, 0.1])
    text = report(Verdict(kept=0, challenger=1, duel=unsure), told)
    assert "vary too much to tell plan 1 from plan 0" in text and "no gain is claimed" in text
    small = trials.compared([0.004, 0.005, 0.006, 0.004, 0.005, 0.006])
    assert "gains too little" in report(Verdict(kept=0, challenger=1, duel=small), told)
    assert "a tie, not a gain" in report(Verdict(kept=0), told)


def test_a_tuning_that_cannot_decide_is_refused() -> None:
    for name, value in {"duel": 4, "duel_steps": 0, "settle": 1, "candidates": 1}.items():
        with pytest.raises(Error, match=f"Tuning.{name}: expected at least"):
            replace(Tuning(), **{name: value})

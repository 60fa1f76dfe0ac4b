"""The statistics of a contest: the error is what it says, however often one looks, and intervals go with the test."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.train.data_parallel.tuning import verdict
from dovetail.train.data_parallel.tuning.verdict import ALL_SIGNS, DOUBTED, ERROR, LEAST_PAIRS, LONGEST, spending


def one_look(_: int) -> float:
    """No error is spent before the last look."""
    return 0.0


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_one_look_is_the_signed_rank_test_with_ties_told_apart_by_the_sum(values: list[int]) -> None:
    sizes = np.abs(values)
    ranks = [(np.sum(sizes < s) + np.sum(sizes <= s) + 1) / 2 if s else 0.0 for s in sizes]

    def of(signs: tuple[int, ...]) -> tuple[float, float]:
        return float(np.dot(ranks, signs)), float(np.dot(sizes, signs))

    seen = of(tuple(int(v > 0) for v in values))
    as_good = [of(signs) >= seen for signs in product((0, 1), repeat=len(values))]
    assert verdict.chance(values, one_look) == pytest.approx(np.mean(as_good))


def stops(differences: list[float], pairs: int, error: float) -> bool:
    """Whether a duel that looks after every pair would keep the challenger at any look."""
    spent = spending(pairs, error)
    looks = range(LEAST_PAIRS, len(differences) + 1)
    return any(verdict.chance(differences[:n], spent) <= spent(n) for n in looks)


@settings(max_examples=15)
@given(
    st.lists(st.floats(0.001, 1.0), min_size=5, max_size=9), st.sampled_from((5, 7)), st.sampled_from((ERROR, DOUBTED))
)
def test_of_all_ways_in_which_coins_can_fall_at_most_the_error_stops_at_any_look(
    sizes: list[float], pairs: int, error: float
) -> None:
    """Whatever the sizes of the differences are: that is all that noise can choose if both plans are equally fast."""
    signs = product((1, -1), repeat=len(sizes))
    stopped = [stops([s * d for s, d in zip(one, sizes, strict=True)], pairs, error) for one in signs]
    assert np.mean(stopped) <= spending(pairs, error)(len(sizes)) <= error


def test_the_whole_error_is_spent_at_the_last_look_and_never_less_than_before() -> None:
    for pairs in (5, 7, 10):
        spent = [spending(pairs)(n) for n in range(1, LONGEST * pairs + 1)]
        assert spent == sorted(spent) and spent[-1] == pytest.approx(ERROR)


def test_more_pairs_than_can_be_counted_are_sampled_without_more_error() -> None:
    rng = np.random.default_rng(0)
    pairs = ALL_SIGNS + 2
    chances = [verdict.chance(rng.normal(0, 1, pairs), one_look) for _ in range(400)]
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(chances) <= level) == pytest.approx(level, abs=3 * np.sqrt(level / 400))


@given(st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=9), st.floats(-0.2, 0.2))
def test_a_judgement_moves_with_what_it_judges(differences: list[float], shift: float) -> None:
    one, other = verdict.judged(differences, 7), verdict.judged([d + shift for d in differences], 7)
    assert one.low <= one.gain <= one.high
    for before, after in ((one.low, other.low), (one.gain, other.gain), (one.high, other.high)):
        assert 1 - after == pytest.approx((1 - before) * np.exp(-shift), abs=1e-6)


def test_an_interval_excludes_zero_where_the_test_is_sure() -> None:
    for signs in product((1, -1), repeat=7):
        found = verdict.judged([s * (k + 1) for k, s in enumerate(signs)], 7)
        assert (found.low > 0) == (found.chance <= spending(7)(7)), signs


def test_an_interval_holds_the_true_gain_however_many_looks_were_taken() -> None:
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(300):
        differences = list(rng.normal(0.05, 0.05, LEAST_PAIRS))
        while not stops(differences, 7, ERROR) and len(differences) < 10:
            differences.append(float(rng.normal(0.05, 0.05)))
        found = verdict.judged(differences, 7)
        inside.append(found.low <= 1 - np.exp(-0.05) <= found.high)
    assert np.mean(inside) >= 0.9


def test_the_slowest_iteration_of_a_turn_does_not_count() -> None:
    assert verdict.turn_time([1.0, 9.0, 1.0, 1.0]) == verdict.turn_time([1.0, 1.0, 9.0]) == 0.0
    assert verdict.turn_time([1.0, np.exp(2)]) == pytest.approx(1.0), "of two both count"

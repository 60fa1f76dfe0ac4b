"""Estimates survive what a busy machine adds, and say how sure they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.profile import Quantiles, exactly
from dovetail.measure import stats


def disturbed(true: float, *, spread: float, share: float, count: int, seed: int) -> stats.FloatArray:
    """Repeats of a duration with a natural spread, a share of which others disturb, by amounts without a mean."""
    random = np.random.default_rng(seed)
    times = true * random.uniform(1 - spread, 1 + spread, count)
    hit = random.permutation(count) < round(share * count)
    return times + hit * true * (0.1 + random.pareto(0.8, count))


@given(
    true=st.floats(1e-6, 10),
    spread=st.floats(0, 0.1),
    share=st.floats(0, 0.4),
    count=st.integers(10, 60),
    seed=st.integers(0, 2**20),
)
def test_heavy_disturbances_of_two_fifths_of_the_repeats_move_the_estimate_by_little(
    true: float, spread: float, share: float, count: int, seed: int
) -> None:
    samples = disturbed(true, spread=spread, share=share, count=count, seed=seed)
    estimate = float(stats.typical(samples))
    # Disturbances of a tenth and more cannot all be told from the natural spread, but none beyond the window counts.
    assert true * (1 - spread) <= estimate <= true * (1 + spread) * 1.2
    assert estimate == pytest.approx(stats.quantiles(stats.undisturbed(samples)).median)
    assert len(stats.undisturbed(samples)) >= (1 - share) * count - 1


@given(spread=st.floats(0, 0.15), count=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_on_a_quiet_machine_the_estimate_is_the_median(spread: float, count: int, seed: int) -> None:
    samples = disturbed(1.0, spread=spread, share=0, count=count, seed=seed)
    assert float(stats.typical(samples)) == pytest.approx(float(np.median(samples)))
    assert stats.lost_of_all([samples]) == 0.0


@given(seed=st.integers(0, 2**20), share=st.floats(0, 0.4))
def test_noise_is_about_what_the_estimates_of_other_measurements_differ_by(seed: int, share: float) -> None:
    def estimate(k: int) -> float:
        return float(stats.typical(disturbed(1.0, spread=0.1, share=share, count=40, seed=seed + k)))

    noise = stats.noise(disturbed(1.0, spread=0.1, share=share, count=40, seed=seed))
    differ = 1.645 * float(np.std([estimate(k) for k in range(1, 40)]))
    assert differ / 4 <= noise <= 4 * differ


def test_noise_of_equal_repeats_is_none_and_of_one_is_unknown() -> None:
    assert stats.noise([[0.5] * 5, [0.2] * 5]) == pytest.approx(0.0, abs=1e-12)
    assert stats.noise([[0.0] * 5]) == 0.0
    assert stats.noise([[0.5]]) == stats.UNKNOWN


def test_repeats_that_share_nothing_are_all_noise() -> None:
    assert stats.noise([10.0**k for k in range(6)]) > 0.5


def test_the_lost_share_is_what_disturbed_repeats_took_beyond_the_others() -> None:
    assert stats.lost_of_all([[1.0] * 9 + [11.0]]) == pytest.approx(0.5)
    assert stats.lost_of_all([[1.0] * 9 + [11.0], [20.0]]) == pytest.approx(0.25)
    assert stats.lost_of_all([]) == stats.lost_of_all([[0.0]]) == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=10))
def test_no_smaller_size_takes_longer_and_only_what_took_longer_changes(medians: list[float]) -> None:
    times = [Quantiles(median=m, low=m / 2, high=2 * m, samples=3) for m in medians]
    found = [q.median for q in stats.never_less(times)]
    assert found == pytest.approx([min(medians[i:]) for i in range(len(medians))])
    assert all(
        new is old for new, old, m, f in zip(stats.never_less(times), times, medians, found, strict=True) if m == f
    )


def test_times_as_once_measured_on_a_busy_machine() -> None:
    assert [q.median for q in stats.never_less([exactly(0.202), exactly(0.237), exactly(0.114)])] == [0.114] * 3

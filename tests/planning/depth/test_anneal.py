"""The guard's bound at the present learning rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.planning.depth.anneal import Rate, fewest_at, kept
from dovetail.planning.depth.guard import Moments, fewest, retained

noises = st.floats(0, 1e6)
rates = st.floats(1e-6, 1)


@given(noises, rates, st.floats(0.01, 1), st.floats(1, 1e4))
def test_less_noise_more_samples_and_smaller_steps_keep_more(
    noise: float, rate: float, share: float, batch: float
) -> None:
    value = kept(noise, share * batch, batch, rate=rate)
    assert value <= 1 + 1e-9
    assert kept(noise, batch, batch, rate=rate) == pytest.approx(1)
    assert value <= kept(noise, min(1.0, share * 1.5) * batch, batch, rate=rate) + 1e-9
    assert value <= kept(noise, share * batch, batch, rate=rate / 2) + 1e-9
    assert value <= kept(noise / 2, share * batch, batch, rate=rate) + 1e-9


@given(noises, st.floats(0.01, 1))
def test_at_the_peak_the_bound_is_stricter_than_the_guards_own(noise: float, share: float) -> None:
    """1 − (x − 1) ≤ 1/x: a fixed step loses more to noise than one that may shrink."""
    assert kept(noise, share * 64, 64, rate=1.0) <= retained(noise, share * 64, 64) + 1e-9


def test_it_is_the_gain_of_a_noisy_step_on_a_parabola() -> None:
    curvature, noise, batch = 3.0, 40.0, 32.0
    best = 1 / (curvature * (1 + noise / batch))
    for rate in (1.0, 0.5, 0.1):
        for have in (8.0, 16.0, 32.0):
            step = rate * best

            def gain(samples: float, step: float = step) -> float:
                return step - step**2 * curvature * (1 + noise / samples) / 2

            assert kept(noise, have, batch, rate=rate) == pytest.approx(gain(have) / gain(batch))


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=5), st.integers(1, 6), st.floats(0, 0.99), rates, rates)
def test_contributors_rise_to_the_output_and_fall_with_the_rate(
    noise: list[float], workers: int, epsilon: float, one: float, two: float
) -> None:
    segments = [Moments(variance=n, signal=1.0) for n in noise]
    high, low = (
        fewest_at(segments, [8.0] * workers, epsilon=epsilon, rate=rate) for rate in (max(one, two), min(one, two))
    )
    assert list(high) == sorted(high) and high[-1] == workers
    assert all(a >= b for a, b in zip(high, low, strict=True))
    assert all(a >= b for a, b in zip(high, fewest(segments, [8.0] * workers, epsilon=1.0 - 1e-9), strict=True))


def test_no_signal_asks_for_everybody_at_the_peak_and_for_few_at_the_end() -> None:
    blind = [Moments(variance=1.0, signal=-0.1)] * 2
    assert math.isinf(blind[0].noise_scale)
    assert fewest_at(blind, [8.0] * 4, epsilon=0.1, rate=1.0) == (4, 4)
    assert fewest_at(blind, [8.0] * 4, epsilon=0.1, rate=0.05) == (1, 4)
    assert fewest_at(blind, [8.0] * 4, epsilon=0.1, rate=0.05, least=(2, 2)) == (2, 4)


def test_a_warm_up_is_not_late() -> None:
    rate = Rate()
    assert [rate(x) for x in (0.1, 0.5, 1.0, 0.5, 0.0)] == [1, 1, 1, 0.5, 1e-9]

"""The guard's arithmetic: unbiased moments, the smallest counts within the bound, depths that give those counts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.planning.depth.guard import (
    Guard,
    Moments,
    RelativeRate,
    assign,
    cost,
    counts_of,
    decide,
    fewer_workers,
    fewest,
    kept,
    moments,
    progress,
    retained,
    smoothed,
)

scales = st.floats(0, 1e4)
positive = st.floats(1e-3, 1e3)


def test_moments_are_unbiased_for_unequal_batches() -> None:
    rng = np.random.default_rng(0)
    truth, spread = np.array([0.5, -0.3, 0.1]), np.array([1.0, 2.0, 0.5])
    samples = [2, 5, 3]
    found = []
    for _ in range(20_000):
        gradients = [truth + spread * rng.standard_normal((b, 3)).mean(axis=0) for b in samples]
        mean = sum(b * g for b, g in zip(samples, gradients, strict=True)) / sum(samples)
        found.append(moments([float(g @ g) for g in gradients], samples, float(mean @ mean)))
    assert np.mean([m.variance for m in found]) == pytest.approx(float(spread @ spread), rel=0.02)
    assert np.mean([m.signal for m in found]) == pytest.approx(float(truth @ truth), rel=0.06)


def test_moments_of_equal_gradients_have_no_noise() -> None:
    found = moments([4.0, 4.0], [3, 3], 4.0)
    assert found == Moments(variance=0.0, signal=4.0) and found.noise_scale == 0.0
    assert Moments(variance=1.0, signal=-0.1).noise_scale == math.inf


def test_numerator_and_denominator_are_smoothed_apart() -> None:
    first, second = Moments(variance=1.0, signal=1.0), Moments(variance=3.0, signal=-0.5)
    assert smoothed(None, first, 0.3) == first
    assert smoothed(first, second, 0.5) == Moments(variance=2.0, signal=0.25)


@given(scales, st.integers(1, 8), st.integers(1, 8), positive)
def test_retained_progress_is_the_formula_of_the_module_docstring(scale: float, c: int, k: int, batch: float) -> None:
    c = min(c, k)
    expected = (1 + scale / batch) / (1 + scale * k / (batch * c))
    assert retained(scale, batch * c / k, batch) == pytest.approx(expected)
    assert c / k - 1e-9 <= retained(scale, batch * c / k, batch) <= 1 + 1e-9
    assert retained(math.inf, batch * c / k, batch) == pytest.approx(c / k)


@given(
    st.lists(st.builds(Moments, variance=positive, signal=st.floats(-1, 10)), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.floats(0, 0.95),
)
def test_counts_are_the_smallest_that_the_bound_and_the_order_allow(
    segments: list[Moments], batches: list[int], epsilon: float
) -> None:
    def allowed(counts: tuple[int, ...]) -> bool:
        kept = [retained(s.noise_scale, sum(batches[:c]), sum(batches)) for s, c in zip(segments, counts, strict=True)]
        rising = all(a <= b for a, b in itertools.pairwise(counts))
        return rising and counts[-1] == len(batches) and min(kept) >= 1 - epsilon - 1e-12

    all_counts = itertools.product(range(1, len(batches) + 1), repeat=len(segments))
    best = [c for c in all_counts if allowed(c)]
    chosen = fewest(segments, batches, epsilon=epsilon)
    assert chosen in best
    assert all(all(a <= b for a, b in zip(chosen, other, strict=True)) for other in best)


@given(st.data(), st.integers(1, 5), st.integers(1, 6))
def test_assigned_depths_give_the_counts_and_respect_limits(data: st.DataObject, segments: int, workers: int) -> None:
    counts = sorted(data.draw(st.lists(st.integers(1, workers), min_size=segments, max_size=segments)))
    counts[-1] = workers
    order = data.draw(st.permutations(range(workers)))
    assert counts_of(assign(counts, order), segments) == tuple(counts)
    limits = data.draw(st.lists(st.integers(1, segments), min_size=workers, max_size=workers))
    depths = assign(counts, order, limits)
    assert max(depths) == segments, "the first segment is always trained"
    beyond = [w for w in range(workers) if depths[w] > limits[w]]
    assert beyond == [] or (max(limits) < segments and beyond == [order[0]])
    assert all(d >= 1 for d in depths)


def test_ladder_depths_survive_the_way_through_counts() -> None:
    depths = (3, 1, 4, 2)
    order = sorted(range(4), key=lambda w: -depths[w])
    assert assign(counts_of(depths, 4), order) == depths


def test_the_ladders_cost_is_the_closed_formula() -> None:
    for k in (2, 4, 8):
        saved = 1 - cost(range(1, k + 1), [1.0] * k, forward=1.0, backward=[2.0 / k] * k)
        assert saved == pytest.approx((k - 1) / (3 * k))


def test_a_decision_says_when_fewer_workers_would_serve_better_and_not_otherwise() -> None:
    backward = [0.5] * 4
    # The first segment alone is noisy and carries all the progress: three full workers beat a ladder of like cost.
    noisy = [Moments(variance=1000.0, signal=10.0), *[Moments(variance=0.01, signal=0.01)] * 3]
    assert fewer_workers(noisy, (1, 2, 3, 4), [8.0] * 4, forward=1.0, backward=backward) in (2, 3)
    # Only the last segment matters, where everybody contributes.
    late = [*[Moments(variance=0.01, signal=0.01)] * 3, Moments(variance=1000.0, signal=10.0)]
    assert fewer_workers(late, (1, 2, 3, 4), [8.0] * 4, forward=1.0, backward=backward) is None
    assert fewer_workers(noisy, (4, 4, 4, 4), [8.0] * 4, forward=1.0, backward=backward) is None


def test_a_decision_is_one_line_that_explains_itself() -> None:
    segments = [Moments(variance=320.0, signal=1.0), Moments(variance=3.2, signal=1.0)]
    made = decide(Guard(epsilon=0.2), segments, [8.0] * 4, step=40, before=(4, 4))
    assert made.counts == (4, 4) and made.noise == pytest.approx((10.0, 0.1))
    text = str(made)
    assert text.startswith("step 40: noise/batch 10 0.1 (plain metric), input to output; contributors stay 4 4 of 4")
    looser = decide(Guard(epsilon=0.5), segments, [8.0] * 4, step=60, before=(4, 4), metric="optimiser's")
    assert "contributors were 4 4, now 2 4 of 4" in str(looser) and "\n" not in str(looser)
    assert 0 < looser.progress < 1 and 0 < looser.cost < 1
    assert progress(segments, (4, 4), [8.0] * 4) == pytest.approx(1.0)


def test_the_plans_counts_are_a_floor() -> None:
    quiet = [Moments(variance=0.0, signal=1.0)] * 3
    assert fewest(quiet, [1.0] * 4, epsilon=0.1) == (1, 1, 4)
    assert fewest(quiet, [1.0] * 4, epsilon=0.1, least=(2, 2, 4)) == (2, 2, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"epsilon": 1.0}, "Guard.epsilon"), ({"every": 0}, "Guard.every"), ({"smoothing": 0.0}, "Guard.smoothing")],
)
def test_wrong_options_are_one_line(options: dict[str, float], words: str) -> None:
    with pytest.raises(Error, match=words):
        Guard(**options)  # type: ignore[arg-type]


# -- the bound at the present learning rate --

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


def test_kept_progress_is_the_gain_of_a_noisy_step_on_a_parabola() -> None:
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
        fewest(segments, [8.0] * workers, epsilon=epsilon, rate=rate) for rate in (max(one, two), min(one, two))
    )
    assert list(high) == sorted(high) and high[-1] == workers
    assert all(a >= b for a, b in zip(high, low, strict=True))
    assert all(a >= b for a, b in zip(high, fewest(segments, [8.0] * workers, epsilon=1.0 - 1e-9), strict=True))


def test_no_signal_asks_for_everybody_at_the_peak_and_for_few_at_the_end() -> None:
    blind = [Moments(variance=1.0, signal=-0.1)] * 2
    assert math.isinf(blind[0].noise_scale)
    assert fewest(blind, [8.0] * 4, epsilon=0.1, rate=1.0) == (4, 4)
    assert fewest(blind, [8.0] * 4, epsilon=0.1, rate=0.05) == (1, 4)
    assert fewest(blind, [8.0] * 4, epsilon=0.1, rate=0.05, least=(2, 2)) == (2, 4)


def test_a_warm_up_is_not_late() -> None:
    rate = RelativeRate()
    assert [rate(x) for x in (0.1, 0.5, 1.0, 0.5, 0.0)] == [1, 1, 1, 0.5, 1e-9]

"""t0 + t1·b: recovered where it is the truth, never negative, and honest about its error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.batch_law import fit

BATCHES = [1, 2, 4, 8, 16, 32]


@given(st.floats(0, 1), st.floats(1e-9, 1))
def test_an_affine_layer_is_recovered(fixed: float, per_sample: float) -> None:
    seconds = [fixed + per_sample * b for b in BATCHES]
    found = fit(BATCHES, seconds)
    assert [found.seconds(b) for b in BATCHES] == pytest.approx(seconds, rel=1e-6, abs=1e-12)
    assert found.error <= found.worst <= 1e-6


@given(st.lists(st.floats(1e-6, 1.0), min_size=6, max_size=6))
def test_neither_coefficient_is_negative_and_the_error_is_what_it_says(seconds: list[float]) -> None:
    found = fit(BATCHES, seconds)
    assert found.fixed >= 0 and found.per_sample >= 0
    off = [abs(found.seconds(b) / t - 1) for b, t in zip(BATCHES, seconds, strict=True)]
    assert found.worst == pytest.approx(max(off)) and found.error == pytest.approx(sum(off) / 6)


def test_one_batch_is_taken_as_proportional_and_no_time_as_none() -> None:
    assert fit([4], [2.0]).seconds(8) == pytest.approx(4.0)
    nothing = fit([1, 2], [0.0, 0.0])
    assert (nothing.fixed, nothing.per_sample, nothing.error) == (0.0, 0.0, 0.0)

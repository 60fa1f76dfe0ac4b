"""Numbers read well: three digits, the unit that fits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.view import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (4.5, "4.50 s"), (0.0123, "12.3 ms"), (0.9999, "1.00 s"), (412e-6, "412 us"), (3e-9, "3.00 ns")],
)
def test_times_get_the_unit_that_fits(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1.00 KiB"), (25 << 20, "25.0 MiB"), (3 << 40, "3.00 TiB")]
)
def test_sizes_are_powers_of_1024(value: int, text: str) -> None:
    assert units.size(value) == text


def test_differences_carry_a_sign_and_nothing_is_minus_zero() -> None:
    assert units.percent(0.042, sign=True) == "+4.2 %"
    assert units.percent(-0.042, sign=True) == "-4.2 %"
    assert units.percent(-0.00001, sign=True) == units.percent(0.00001, sign=True) == "0.0 %"
    assert units.percent(1.5, sign=True) == "+150 %"


def test_a_rate_is_the_inverse_of_a_time_per_byte() -> None:
    assert units.rate(1e-9) == "1.00 GB/s"
    assert units.rate(8e-9) == "125 MB/s"
    assert units.rate(0) == "unlimited"


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_a_printed_time_is_within_half_a_per_cent_of_the_time(value: float) -> None:
    number, unit = units.seconds(value).split()
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] == pytest.approx(value, rel=0.0051)
    assert unit == "s" or re.fullmatch(r"\d{1,3}(\.\d+)?", number)

"""Fewer bytes: transfers compute what one process would, ranks hold the same bits, and training goes on as before."""

from __future__ import annotations

import pytest

from tests.ranks import run_all, run_ranks

from . import coded_scenarios

PRECISIONS = ("bf16", "int8")
SIZES = (3, 5_000, 700_000)


@pytest.mark.parametrize("ranks", [2, 4])
def test_transfers_equal_the_arithmetic_in_one_process_bit_for_bit(ranks: int) -> None:
    calls = [(coded_scenarios.transfers, {"precision": p, "elements": n}) for p in PRECISIONS for n in SIZES]
    for reports in run_all(calls, ranks=ranks):
        for found in reports:
            assert all(found.values()), found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_hold_the_same_bits_and_learn_as_with_full_gradients(precision: str) -> None:
    reports = run_ranks(coded_scenarios.trains, ranks=3, precision=precision)
    assert all(report["bits"] == reports[0]["bits"] for report in reports)
    for report in reports:
        assert report["codec"] and report["torch's"] < 0.5 * report["first"]
        assert report["ours"] == pytest.approx(report["torch's"], rel=0.05)

"""Rings of messages give what torch's collectives give, for any size and any cut into pieces."""

from __future__ import annotations

from tests.ranks import run_all

from . import overlap_edges

SIZES = [(1, 8), (1000, 64), (10_003, 640), (4, 2**20), (300_000, 2**18)]  # elements, bytes of a piece


def test_both_halves_of_an_all_reduce_equal_plain_sums() -> None:
    calls = [(overlap_edges.rings, {"elements": elements, "piece": piece}) for elements, piece in SIZES]
    for reports in run_all(calls, ranks=3):
        assert reports == [{"reduced": True, "gathered": True, "in place": True}] * len(SIZES)

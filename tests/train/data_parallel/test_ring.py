"""Rings of messages give what torch's collectives give, for any size and any cut into pieces."""

from __future__ import annotations

from tests.ranks import run_all

from . import overlap_edges

SIZES = [(1, 8), (1000, 64), (10_003, 640), (4, 2**20), (300_000, 2**18)]  # elements, bytes of a piece


def test_collectives_equal_plain_sums_also_while_another_one_is_on_its_way() -> None:
    calls = [(overlap_edges.rings, {"elements": elements, "piece": piece}) for elements, piece in SIZES]
    for reports in run_all(calls, ranks=3):
        assert reports == [{"scattered": True, "reduced": True, "gathered": True}] * len(SIZES)

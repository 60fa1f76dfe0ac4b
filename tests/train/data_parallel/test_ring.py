"""Rings of messages give what torch's collectives give, for any size, any cut into pieces and any owners."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import overlap_edges, ring_scenarios

SIZES = [(1, 8), (1000, 64), (10_003, 640), (4, 2**20), (300_000, 2**18)]  # elements, bytes of a piece


def test_collectives_equal_plain_sums_also_while_another_one_is_on_its_way() -> None:
    calls = [(overlap_edges.rings, {"elements": elements, "piece": piece}) for elements, piece in SIZES]
    for reports in run_all(calls, ranks=3):
        assert reports == [{"scattered": True, "reduced": True, "gathered": True}] * len(SIZES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_of_any_sizes_give_plain_sums_in_full_and_in_fewer_bytes(ranks: int) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        (ring_scenarios.any_borders, {"seed": ranks, "cases": 60}),
        (ring_scenarios.any_borders_coded, {"seed": ranks, "cases": 25, "precision": "bf16"}),
        (ring_scenarios.any_borders_coded, {"seed": ranks, "cases": 25, "precision": "int8"}),
    ]
    for reports in run_all(calls[: 1 if ranks == 1 else 3], ranks=ranks, timeout=300):
        for report in reports:
            assert report["wrong"] == []

"""Owners of whole parameters: the best there are, against every assignment, and proved bounds where there are many."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.planning.merge import owners
from dovetail.planning.merge.owners import Ownership, own, update_cost


def largest(weights: list[int], chosen: tuple[int, ...], ranks: int) -> int:
    return max(sum(w for w, rank in zip(weights, chosen, strict=True) if rank == r) for r in range(ranks))


def check(found: Ownership, costs: list[int], sizes: list[int], ranks: int) -> None:
    """What is said of the owners is true of them."""
    assert len(found.owners) == len(costs) and set(found.owners) <= set(range(ranks))
    assert (found.load, found.bytes) == (largest(costs, found.owners, ranks), largest(sizes, found.owners, ranks))
    assert found.bound <= found.load


@given(st.data(), st.integers(1, 4), st.integers(0, 6))
def test_no_assignment_has_a_smaller_load_nor_at_that_load_fewer_bytes(
    data: st.DataObject, ranks: int, count: int
) -> None:
    weights = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    costs, sizes = data.draw(weights), data.draw(weights)
    found = own(costs, sizes, ranks)
    check(found, costs, sizes, ranks)
    best = min(
        (largest(costs, chosen, ranks), largest(sizes, chosen, ranks))
        for chosen in itertools.product(range(ranks), repeat=count)
    )
    assert (found.load, found.bytes) == best and found.optimal and found.bound == best[0]


@pytest.mark.parametrize("seed", range(20))
def test_many_parameters_are_within_grahams_bound_and_say_so(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(owners, "NODES", 500)
    ranks, count = draw.choice([2, 3, 8, 16]), draw.choice([10, 100, 400])
    costs = [draw.choice([draw.randrange(10**9), draw.randrange(100)]) for _ in range(count)]
    sizes = [c // draw.choice([1, 3, 7]) for c in costs]
    found = own(costs, sizes, ranks)
    check(found, costs, sizes, ranks)
    assert found.bound >= max(max(costs), -(-sum(costs) // ranks))
    assert found.load <= sum(costs) / ranks + max(costs)
    if found.optimal:
        assert found.bound == found.load
    assert found == own(costs, sizes, ranks), "all ranks must find the same owners"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_matrices_of_a_transformer_are_shared_out_within_a_fifth_of_evenly(ranks: int) -> None:
    width, layers = 768, 12
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    costs = [update_cost(shape, matrices=True) for shape in shapes]
    sizes = [4 * r * c for r, c in shapes]
    found = own(costs, sizes, ranks)
    check(found, costs, sizes, ranks)
    assert found.load <= 1.05 * sum(costs) / ranks and found.bytes <= 1.1 * sum(sizes) / ranks


def test_an_update_costs_the_products_of_newton_schulz_or_one_operation_for_each_element() -> None:
    assert update_cost((6, 4), matrices=True) == update_cost((4, 6), matrices=True) == 4 * 4 * 6 + 4**3 + 4 * 4 * 6
    assert update_cost((8, 3, 2), matrices=True) == update_cost((8, 6), matrices=True)
    assert update_cost((6, 4), matrices=False) == 24
    assert update_cost((6,), matrices=True) == 6
    assert update_cost((0, 4), matrices=True) == 0
    assert update_cost((), matrices=True) == 1

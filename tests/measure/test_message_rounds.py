"""Which sizes are measured, how often, and in which order, on networks whose time is counted, not spent."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.network import CostSample
from dovetail.measure.message_rounds import LEAST, WARMUP, Table, allowances, round_up, sizes, tables


@given(max_bytes=st.integers(1024, 2**32), ranks=st.integers(2, 2048), factor=st.sampled_from([2, 4]))
def test_sizes_ascend_from_the_smallest_to_the_largest_in_equal_parts_per_rank(
    max_bytes: int, ranks: int, factor: int
) -> None:
    grid = sizes(max_bytes, ranks, factor=factor)
    assert grid == sorted(set(grid))
    assert all(size % (4 * ranks) == 0 for size in grid)
    assert grid[-1] == round_up(max_bytes, ranks)
    assert grid[0] == round_up(1024, ranks)
    assert all(b <= factor * a + 4 * ranks * factor for a, b in itertools.pairwise(grid))


class Emulated:
    """A network whose time is counted, not spent."""

    def __init__(self, latency: float, per_byte: float) -> None:
        self.latency, self.per_byte, self.now = latency, per_byte, 0.0
        self.calls: list[int] = []

    def run(self, items: Sequence[tuple[str, int]]) -> list[float]:
        took = []
        for _, nbytes in items:
            self.calls.append(nbytes)
            took.append(self.of(nbytes))
            self.now += took[-1]
        return took

    def of(self, nbytes: int) -> float:
        return self.latency + self.per_byte * nbytes

    def measured(self, max_bytes: int, budget: float, repeats: int = 20) -> Table:
        options = {"max_bytes": max_bytes, "ranks": 2, "repeats": repeats}
        return tables(self.run, lambda: self.now, ["it"], budget=budget, **options)["it"]

    def table(self, max_bytes: int, budget: float) -> tuple[CostSample, ...]:
        return self.measured(max_bytes, budget).samples


@given(
    latency=st.floats(1e-6, 1e-2),
    per_byte=st.floats(1e-12, 1e-7),
    max_bytes=st.integers(1024, 2**28),
    budget=st.floats(0.01, 60),
)
def test_the_budget_holds_but_for_the_least_that_makes_a_table(
    latency: float, per_byte: float, max_bytes: int, budget: float
) -> None:
    network = Emulated(latency, per_byte)
    samples = network.table(max_bytes, budget)
    # Two sizes and the first look are measured in any case, each at least three times.
    first = [s.bytes for s in samples[:2]]
    least = (WARMUP + LEAST) * sum(map(network.of, first)) + (WARMUP + LEAST) * network.of(1024)
    least += LEAST * network.of(min(max_bytes, 2**20))
    assert network.now <= max(budget, least) + LEAST * network.of(samples[-1].bytes) + 1e-9
    assert all(s.seconds.samples >= LEAST for s in samples)


def test_ample_time_gives_powers_of_two_and_all_repeats() -> None:
    samples = Emulated(1e-4, 1e-9).table(2**24, budget=60)
    assert [s.bytes for s in samples] == [2**k for k in range(10, 25)]
    assert {s.seconds.samples for s in samples} == {20}


def test_short_time_gives_powers_of_four_and_fewer_repeats_for_the_largest() -> None:
    samples = Emulated(1e-4, 1e-8).table(2**24, budget=3)
    assert [s.bytes for s in samples] == [2**k for k in range(10, 25, 2)]
    assert samples[0].seconds.samples == 20
    assert LEAST <= samples[-1].seconds.samples < 20


def test_sizes_that_cannot_be_paid_for_are_left_out() -> None:
    samples = Emulated(1e-3, 1e-6).table(2**30, budget=2)
    assert len(samples) >= 2
    assert samples[-1].bytes < 2**20


def test_the_largest_size_gets_its_fewest_repeats_before_smaller_ones_get_more() -> None:
    samples = Emulated(1e-4, 1e-8).table(2**24, budget=1.5)
    assert samples[-1].bytes == 2**24
    assert samples[0].seconds.samples == 20


def test_hiccups_of_small_messages_do_not_forbid_large_ones() -> None:
    class Hiccups(Emulated):
        def of(self, nbytes: int) -> float:
            return super().of(nbytes) + (5e-3 if nbytes in (2048, 4096, 16384) else 0.0)

    samples = Hiccups(1e-4, 1e-9).table(2**26, budget=10)
    assert [s.bytes for s in samples] == [2**k for k in range(10, 27)]
    assert all(s.seconds.samples == 20 for s in samples[:-3])


class Busy(Emulated):
    """A network on a busy machine: in bursts that last for some calls, calls take up to thirty times as long."""

    def __init__(self, latency: float, per_byte: float, *, share: float, seed: int) -> None:
        super().__init__(latency, per_byte)
        self.random, self.share, self.burst = np.random.default_rng(seed), share, 0

    def of(self, nbytes: int) -> float:
        natural = super().of(nbytes) * self.random.uniform(0.95, 1.05)
        if self.burst == 0 and self.random.random() < self.share / 8:
            self.burst = 8
        if self.burst:
            self.burst -= 1
            natural += float(self.random.pareto(1.0)) * 2e-3 + 1e-3
        return natural


@settings(max_examples=30)
@given(share=st.floats(0.0, 0.4), seed=st.integers(0, 2**20))
def test_bursts_do_not_reach_the_table(share: float, seed: int) -> None:
    table = Busy(3e-4, 1e-9, share=share, seed=seed).measured(2**22, budget=60)
    true = Emulated(3e-4, 1e-9)
    for s in table.samples:
        assert s.seconds.median == pytest.approx(true.of(s.bytes), rel=0.12)
    medians = [s.seconds.median for s in table.samples]
    assert medians == sorted(medians)
    assert table.noise < 0.1
    if share == 0:
        assert table.lost == 0


def test_a_lost_share_is_reported() -> None:
    assert Busy(3e-4, 1e-9, share=0.4, seed=1).measured(2**20, budget=60).lost > 0.3


def test_a_round_calls_every_size_once_so_that_a_bad_moment_hits_all_alike() -> None:
    network = Emulated(1e-4, 1e-9)
    grid = [s.bytes for s in network.table(2**15, budget=60)][::-1]  # the largest first
    assert network.calls[-len(grid) :] == grid
    assert network.calls[-2 * len(grid) : -len(grid)] == grid


def test_what_has_not_settled_is_repeated_more_often_while_the_budget_lasts() -> None:
    class Unsteady(Emulated):
        def of(self, nbytes: int) -> float:
            return super().of(nbytes) * (1 + 0.2 * math.sin(len(self.calls)))

    def calls(network: Emulated, budget: float) -> int:
        network.table(2**15, budget)
        return Counter(network.calls)[8192] - WARMUP

    assert calls(Emulated(1e-4, 1e-9), 60) == 20
    assert calls(Unsteady(1e-4, 1e-9), 60) == 3 * 20
    short = Unsteady(1e-4, 1e-9)
    assert 20 <= calls(short, 0.015) < 3 * 20 and short.now < 0.018


@given(
    estimates=st.dictionaries(st.integers(), st.floats(1e-6, 10), min_size=1, max_size=20),
    seconds=st.floats(0, 100),
    most=st.integers(3, 30),
)
def test_allowances_fit_into_the_time_and_serve_the_shortest_first(
    estimates: dict[int, float], seconds: float, most: int
) -> None:
    given_calls = allowances(estimates, seconds, least=3, most=most)
    assert given_calls.keys() == estimates.keys()
    assert all(3 <= count <= most for count in given_calls.values())
    spent = sum(count * estimates[item] for item, count in given_calls.items())
    assert spent <= max(seconds, 3 * sum(estimates.values())) * (1 + 1e-9)
    ordered = sorted(estimates, key=estimates.__getitem__)
    shortest = given_calls[ordered[0]]
    assert shortest == most or all(given_calls[item] <= shortest + 1 for item in ordered)  # rounding leaves one more

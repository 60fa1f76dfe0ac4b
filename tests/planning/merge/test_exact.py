"""The exact planners against every partition there is."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, Cost, FloatArray
from dovetail.planning.merge import exact, rules
from dovetail.planning.merge import stream as streams
from dovetail.planning.merge.stream import Stream

from . import oracle

SAME = 1e-12


def least(stream: Stream, cost: Cost, *, overhead: float = 0.0) -> float:
    return min(oracle.finish(stream, cuts, cost, overhead=overhead) for cuts in oracle.partitions(stream))


@st.composite
def made_streams(draw: st.DrawFn, *, longest: int = 8, limits: bool = True) -> Stream:
    n = draw(st.integers(1, longest))
    gaps = draw(st.lists(st.floats(0, 10, allow_subnormal=False), min_size=n, max_size=n))
    sizes = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    breaks = draw(st.frozensets(st.integers(1, n - 1))) if limits and n > 1 else frozenset()
    cap = draw(st.none() | st.integers(1, 60)) if limits else None
    ready = np.cumsum(gaps).tolist()
    return Stream(tuple(ready), tuple(sizes), breaks, cap, ready[-1] + draw(st.sampled_from([0.0, 3.0])))


affine_costs = st.builds(AffineCost, st.floats(0, 20, allow_subnormal=False), st.floats(0, 3, allow_subnormal=False))
any_costs = affine_costs | st.lists(st.floats(0, 20), min_size=161, max_size=161).map(oracle.Lookup)


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_beats_the_optimum_for_any_cost(seed: int) -> None:
    for stream, cost in oracle.instances(seed, 800):
        cuts = exact.optimal(stream, cost)
        assert streams.allowed(stream, cuts)
        assert oracle.finish(stream, cuts, cost) == pytest.approx(least(stream, cost), rel=SAME)


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_beats_the_linear_time_optimum_for_affine_costs(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(800):
        stream, cost = oracle.random_stream(rng, rng.randint(1, 8)), oracle.random_affine(rng)
        cuts = exact.optimal_affine(stream, cost)
        assert streams.allowed(stream, cuts)
        assert oracle.finish(stream, cuts, cost) == pytest.approx(least(stream, cost), rel=SAME)


@given(made_streams(), any_costs)
def test_optimum_matches_brute_force(stream: Stream, cost: Cost) -> None:
    assert streams.finish(stream, exact.optimal(stream, cost), cost) == pytest.approx(least(stream, cost), rel=SAME)


@given(made_streams(), affine_costs, st.floats(0, 5))
def test_an_overhead_per_bucket_is_part_of_the_optimum(stream: Stream, cost: AffineCost, overhead: float) -> None:
    want = pytest.approx(least(stream, cost, overhead=overhead), rel=SAME)
    for choose in (exact.optimal, exact.optimal_affine):
        assert streams.finish(stream, choose(stream, cost, overhead=overhead), cost, overhead=overhead) == want


@pytest.mark.parametrize("limits", [False, True])
def test_linear_and_quadratic_algorithms_agree_on_long_streams(limits: bool) -> None:
    rng = random.Random(7)
    for n in (1, 2, 63, 64, 65, 128, 129, 400, 700):
        for _ in range(4):
            stream, cost = oracle.random_stream(rng, n, limits=limits), oracle.random_affine(rng)
            fast, slow = exact.optimal_affine(stream, cost), exact.optimal(stream, cost)
            assert streams.allowed(stream, fast)
            assert streams.allowed(stream, slow)
            assert streams.finish(stream, fast, cost) == pytest.approx(streams.finish(stream, slow, cost), rel=SAME)


def test_a_falling_affine_cost_is_still_planned_exactly() -> None:
    stream, cost = Stream((1.0, 2.0, 3.0, 9.0), (3, 3, 3, 3)), AffineCost(20.0, -1.0)
    assert streams.finish(stream, exact.optimal_affine(stream, cost), cost) == least(stream, cost)


def test_the_cost_function_is_asked_in_blocks() -> None:
    calls = 0

    def counted(nbytes: npt.ArrayLike, /) -> FloatArray:
        nonlocal calls
        calls += 1
        return np.asarray(nbytes) * 1.0

    n = 1000
    exact.optimal(Stream(tuple(map(float, range(n))), (1,) * n), counted)
    assert calls <= n / 50


@given(made_streams(longest=20), affine_costs)
def test_the_finish_of_a_prefix_never_falls_nor_does_it_without_its_bytes(stream: Stream, cost: AffineCost) -> None:
    finishes = []
    for j in range(1, len(stream) + 1):
        prefix = Stream(stream.ready[:j], stream.sizes[:j], frozenset(b for b in stream.breaks if b < j), stream.cap)
        finishes.append(streams.finish(prefix, exact.optimal(prefix, cost), cost))
    latest = max(finishes)
    for j, (before, after) in enumerate(pairwise(finishes), start=1):
        assert before <= after + SAME * latest
        assert before <= after - cost.seconds_per_byte * stream.sizes[j] + SAME * latest


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.2])
def test_fewest_has_the_smallest_count_within_tolerance_and_is_the_best_of_that_count(tolerance: float) -> None:
    for stream, cost in oracle.instances(11, 700):
        ends: dict[int, float] = {}
        for cuts in oracle.partitions(stream):
            end = max(stream.backward, oracle.finish(stream, cuts, cost))
            ends[len(cuts)] = min(end, ends.get(len(cuts), float("inf")))
        budget = min(ends.values()) * (1 + tolerance) * (1 + 1e-11)
        count = min(k for k, end in ends.items() if end <= budget)
        chosen = exact.fewest(stream, cost, tolerance=tolerance)
        assert streams.allowed(stream, chosen)
        assert len(chosen) == count
        assert streams.objective(stream, chosen, cost) == pytest.approx(ends[count], rel=SAME)


def test_fewest_reaches_counts_beyond_its_first_guess() -> None:
    """A cost that explodes with size asks for one bucket per tensor."""
    n = 40
    stream = Stream(tuple(map(float, range(n))), (1,) * n)
    chosen = exact.fewest(stream, lambda nbytes: np.asarray(nbytes, dtype=np.float64) ** 4, tolerance=0.0)
    assert chosen == rules.per_tensor(stream)


@pytest.mark.parametrize("tolerance", [0.001, 0.01, 0.05])
def test_fewest_of_a_long_stream_is_the_first_count_within_tolerance(tolerance: float) -> None:
    rng = random.Random(5)
    counts = set()
    for latency in (0.05, 0.5, 2.0):
        stream = Stream(tuple(sorted(rng.uniform(0, 120) for _ in range(90))), tuple(rng.choices(range(1, 9), k=90)))
        cost = AffineCost(latency, 0.25)
        best = streams.objective(stream, exact.optimal(stream, cost), cost)
        by_count = exact.best_per_count(stream, cost, len(stream))
        within = [k for k, cuts in by_count.items() if streams.objective(stream, cuts, cost) <= (1 + tolerance) * best]
        assert len(exact.fewest(stream, cost, tolerance=tolerance)) == min(within)
        counts.add(min(within))
    assert max(counts) > 4, "more than the first guess"


def test_the_best_partition_for_every_count_is_found_and_impossible_counts_are_refused() -> None:
    for stream, cost in oracle.instances(23, 500, longest=7):
        ends: dict[int, float] = {}
        for cuts in oracle.partitions(stream):
            ends[len(cuts)] = min(oracle.finish(stream, cuts, cost), ends.get(len(cuts), float("inf")))
        found = exact.best_per_count(stream, cost, 99)
        assert sorted(found) == sorted(ends)
        for count, cuts in found.items():
            assert len(cuts) == count
            assert streams.allowed(stream, cuts)
            assert oracle.finish(stream, cuts, cost) == pytest.approx(ends[count], rel=SAME)
            assert streams.finish(stream, exact.best_with(stream, cost, count), cost) == pytest.approx(
                ends[count], rel=SAME
            )
        for count in (0, min(ends) - 1, len(stream) + 1):
            with pytest.raises(Error, match=f"expected between {min(ends)} and {len(stream)} buckets"):
                exact.best_with(stream, cost, count)


@given(made_streams(), any_costs)
def test_nothing_finishes_before_the_lower_bound(stream: Stream, cost: Cost) -> None:
    assert exact.lower_bound(stream, cost) <= least(stream, cost) * (1 + SAME)


@given(made_streams(limits=False), affine_costs)
def test_the_general_bound_is_the_closed_formula_where_that_applies(stream: Stream, cost: AffineCost) -> None:
    total = sum(stream.sizes)
    by_hand = max(
        stream.ready[j] + cost.latency + cost.seconds_per_byte * (total - sum(stream.sizes[:j]))
        for j in range(len(stream))
    )
    assert exact.lower_bound(stream, cost) == pytest.approx(by_hand, rel=SAME)
    assert exact.lower_bound(stream, oracle.general(cost)) == pytest.approx(by_hand, rel=SAME)


def test_the_bound_counts_the_latencies_that_cap_and_breaks_force() -> None:
    cost = AffineCost(1.0, 1.0)
    assert exact.lower_bound(Stream((0.0,) * 4, (1,) * 4), cost) == 5.0
    assert exact.lower_bound(Stream((0.0,) * 4, (1,) * 4, cap=1), cost) == 8.0
    assert exact.lower_bound(Stream((0.0,) * 4, (1,) * 4, breaks=frozenset({2})), cost) == 6.0


@given(made_streams(), any_costs)
def test_a_schedule_is_first_in_first_out_and_waits_for_every_member(stream: Stream, cost: Cost) -> None:
    cuts = exact.optimal(stream, cost)
    spans = streams.schedule(stream, cuts, cost)
    assert spans[-1][1] == streams.finish(stream, cuts, cost)
    free = float("-inf")
    for (begin, end), (start, stop) in zip(pairwise([0, *cuts]), spans, strict=True):
        assert start == max(free, max(stream.ready[begin:end]))
        assert stop == start + float(cost(sum(stream.sizes[begin:end])))
        free = stop

"""Batches and depths shared out among unequal workers: against every way there is."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.core.profile import Layer, LayerTime, exactly
from dovetail.planning.depth import shares
from dovetail.planning.depth.planner import plan
from dovetail.planning.depth.shares import Seconds, assign, balance, deepen
from tests.planning.merge.oracle import made_network, made_profile


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(0, 6),
    st.data(),
)
def test_no_batches_finish_earlier_than_the_balanced_ones(
    workers: list[tuple[int, int]], more: int, data: st.DataObject
) -> None:
    total = len(workers) + more
    caps = [data.draw(st.one_of(st.none(), st.integers(1, total))) for _ in workers]
    room = [total if cap is None else cap for cap in caps]
    if sum(room) < total:
        return

    def seconds(worker: int, batch: int) -> float:
        fixed, each = workers[worker]
        return fixed + each * batch + (batch > 2) * fixed  # with a step, as real tables have

    got = balance(seconds, total, caps=caps)
    assert sum(got) == total and min(got) >= 1 and all(b <= r for b, r in zip(got, room, strict=True))
    every = (b for b in itertools.product(*(range(1, r + 1) for r in room)) if sum(b) == total)
    best = min(max(seconds(w, b) for w, b in enumerate(batches)) for batches in every)
    assert max(seconds(w, b) for w, b in enumerate(got)) == best


def one_by_one(seconds: Seconds, total: int, limits: list[int]) -> tuple[int, ...]:
    """Every sample to the worker that would be done first with it: what `balance` must come to without doing it."""
    batches = [1] * len(limits)
    heap = [(seconds(w, 2), w) for w in range(len(limits)) if limits[w] > 1]
    heapq.heapify(heap)
    for _ in range(total - len(limits)):
        _, worker = heapq.heappop(heap)
        batches[worker] += 1
        if batches[worker] < limits[worker]:
            heapq.heappush(heap, (seconds(worker, batches[worker] + 1), worker))
    return tuple(batches)


@given(
    points=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=4, max_size=4), min_size=1, max_size=5
    ),
    gaps=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    share=st.floats(0, 1),
    few=st.sampled_from([0, 1, 7]),
    data=st.data(),
)
def test_balanced_batches_are_those_of_handing_out_one_by_one(
    points: list[list[tuple[int, int]]], gaps: list[int], share: float, few: int, data: st.DataObject
) -> None:
    """Times that fall, rise, stay and reach 0, with ties among workers, as real profiles and made ones have them."""
    knots = list(itertools.accumulate(gaps))
    layers = [
        Layer(
            name="layer",
            type="made",
            parameter_bytes=4,
            activation_bytes=4,
            times=tuple(
                LayerTime(batch=b, forward=exactly(float(f)), backward=exactly(float(t)))
                for b, (f, t) in zip(knots, measured, strict=True)
            ),
        )
        for measured in points
    ]

    def seconds(worker: int, batch: int) -> float:
        return layers[worker].forward(batch) + max(layers[worker].backward(batch), layers[worker].forward(batch) / 2)

    limits = [data.draw(st.integers(1, 400)) for _ in points]
    total = len(limits) + round(share * (sum(limits) - len(limits)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "FEW", few)
        assert balance(seconds, total, caps=limits, knots=knots) == one_by_one(seconds, total, limits)


@pytest.mark.parametrize("backward", [[0.1, 2.0, 2.0, 1.0], [1.0] * 4, [0.0] * 4], ids=["uneven", "even", "none"])
def test_batches_of_a_plan_are_those_of_handing_out_one_by_one(
    backward: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, net = made_profile([1000] * 4, backward), made_network(0.1, 1e-4)
    quick = plan(profile, net, workers=5, batch=2000, policy="balanced")
    monkeypatch.setattr(shares, "FEW", 10_000)
    assert quick == plan(profile, net, workers=5, batch=2000, policy="balanced")


def test_a_huge_batch_is_balanced_with_few_evaluations_of_the_cost() -> None:
    looks = 0

    def seconds(worker: int, batch: int) -> float:
        nonlocal looks
        looks += 1
        assert looks < 50_000, "far fewer than samples"
        return (1 + worker) * (5.0 + batch)

    got = balance(seconds, 10**12, caps=[None] * 3)
    assert sum(got) == 10**12
    for (slow, fast), times in {(w, v): (1 + w, 1 + v) for w in range(3) for v in range(3)}.items():
        assert times[0] * (5 + got[slow]) <= times[1] * (5 + got[fast] + 1), "a sample less would have gone elsewhere"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=2, max_size=4), st.data())
def test_no_assignment_of_depths_finishes_earlier_within_memory(
    devices: list[tuple[int, int]], data: st.DataObject
) -> None:
    k = len(devices)
    depths = data.draw(st.lists(st.integers(1, 4), min_size=k, max_size=k))
    limits = [limit for _, limit in devices]

    def seconds(worker: int, depth: int) -> float:
        return (1 + 2 * depth) / devices[worker][0]

    fitting = [p for p in itertools.permutations(depths) if all(d <= m for d, m in zip(p, limits, strict=True))]
    if not fitting:
        with pytest.raises(Error, match="do not fit the workers' memory"):
            assign(depths, seconds, limits=limits)
        return
    got = assign(depths, seconds, limits=limits)
    assert sorted(got) == sorted(depths) and all(d <= m for d, m in zip(got, limits, strict=True))
    assert max(map(seconds, range(k), got)) == min(max(map(seconds, range(k), p)) for p in fitting)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4), st.data())
def test_deepened_depths_reach_every_segment_in_the_shortest_time_and_leave_no_depth_unused(
    devices: list[tuple[int, int]], data: st.DataObject
) -> None:
    k, m = len(devices), 3
    counts = sorted(data.draw(st.lists(st.integers(1, k), min_size=m, max_size=m)))
    limits = [limit for _, limit in devices]

    def seconds(worker: int, depth: int) -> float:
        return (1 + 2 * depth) / devices[worker][0]

    def enough(depths: tuple[int, ...]) -> bool:
        return all(sum(d >= m - s for d in depths) >= c for s, c in enumerate(counts))

    every = [d for d in itertools.product(*(range(1, x + 1) for x in limits)) if enough(d)]
    if not every:
        with pytest.raises(Error, match="do not fit the workers' memory"):
            deepen(counts, seconds, limits=limits)
        return
    got = deepen(counts, seconds, limits=limits)
    ends = max(map(seconds, range(k), got))
    assert enough(got) and ends == min(max(map(seconds, range(k), d)) for d in every)
    assert all(d == limits[w] or seconds(w, d + 1) > ends for w, d in enumerate(got))

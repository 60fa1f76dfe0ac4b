"""The predicted timeline of a burst iteration: what runs where and when, and which gaps are left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.burst_plan import BurstPlan, BurstPrediction
from dovetail.core.errors import Error
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.core.sample_layout import SampleLayout, block_layout, busiest, move, moved, next_layout, parts
from dovetail.core.timeline import Timeline
from dovetail.planning.burst.cost import Links, ProfileCost, moved_samples
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.simulate.burst import live_bytes, simulate_burst
from dovetail.view.tracks import union

LINKS = Links(sync_latency=0.5, sync_rate=100.0, move_latency=0.25, move_rate=100.0)


def profile(count: int, *, edges: tuple[tuple[int, int], ...] = (), parameters: int = 10) -> Profile:
    """Layer i: forward 1 + b, backward 2 + 2b seconds; 40·(i+1) bytes of output per sample."""
    layers = tuple(
        Layer(
            name=f"l{i}",
            type="Linear",
            parameter_bytes=parameters,
            activation_bytes=40 * (i + 1),
            times=tuple(LayerTime(batch=b, forward=exactly(1 + b), backward=exactly(2 + 2 * b)) for b in (1, 2, 64)),
        )
        for i in range(count)
    )
    tensor = ParameterTensor(name="all", layer=0, bytes=4, dtype="float32", ready=0.0)
    return Profile(name="p", device="none", batch=1, layers=layers, tensors=(tensor,), edges=edges)


def plan(counts: list[int], batch: int, devices: int) -> BurstPlan:
    nothing = BurstPrediction(iteration=1.0, device_time=1.0, one_device=1.0, memory=1)
    return BurstPlan(
        policy="given",
        profile="p",
        network="links",
        devices=devices,
        batch=batch,
        layers=tuple(f"l{i}" for i in range(len(counts))),
        counts=tuple(counts),
        prediction=nothing,
    )


def spans(timeline: Timeline, track: str, kind: str) -> list[tuple[Any, ...]]:
    return [(s.name, s.start, s.stop) for s in timeline.spans if s.track == track and s.kind == kind]


def test_computing_is_slower_while_gradients_are_on_their_way() -> None:
    @dataclass(frozen=True)
    class SlowingLinks(Links):
        @property
        def slowing(self) -> float:
            return 0.25

    given = {"sync_latency": 1.0, "sync_rate": math.inf, "move_latency": 0.25, "move_rate": 100.0}
    # Two layers on two devices, a bucket each: a backward of 4 s, of which the all-reduce before it takes up one.
    quiet, slow = (
        simulate_burst(plan([2, 2], 2, 2), profile(2), links, bucket_bytes=1)
        for links in (Links(**given), SlowingLinks(**given))
    )
    before, after = (spans(timeline, "rank 0/compute", "backward") for timeline in (quiet, slow))
    assert [(b - a) for _, a, b in before] == pytest.approx([4.0, 4.0])
    # In the second of the all-reduce 0.8 s of computing are done; the first layer's backward had the device to itself.
    assert [(b - a) for _, a, b in after] == pytest.approx([4.0, 4.0 + 0.2])


def test_an_iteration_is_what_a_calculation_by_hand_gives() -> None:
    """Two layers, batch 4: the first on two devices, the second on one. Forward 3, two samples of 40 bytes move in
    1.05 s, forward 5, backward 10, back 1.05 s, backward 6, and the first layer's 10 bytes of gradient in 0.6 s."""
    timeline = simulate_burst(plan([2, 1], 4, 3), profile(2), LINKS)
    timeline.check()
    assert spans(timeline, "rank 0/compute", "forward") == [
        ("l0", 0.0, 3.0),
        ("l1", pytest.approx(4.05), pytest.approx(9.05)),
    ]
    assert spans(timeline, "rank 0/network", "communication") == [
        ("samples into l1", 3.0, pytest.approx(4.05)),
        ("gradients back from l1", pytest.approx(19.05), pytest.approx(20.1)),
        ("gradients of l0", pytest.approx(26.1), pytest.approx(26.7)),
    ]
    assert spans(timeline, "rank 1/compute", "idle") == [("idle", pytest.approx(4.05), pytest.approx(19.05))]
    assert spans(timeline, "rank 2/compute", "idle") == [("idle", 0.0, pytest.approx(26.7))]
    assert not spans(timeline, "rank 0/compute", "idle")
    assert timeline.source == "predicted" and timeline.duration == pytest.approx(26.7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 13))
def test_busy_and_idle_time_fill_every_device(counts: list[int], batch: int) -> None:
    timeline = simulate_burst(plan(counts, batch, 7), profile(len(counts)), LINKS, bucket_bytes=25)
    for rank in range(7):
        own = [s for s in timeline.spans if s.track.startswith(f"rank {rank}/")]
        idle = sum(s.duration for s in own if s.kind == "idle")
        busy = sum(b - a for a, b in union([(s.start, s.stop) for s in own if s.kind != "idle"]))
        assert idle + busy == pytest.approx(timeline.duration)
    for i, g in enumerate(counts):
        ran = {s.track for s in timeline.spans if s.kind == "forward" and s.name == f"l{i}"}
        assert ran == {f"rank {r}/compute" for r in range(min(g, batch))}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5))
def test_without_gradients_the_timeline_lasts_as_long_as_the_planner_predicts(counts: list[int]) -> None:
    model = profile(len(counts), parameters=0)
    planner = BurstPlanner(model, ProfileCost(model, 8, wires=LINKS), 4)
    expected = planner.predict(counts).prediction.iteration
    assert simulate_burst(plan(counts, 8, 4), model, LINKS).duration == pytest.approx(expected)


def test_communication_at_the_same_time_shares_a_link() -> None:
    """The last layer's sum over two ranks and the growing re-sharding share rank 0's link until one is done."""
    model = profile(2, parameters=1000)
    alone = simulate_burst(plan([4, 2], 8, 4), model, Links(0.0, 1e9, 0.25, 100.0))
    shared = simulate_burst(plan([4, 2], 8, 4), model, Links(0.0, 100.0, 0.25, 100.0))

    def back(timeline: Timeline) -> float:
        return next(s.duration for s in timeline.spans if s.name == "gradients back from l1")

    assert back(shared) == pytest.approx(2 * back(alone))


@dataclass(frozen=True)
class Crowded(Links):
    """Links on which two all-reduces at once take half as long again as one after the other."""

    def crowding(self, ranks: int, /) -> float:
        return 1.5


def test_two_sums_at_once_lose_what_crowding_costs_and_a_third_waits() -> None:
    """Three layers on two ranks, each with a sum of 20 s and 3 s of backward: the first two share from the start of the
    second until it is their turn to end; the third begins when the first has ended."""

    def sums(links: Links) -> list[tuple[Any, Any]]:
        timeline = simulate_burst(plan([2, 2, 2], 2, 2), profile(3, parameters=2000), links, bucket_bytes=1)
        found = spans(timeline, "rank 0/network", "communication")
        return sorted((start, stop) for _, start, stop in found)

    fair = sums(Links(0.0, 100.0, 0.25, 100.0))
    first = 6.0 + 4.0  # forward of three layers, backward of the last
    # 4 s alone, then both at half speed: 16 s are left of the first.
    assert fair[0] == (first, pytest.approx(first + 4 + 32)) and fair[1][0] == first + 4
    assert fair[2][0] == pytest.approx(fair[0][1]), "two at once"
    assert max(stop for _, stop in fair) == pytest.approx(first + 60), "nothing is lost"
    crowded = sums(Crowded(0.0, 100.0, 0.25, 100.0))
    assert crowded[0] == (first, pytest.approx(first + 4 + 48))
    assert max(stop for _, stop in crowded) > first + 60


def test_a_cut_carries_every_tensor_that_is_still_needed() -> None:
    assert live_bytes(profile(3)) == [40, 80, 120]
    assert live_bytes(profile(4, edges=((0, 1), (0, 3), (1, 2), (2, 3)))) == [40, 120, 160, 160]


def test_a_plan_for_other_layers_is_refused() -> None:
    with pytest.raises(Error, match="does not match profile"):
        simulate_burst(plan([1, 1], 4, 2), profile(3), LINKS)


ranks = st.sets(st.integers(0, 5), min_size=1).map(lambda s: tuple(sorted(s)))


def fewest(before: SampleLayout, after: tuple[int, ...]) -> int:
    """By trying all sizes: how few samples can move if the sizes differ by one at most."""
    each, more = divmod(before.batch, len(after))
    best = math.inf
    for mask in range(1 << len(after)):
        if mask.bit_count() == more:
            sizes = [each + (mask >> i & 1) for i in range(len(after))]
            stay = sum(min(n, len(before.samples(r))) for n, r in zip(sizes, after, strict=True))
            best = min(best, before.batch - stay)
    return int(best)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 14), st.lists(ranks, min_size=2, max_size=4))
def test_re_sharding_is_even_and_moves_the_fewest_samples(batch: int, stages: list[tuple[int, ...]]) -> None:
    layout = block_layout(batch, stages[0])
    for stage in stages[1:]:
        after = next_layout(layout, stage)
        assert sorted(s for _, samples in after.held for s in samples) == list(range(batch))
        sizes = [len(after.samples(r)) for r in stage]
        assert max(sizes) - min(sizes) <= 1
        assert moved(layout, after) == fewest(layout, stage)
        assert {r for r, samples in after.held if samples} <= set(stage)
        moves = {r: move(layout, after, r) for r in range(6)}
        assert sum(len(rows) for m in moves.values() for _, rows in m.sends) == moved(layout, after)
        for r, m in moves.items():
            for peer, rows in m.sends:
                sent = [layout.samples(r)[i] for i in rows]
                got = [after.samples(peer)[i] for i in dict(moves[peer].receives)[r]]
                assert sent == got
        layout = after


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_the_busiest_rank_moves_what_the_planner_counts(times: int, before: int, after: int) -> None:
    batch = times * math.lcm(before, after)
    first = block_layout(batch, range(before))
    assert busiest(first, next_layout(first, range(after))) == int(moved_samples(batch, before, after))


def test_parts_close_at_stages_and_at_full_buckets() -> None:
    sets = [(0, 1)] * 4 + [(0,)] * 2
    found = parts(sets, [0, 50, 60, 10, 5, 5], 60)
    assert [(p.start, p.stop) for p in found] == [(0, 2), (2, 4), (4, 6)]
    assert [(p.start, p.stop) for p in parts(sets, [0, 60, 60, 60, 5, 5], 60)] == [(0, 2), (2, 3), (3, 4), (4, 6)]

"""Depth plans: exact segments, batches and depths by device, and the closed forms of what they save."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error, InputError
from dovetail.core.network import Contention
from dovetail.core.profile import Profile
from dovetail.planning.auto.options import Question
from dovetail.planning.depth.buckets import depth_stream
from dovetail.planning.depth.cost import DepthCosts, traffic
from dovetail.planning.depth.planner import COMPARED, POLICIES, WorkerDevice, compare, plan
from dovetail.planning.depth.segmentation import partition, segments
from dovetail.planning.merge.exact import fewest
from dovetail.planning.merge.stream import objective
from dovetail.simulate.depth import of_phase, savings, simulate_depth
from tests.planning.merge.oracle import made_network, made_profile

times = st.lists(st.one_of(st.integers(0, 5).map(float), st.floats(0, 10)), min_size=1, max_size=9)


def even(layers: int = 8, *, forward: float = 1.0, backward: float = 2.0, nbytes: int = 1000) -> Profile:
    """Equal layers whose backward takes twice as long as forward: the closed forms' assumption."""
    return made_profile([nbytes] * layers, [backward] * layers, forward=[forward] * layers)


def runs(seconds: list[float], count: int) -> Iterator[list[float]]:
    """The lengths of every partition there is."""
    for inner in itertools.combinations(range(1, len(seconds)), count - 1):
        yield [sum(seconds[a:b]) for a, b in itertools.pairwise([0, *inner, len(seconds)])]


@given(times, st.data())
def test_no_partition_has_a_shorter_longest_segment_or_then_a_smaller_sum_of_squares(
    seconds: list[float], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(seconds)))
    cuts = partition(seconds, count)
    assert len(cuts) == count and cuts[-1] == len(seconds) and sorted(set(cuts)) == cuts and cuts[0] > 0
    got = [sum(seconds[a:b]) for a, b in itertools.pairwise([0, *cuts])]
    longest = min(max(r) for r in runs(seconds, count))
    slack = 1e-9 * (1 + sum(seconds))
    assert max(got) <= longest + slack
    squares = min(sum(x * x for x in r) for r in runs(seconds, count) if max(r) <= longest + slack / 1e3)
    assert sum(x * x for x in got) <= squares + slack * (1 + sum(seconds))


def test_segments_hold_parameters_and_cover_all_layers() -> None:
    profile = even(6)
    bare = msgspec.structs.replace(profile, tensors=tuple(t for t in profile.tensors if t.layer in (1, 4)))
    assert [(s.start, s.stop) for s in segments(bare, 2)] == [(0, 4), (4, 6)]
    with pytest.raises(Error, match=r"expected 1 to 2 segments .* got 3"):
        segments(bare, 3)


def test_cuts_fall_only_where_they_may() -> None:
    assert [s.start for s in segments(even(8), 3, cuts=["layer2", "layer3", "layer7"])] == [0, 3, 7]
    with pytest.raises(Error, match="expected layers of profile 'made', got 'head'"):
        segments(even(8), 2, cuts=["head"])


@pytest.mark.parametrize(("workers", "saved"), [(2, 1 / 6), (4, 0.25), (8, 7 / 24)])
def test_the_ladder_saves_what_the_closed_form_says(workers: int, saved: float) -> None:
    made = savings(plan(even(24, nbytes=840), workers=workers, policy="ladder"))
    assert made.compute == pytest.approx(saved) == pytest.approx((workers - 1) / (3 * workers))
    assert made.backward == pytest.approx((workers - 1) / (2 * workers))
    assert made.activations == pytest.approx((workers - 1) / (2 * workers))
    assert made.sent == pytest.approx(0.25), "exactly a quarter for every number of workers"
    assert made.peak == made.iteration == 0, "the deepest worker keeps everything and everybody waits for it"


@pytest.mark.parametrize(("workers", "saved"), [(4, 0.298), (8, 0.346)])
def test_balanced_batches_shorten_the_iteration_as_the_closed_form_says(workers: int, saved: float) -> None:
    made = plan(even(24), workers=workers, policy="balanced", batch=512)
    assert sum(made.phases[0].batches) == 512 * workers
    assert savings(made).iteration == pytest.approx(saved, abs=0.002)
    shares = [1 / (1 + 2 * (i + 1) / workers) for i in range(workers)]
    for batch, share in zip(made.phases[0].batches, shares, strict=True):
        assert batch == pytest.approx(512 * workers * share / sum(shares), abs=1.5)


def test_balanced_batches_leave_time_for_what_is_still_to_be_sent() -> None:
    """Whoever is shallow must be done earlier: after it all gradients down to the input are on their way."""
    network = made_network(0.0, 2e-3)
    made = plan(even(24), network, workers=4, policy="balanced", batch=64)
    shares = plan(even(24), workers=4, policy="balanced", batch=64).phases[0].batches
    assert made.phases[0].batches[0] < shares[0]

    def predicted(batches: tuple[int, ...]) -> float:
        costs = DepthCosts(even(24), made.segments, (WorkerDevice(),) * 4, 2)
        phase = msgspec.structs.replace(
            made.phases[0], batches=batches, workers=costs.predict(made.phases[0].depths, batches)
        )
        stream, _ = depth_stream(msgspec.structs.replace(made, phases=(phase,)), even(24))
        return objective(stream, fewest(stream, network.cost(ranks=4)), network.cost(ranks=4))

    assert predicted(made.phases[0].batches) == pytest.approx(made.phases[0].iteration)
    assert made.phases[0].iteration < predicted(shares)


def test_segments_are_of_equal_time_not_of_equal_count() -> None:
    """The last layer takes as long as all others."""
    profile = made_profile([10] * 4, [3.0, 1.0, 1.0, 1.0])  # in ready order: the last layer first
    assert [(s.start, s.stop) for s in plan(profile, workers=2).segments] == [(0, 3), (3, 4)]


def test_min_contributors_lifts_the_input_and_leaves_the_rest() -> None:
    lifted = plan(even(), workers=4, min_contributors=2)
    assert lifted.phases[0].depths == (1, 2, 4, 4)
    assert [len(lifted.contributors(0, s)) for s in range(4)] == [2, 2, 3, 4]
    assert plan(even(), workers=4).phases[0].depths == (1, 2, 3, 4)


def test_there_may_be_more_or_fewer_segments_than_workers() -> None:
    assert plan(even(), workers=2, segments=4).phases[0].depths == (2, 4)
    assert plan(even(), workers=4, segments=2).phases[0].depths == (1, 1, 2, 2)
    assert len(plan(even(3), workers=8).segments) == 3, "no more segments than layers"


def test_late_policies_begin_at_full_depth() -> None:
    late = plan(even(), workers=4, policy="late-ladder")
    assert [(p.begins, p.depths) for p in late.phases] == [(0.0, (4,) * 4), (0.5, (1, 2, 3, 4))]
    assert savings(late).compute == pytest.approx(0.125)
    quarter = plan(even(), workers=4, policy="late-ladder:0.75")
    assert savings(quarter).compute == pytest.approx(0.0625)
    assert savings(quarter).sent == pytest.approx(0.0625, abs=1e-4)
    assert of_phase(quarter, 1).compute == pytest.approx(0.25)


def test_any_depths_can_be_given() -> None:
    assert plan(even(), workers=4, policy="depths:4,1,2,2").phases[0].depths == (4, 1, 2, 2)
    for wrong, said in [
        ("depths:1,2", "one for each of 4 workers"),
        ("depths:1,2,3,3", "somebody at 4"),
        ("depths:1,2,3,x", "whole numbers"),
        ("late-ladder:1.5", "above 0 and below 1"),
        ("stairs", "no policy 'stairs': expected one of full, ladder"),
    ]:
        with pytest.raises(Error, match=said):
            plan(even(), workers=4, policy=wrong)


def test_slow_devices_take_shallow_depths() -> None:
    devices = [WorkerDevice(speed=1.0), WorkerDevice(speed=0.5), WorkerDevice(speed=2.0), WorkerDevice(speed=0.4)]
    made = plan(even(), policy="ladder", devices=devices)
    assert made.phases[0].depths == (3, 2, 4, 1)
    assert made.phases[0].workers[3].forward == pytest.approx(8 / 0.4)
    assert made.phases[0].iteration < made.full.iteration
    deep = plan(even(), policy="heterogeneous", devices=devices)
    assert deep.phases[0].iteration == made.phases[0].iteration
    assert all(a >= b for a, b in zip(deep.phases[0].depths, made.phases[0].depths, strict=True))


def test_small_devices_take_the_depths_that_they_hold() -> None:
    profile = even()  # 8 layers of 1000 bytes of weights and 4 bytes of output for each of 8 samples
    fixed, layer = 4 * 8000, 32
    small = WorkerDevice(memory=fixed + 3 * layer)  # two layers are kept, the output of one is on its way
    made = plan(profile, policy="ladder", devices=[WorkerDevice(), small, WorkerDevice(), WorkerDevice()])
    assert made.phases[0].depths[1] == 1
    for worker, prediction in enumerate(made.phases[0].workers):
        depth = made.phases[0].depths[worker]
        assert prediction.memory == fixed + (2 * depth + (depth < 4)) * layer
    assert made.full.workers[0].memory == Question(profile, made_network(0.0, 0.0), devices=4, batch=32).needed(4)
    with pytest.raises(Error, match="do not fit the workers' memory: worker 0 holds at most depth 1"):
        plan(profile, policy="ladder", devices=[small] * 4)
    with pytest.raises(Error, match="worker 1 has memory for depth 1 at most, got 4"):
        plan(profile, policy="depths:1,4,4,4", devices=[WorkerDevice(), small, WorkerDevice(), WorkerDevice()])


def test_memory_limits_the_balanced_batches() -> None:
    profile = even()
    free = plan(profile, workers=4, policy="balanced", batch=64).phases[0]
    limit = free.workers[0].memory - 100
    devices = [WorkerDevice(memory=limit), WorkerDevice(), WorkerDevice(), WorkerDevice()]
    held = plan(profile, policy="balanced", batch=64, devices=devices).phases[0]
    assert held.batches[0] < free.batches[0] and sum(held.batches) == sum(free.batches)
    assert held.workers[0].memory <= limit


def test_traffic_over_all_links_is_a_reduction_and_a_delivery() -> None:
    assert traffic([1, 2], [600, 600]) == [600, 600 + 600]
    assert sum(traffic([1, 2, 3, 4], [120] * 4)) == sum((c + 2) * 120 for c in (1, 2, 3, 4))
    assert traffic([4] * 4, [120] * 4) == [2 * 3 * 480 // 4] * 4, "full depth: a ring all-reduce"


def test_gradients_leave_when_the_slowest_contributor_has_them() -> None:
    """Worker 1 is twice as slow and takes depth 1: it delays the last segment and no other."""
    devices = [WorkerDevice(speed=1.0), WorkerDevice(speed=0.5)]
    profile = even(2)
    made = plan(profile, made_network(0.0, 0.0, ranks=2), policy="ladder", devices=devices)
    assert made.phases[0].depths == (2, 1)
    stream, order = depth_stream(made, profile)
    assert [profile.tensors[i].layer for i in order] == [1, 0]
    assert stream.ready == pytest.approx((2 * (2 + 2), max(2 * 4, 2 + 4)))


def test_communication_that_nothing_hides_is_part_of_the_iteration() -> None:
    fast, slow = (plan(even(), made_network(0.0, b), workers=4) for b in (0.0, 1.0))
    assert fast.phases[0].iteration == pytest.approx(24.0)
    assert slow.phases[0].iteration > slow.phases[0].workers[3].forward + slow.phases[0].workers[3].backward
    # Everything is exposed then, so the iteration saves what the wire saves.
    assert slow.phases[0].iteration / slow.full.iteration == pytest.approx(0.75, abs=0.01)


def test_computing_is_longer_by_what_communication_was_measured_to_cost_it() -> None:
    alone = made_network(0.0, 1e-4)
    beside = msgspec.structs.replace(alone, contention=Contention(compute=0.1))
    quiet, slowed = (plan(even(), network, workers=4) for network in (alone, beside))
    sending = even().parameter_bytes * 1e-4  # the ladder puts somewhat less on the wire
    computing = 24.0
    assert computing < quiet.full.iteration < computing + sending
    assert slowed.full.workers[0].backward == pytest.approx(16.0 * (1 + 0.1 * sending / computing))
    assert slowed.full.iteration > quiet.full.iteration
    timeline = simulate_depth(slowed, even(), beside)
    assert max(span.stop for span in timeline.spans) == pytest.approx(slowed.phases[-1].iteration)


def test_a_comparison_has_every_policy_and_each_survives_storage(tmp_path: object) -> None:
    plans = compare(even(), made_network(1e-3, 1e-6), workers=4)
    assert [p.policy for p in plans] == list(COMPARED)
    assert {p.policy for p in plans} <= set(POLICIES)
    for made in plans:
        made.check()
        assert files.decode(files.encode(made), DepthPlan, "plan.json") == made


def test_a_stored_plan_that_trains_nothing_in_the_first_segment_is_refused() -> None:
    made = plan(even(), workers=2)
    lame = msgspec.structs.replace(made.phases[0], depths=(1, 1))
    with pytest.raises(InputError, match=r"phases\[0\].depths: .*nobody would train it"):
        files.decode(files.encode(msgspec.structs.replace(made, phases=(lame,))), DepthPlan, "plan.json")


def test_one_worker_is_planned_and_wrong_numbers_are_one_line() -> None:
    alone = plan(even(), workers=1)
    assert alone.phases[0].depths == (1,) and savings(alone).compute == 0
    for options, said in [
        ({}, "workers: expected a number"),
        ({"workers": 2, "min_contributors": 3}, "min_contributors: expected 1 to 2, got 3"),
        ({"workers": 2, "devices": [WorkerDevice()]}, "one for each of 2 workers, got 1"),
        ({"workers": 2, "segments": 99}, "expected 1 to 8 segments"),
        ({"workers": 9, "batch": 1, "policy": "stairs"}, "no policy"),
        ({"workers": 0, "network": made_network(0.1, 1e-4)}, "workers: expected 1 to 2,147,483,647, got 0"),
        ({"workers": 2, "batch": 0}, "batch: expected 1 to 2,147,483,647, got 0"),
        ({"workers": 2, "batch": -4}, "batch: expected 1 to 2,147,483,647, got -4"),
        ({"workers": 2, "batch": 2**40}, "batch: expected 1 to 2,147,483,647, got 1099511627776"),
        ({"devices": []}, "workers: expected 1 to 2,147,483,647, got 0"),
        ({"workers": 2, "policy": "depths:1,²"}, "expected whole numbers such as depths:1,2,4,4"),
    ]:
        with pytest.raises(Error, match=said):
            plan(even(), **options)  # type: ignore[arg-type]
    fat = msgspec.structs.replace(even(1).layers[0], activation_bytes=2**20)
    with pytest.raises(Error, match=r"batch: expected workers that need at most 281,474,976,710,656 bytes, got"):
        plan(msgspec.structs.replace(even(1), layers=(fat,)), workers=2, batch=2**31 - 1)
    with pytest.raises(Error, match="speed: expected above 0"):
        WorkerDevice(speed=0)
    assert math.isclose(savings(plan(even(), workers=4, policy="guard")).compute, 0)

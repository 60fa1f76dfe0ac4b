"""The baselines that burst plans are compared with, what gaps are worth, and gradients behind backward."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from dovetail.core.errors import Error
from dovetail.core.network import AffineCost
from dovetail.measure.presets import preset
from dovetail.planning.burst import rules
from dovetail.planning.burst.background import background, phases, with_background
from dovetail.planning.burst.cost import Links, NetworkLinks, ProfileCost, moved_samples
from dovetail.planning.burst.overlap import fastest_overlapped, hidden_share, lower_bound, overlapped
from dovetail.planning.burst.planner import BurstPlanner
from tests.planning.merge.oracle import made_profile

from .burst_oracle import made_planner, random_graph


def real_planner(seed: int, devices: int = 4, batch: int = 16) -> BurstPlanner:
    rng = random.Random(seed)
    n = 5
    profile = made_profile([rng.choice([4, 1 << 20, 1 << 24]) for _ in range(n)], [rng.uniform(1e-3, 9e-3)] * n)
    return BurstPlanner(profile, ProfileCost(profile, batch), devices)


def test_data_parallel_plans_give_every_layer_the_same_devices() -> None:
    planner = made_planner(random.Random(1), 4, batch=8, devices=8)
    for g in (1, 3, 7, 8):
        plan = rules.by_name(planner, f"dp:{g}")
        assert plan.counts == (g,) * 4 and plan.policy == f"dp:{g}"
        used = plan.prediction
        assert used.device_time == pytest.approx(g * used.iteration)
    best = rules.by_name(planner, "best-dp")
    assert best.prediction.iteration == min(rules.by_name(planner, f"dp:{g}").prediction.iteration for g in range(1, 9))


def test_a_static_partition_is_the_fastest_within_the_limit_or_the_smallest_at_a_speed() -> None:
    planner = real_planner(3)
    plans = {g: rules.by_name(planner, f"dp:{g}").prediction for g in (1, 2, 3, 4)}
    for limit in (1.0, 1.3, 2.0, 9.0):
        found = rules.by_name(planner, "static-partition", amplification=limit)
        within = [p for p in plans.values() if p.amplification <= limit]
        assert found.prediction.iteration == min(p.iteration for p in within)
    for wanted in (p.iteration for p in plans.values()):
        found = rules.static_partition(planner, iteration=wanted)
        assert found.counts[0] == min(g for g, p in plans.items() if p.iteration <= wanted)
    with pytest.raises(Error, match="no number of devices"):
        rules.static_partition(planner, iteration=1e-9)


def test_the_per_layer_limit_is_the_best_plan_that_keeps_it_in_every_layer() -> None:
    rng = random.Random(5)
    made = 0
    for _ in range(40):
        planner = made_planner(rng, 4, batch=12, devices=4, counts=(1, 2, 4))
        limit = rng.uniform(1.0, 4.0)
        best = np.inf
        for counts in np.stack(np.meshgrid(*[(1, 2, 4)] * 4), axis=-1).reshape(-1, 4).tolist():
            kept = True
            for v, g in enumerate(counts):
                samples = -(-12 // g)
                moving = float(planner.cost.reshard(v - 1, counts[v - 1], g)) if v else 0.0
                taken = g * (float(planner.cost.compute(v, samples)) + float(planner.cost.sync(v, g)) + moving)
                kept &= taken <= limit * float(planner.cost.compute(v, 12)) * (1 + 1e-12)
            if kept:
                best = min(best, planner.predict(counts).prediction.iteration)
        if np.isfinite(best):
            made += 1
            found = rules.by_name(planner, "per-layer", amplification=limit).prediction
            assert found.iteration == best
            assert planner.fastest(amplification=limit).prediction.iteration <= best, "a total limit is never slower"
    assert made > 20


def test_the_rule_of_deeppool_tests_only_the_fastest_way_to_a_layer_and_names_what_it_breaks() -> None:
    rng = random.Random(9)
    kept = slower = broke = 0
    for _ in range(150):
        planner = made_planner(rng, 6, batch=8, devices=8, counts=(1, 2, 4, 8))
        limit = rng.uniform(1.2, 3.0)
        plan, broken = rules.deeppool(planner, amplification=limit)
        above = [v for v, taken in enumerate(layer_amplifications(planner, plan.counts)) if taken > limit * (1 + 1e-9)]
        assert [v.layer for v in broken] == [plan.layers[v] for v in above]
        assert all(v.amplification > limit for v in broken)
        broke += bool(broken)
        if not broken and all(float(planner.cost.compute(v, 8)) > 0 for v in range(6)):
            exact = rules.by_name(planner, "per-layer", amplification=limit).prediction.iteration
            assert plan.prediction.iteration >= exact * (1 - 1e-12)
            kept += 1
            slower += plan.prediction.iteration > exact * (1 + 1e-12)
    assert kept > 40 and slower > 2 and broke > 10, (kept, slower, broke)


def layer_amplifications(planner: BurstPlanner, counts: Sequence[int]) -> list[float]:
    """Of each layer of a chain: its devices times its seconds and those of getting there, over one device's."""
    found = []
    for v, g in enumerate(counts):
        alone, samples = float(planner.cost.compute(v, planner.cost.batch)), -(-planner.cost.batch // g)
        moving = float(planner.cost.reshard(v - 1, counts[v - 1], g)) if v else 0.0
        taken = g * (float(planner.cost.compute(v, samples)) + float(planner.cost.sync(v, g)) + moving)
        found.append(taken / alone if alone > rules.SMALL_LAYER else 1.0)
    return found


def test_the_search_published_with_deeppool_breaks_its_own_limit_and_the_layers_are_named() -> None:
    rng = random.Random(9)
    broke = 0
    for _ in range(100):
        planner = made_planner(rng, 8, batch=8, devices=8)
        limit = rng.uniform(1.2, 3.0)
        plan, broken = rules.deeppool_published(planner, amplification=limit)
        assert set(plan.counts) <= {1, 2, 4, 8}
        assert all(v.layer in plan.layers and v.amplification > limit for v in broken)
        broke += bool(broken)
    assert broke > 10, "it tests one step late"
    forked = made_planner(rng, 3, batch=8, devices=8, edges=[(0, 1), (0, 2), (1, 2)])
    for name in ("deeppool", "deeppool-published", "per-layer"):
        with pytest.raises(Error, match=f"{name}: expected a chain"):
            rules.by_name(forked, name)


@pytest.mark.parametrize("seed", range(10))
def test_phases_add_up_to_the_prediction_and_gaps_to_what_is_idle(seed: int) -> None:
    rng = random.Random(seed)
    planner = made_planner(rng, 6, batch=8, devices=8, edges=random_graph(rng, 6))
    counts = [rng.choice([1, 2, 4, 6]) for _ in range(6)]
    plan, spans = planner.predict(counts).prediction, phases(planner, counts)
    assert sum(s for s, _ in spans) == pytest.approx(plan.iteration)
    assert sum(s * g for s, g in spans) == pytest.approx(plan.device_time)
    left = background(planner, counts)
    assert left.idle == left.useful == pytest.approx(8 * plan.iteration - plan.device_time)


def test_a_gap_is_worth_the_whole_tasks_that_fit() -> None:
    profile = made_profile([0, 0, 0], [4.0, 2.0, 4.0], forward=[2.0, 1.0, 2.0])
    planner = BurstPlanner(profile, ProfileCost(profile, 8, Links(0, math.inf, 0, math.inf)), 4)
    # Two devices halve the outer layers; the middle one leaves device 1 alone twice. Devices 2 and 3 are never used.
    counts = [2, 1, 2]
    spans = [(s, g) for s, g in phases(planner, counts) if s]
    assert spans == [(1.0, 2), (1.0, 1), (1.0, 2), (2.0, 2), (2.0, 1), (2.0, 2)]
    assert background(planner, counts, task=1.0).useful == 2 * 9.0 + 1.0 + 2.0
    assert background(planner, counts, task=1.5).useful == 2 * 9.0 + 1.5
    assert background(planner, counts, task=2.5).useful == 2 * 9.0
    # Device 1 is free from the last layer backward to the first layer forward of the next iteration: 4 + 2 seconds.
    assert background(planner, [1, 2, 1], task=5.5).useful == 2 * 13.5 + 5.5 + 5.5
    for task in (-1.0, math.inf, math.nan):
        with pytest.raises(Error, match="task: expected at least 0 and finite seconds"):
            background(planner, counts, task=task)
    assert background(planner, counts, task=1e-320) == background(planner, counts), "tasks that short fill every gap"


@pytest.mark.parametrize("seed", range(6))
def test_background_plans_keep_the_speed_and_leave_no_less_than_plain_ones(seed: int) -> None:
    rng = random.Random(seed)
    planner = made_planner(rng, 5, batch=8, devices=8)
    speed = rules.by_name(planner, "dp:8").prediction.iteration
    for task in (0.0, 2.0, 20.0):
        found = with_background(planner, task=task, iteration=speed)
        assert found.prediction.iteration <= speed
        left = background(planner, found.counts, task=task).devices
        plain = background(planner, planner.cheapest(iteration=speed).counts, task=task).devices
        static = rules.static_partition(planner, iteration=speed)
        assert left >= max(plain, background(planner, static.counts, task=task).devices) - 1e-12
    most = with_background(planner, task=2.0)
    value = background(planner, most.counts, task=2.0).devices + planner.one_device / most.prediction.iteration
    for g in (1, 2, 4, 8):
        dp = rules.by_name(planner, f"dp:{g}")
        other = background(planner, dp.counts, task=2.0).devices + planner.one_device / dp.prediction.iteration
        assert value >= other - 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_hidden_gradients_are_between_free_and_fully_paid(seed: int) -> None:
    planner = real_planner(seed)
    bound = lower_bound(planner)
    for name in ("dp:1", "dp:4", "fastest"):
        plan = rules.by_name(planner, name)
        hidden = overlapped(planner, plan)
        assert hidden.counts == plan.counts
        assert bound * (1 - 1e-9) <= hidden.prediction.iteration <= plan.prediction.iteration * (1 + 1e-9)
        assert -1e-9 <= hidden_share(planner, plan) <= 1 + 1e-9
    best = fastest_overlapped(planner)
    assert (
        bound * (1 - 1e-9) <= best.prediction.iteration <= overlapped(planner, planner.fastest()).prediction.iteration
    )
    limited = fastest_overlapped(planner, amplification=1.2).prediction
    assert limited.amplification <= 1.2 + 1e-6


def test_gradients_of_one_group_are_merged_as_the_merge_planner_merges_them() -> None:
    from dovetail.planning.merge import exact
    from dovetail.planning.merge import stream as streams

    profile = made_profile([1 << 20] * 4, [1e-3] * 4, forward=[1e-3] * 4)
    links = Links(sync_latency=2e-3, sync_rate=1e9)
    planner = BurstPlanner(profile, ProfileCost(profile, 8, links), 2)
    found = overlapped(planner, rules.by_name(planner, "dp:2")).prediction.iteration
    stream = streams.Stream(tuple(0.5e-3 * (i + 1) for i in range(4)), (1 << 20,) * 4)
    cost = AffineCost(2e-3, 1e-9)
    assert found == pytest.approx(2e-3 + streams.finish(stream, exact.optimal(stream, cost), cost))


def test_moved_samples_are_those_of_the_busiest_rank() -> None:
    assert moved_samples(32, [1, 8, 4, 8, 8], [8, 1, 4, 4, 2]).tolist() == [28, 28, 0, 4, 12]
    assert moved_samples(7, 3, 2).item() == 3


def test_a_network_answers_as_its_ring_law_says() -> None:
    network = preset("10gbe-16")
    wires = NetworkLinks(network)
    ranks = np.array([1, 2, 8, 16, 40])
    expected = [0.0, *(float(network.cost("all_reduce", ranks=int(n))(1 << 20)) for n in ranks[1:])]
    assert wires.all_reduce(1 << 20, ranks) == pytest.approx(expected)
    whole = float(network.cost("all_to_all")(16 / 15 * 3e6))  # each of 16 keeps its own part
    assert float(wires.move(3e6, 16, 4)) == pytest.approx(whole)

"""One plan for everything: never worse than any single technique, with bounds that hold."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, TableCost
from dovetail.core.plan import Plan
from dovetail.measure.presets import preset
from dovetail.planning import compare
from dovetail.planning.auto.options import Question, combinations
from dovetail.planning.burst.bound import fewest_seconds_per_byte, least_work, relaxations, tightest
from dovetail.planning.burst.cost import NetworkLinks, ProfileCost
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.simulate.auto import choose, score, timeline
from dovetail.view.burst import study
from tests.planning.merge.oracle import made_profile

from .auto_oracle import cost, everything, network, profile


@settings(max_examples=25)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(3, 2, 4), (2, 4, 4), (4, 2, 2), (3, 3, 6), (3, 3, 7), (2, 4, 11)]),
    st.sampled_from([(0.0, 1e-3), (1.0, 1e-2), (0.2, 0.05), (5.0, 0.0)]),
    st.sampled_from(["time", "device-time", "throughput"]),
    st.booleans(),
)
def test_nothing_that_the_runtime_executes_is_better(
    seed: int, shape: tuple[int, int, int], wire: tuple[float, float], objective: str, statistics: bool
) -> None:
    """Against every partition on every number of devices, every depth policy, and every device count per layer."""
    layers, devices, batch = shape
    job, net = profile(seed, layers, late=seed % 3 * 0.5), network(*wire)
    found = choose(job, net, devices=devices, batch=batch, objective=objective, statistics=statistics, task=0.5)  # type: ignore[arg-type]
    q = found.question
    exact: list[float] = []
    burst = [math.inf]
    for kind, plan in everything(q):
        s = score(plan, profile=job, network=net, devices=devices, task=0.5)
        if s.iteration <= found.within * (1 + 1e-9):
            (burst if kind == "burst" else exact).append(cost(q, s))
    value, sign = cost(q, found.chosen.score), -1 if objective == "throughput" else 1
    assert found.value == sign * value
    assert value <= min(exact) + 1e-9 * abs(min(exact)), "exact for all but burst"
    best = min(*exact, *burst)
    assert sign * found.bound <= best + 1e-9 * abs(best), "a bound that holds"
    if found.gap < 1e-9:
        assert value == pytest.approx(best)


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from([(0.0, 1e-3), (1.0, 1e-2), (0.2, 0.05)]), st.sampled_from([2, 3, 4]))
def test_no_plan_goes_below_the_bounds_of_its_combination(seed: int, wire: tuple[float, float], devices: int) -> None:
    job, net = profile(seed, 4), network(*wire)
    q = Question(job, net, devices=devices, batch=12, statistics=True, objective="throughput")
    for c in combinations(q)[0]:
        for plan in c.make(math.inf):
            s = score(plan, profile=job, network=net, devices=devices)
            assert s.iteration >= c.bound * (1 - 1e-9)
            assert s.device_time >= max(c.work(s.iteration * (1 + 1e-9)), c.held * s.iteration) * (1 - 1e-9)
            assert s.device_time + s.useful == pytest.approx(devices * s.iteration)


@settings(max_examples=12)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(0.0, 1e-3), (1.0, 1e-2), (0.2, 0.05)]),
    st.sampled_from([(4, 8), (3, 7), (3, 6)]),
)
def test_no_device_counts_go_below_the_bound_of_burst(
    seed: int, wire: tuple[float, float], size: tuple[int, int]
) -> None:
    """Dividing batches and others; a chain, and a fork, whose re-sharding is left out of the bound."""
    devices, batch = size
    job, net = profile(seed, 4), network(*wire)
    if seed % 2:
        job = msgspec.structs.replace(job, edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    planner = BurstPlanner(job, ProfileCost(job, batch, NetworkLinks(net)), devices)
    bound = tightest(relaxations(planner))
    limits = {t: least_work(planner, t) for t in (bound * 1.1, bound * 1.5, math.inf)}
    for counts in itertools.product(planner.choices, repeat=4):
        s = score(planner.predict(counts), profile=job, network=net, devices=devices)
        assert s.iteration >= bound * (1 - 1e-9)
        for limit, work in limits.items():
            assert s.iteration > limit or s.device_time >= work * (1 - 1e-9)


@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(0.0, 1e-3), (1.0, 1e-2), (0.2, 0.05)]),
    st.sampled_from([(4, 8), (6, 31), (3, 7), (8, 12)]),
    st.sampled_from(["time", "device-time", "throughput"]),
)
def test_no_plan_that_burst_planning_shows_is_better(
    seed: int, wire: tuple[float, float], size: tuple[int, int], objective: str
) -> None:
    """Among them data parallelism that does not share the batch evenly, and the rule of others."""
    devices, batch = size
    job, net = profile(seed, 5, late=seed % 3 * 0.5), network(*wire)
    found = choose(job, net, devices=devices, batch=batch, objective=objective)  # type: ignore[arg-type]
    value = cost(found.question, found.chosen.score)
    for row in study(BurstPlanner(job, ProfileCost(job, batch, NetworkLinks(net)), devices)).rows:
        if seed % 3 and len(set(row.plan.counts)) == 1 and batch % row.plan.counts[0] == 0:
            continue  # data parallelism, which knows when each gradient is ready where burst shares the delay out
        s = score(row.plan, profile=job, network=net, devices=devices)
        if s.iteration <= found.within * (1 + 1e-9):
            theirs = cost(found.question, s)
            assert value <= theirs + 1e-9 * abs(theirs), row.plan.policy


def test_a_batch_that_the_devices_do_not_share_evenly_still_uses_all_of_them() -> None:
    """Every layer on all three devices is no data parallelism of torch's: two have two samples and one has three."""
    found = choose(profile(1, 3), network(0.0, 1e-6), devices=3, batch=7)
    assert found.baseline.devices == 1
    assert isinstance(found.chosen.plan, BurstPlan) and set(found.chosen.plan.counts) == {3}
    assert found.value < 0.8 * found.baseline.score.iteration


def test_the_rate_of_a_table_is_that_of_its_cheapest_size() -> None:
    assert fewest_seconds_per_byte(TableCost((1.0, 10.0, 20.0), (5.0, 10.0, 40.0))) == 1.0
    assert fewest_seconds_per_byte(TableCost((1.0, 10.0, 20.0), (50.0, 60.0, 65.0))) == 0.5
    assert fewest_seconds_per_byte(AffineCost(3.0, 0.25)) == 0.25


def test_the_score_of_a_plan_is_what_its_timeline_shows() -> None:
    job, net = profile(7, 5), network(0.5, 0.02)
    q = Question(job, net, devices=4, batch=8, statistics=True)
    seen = set()
    for c in combinations(q)[0]:
        for plan in c.make(math.inf):
            drawn = timeline(plan, job, net)
            s = score(plan, profile=job, network=net, devices=4)
            assert s.iteration == pytest.approx(drawn.duration, rel=1e-12)
            if isinstance(plan, Plan):
                assert s.device_time == pytest.approx(c.devices * s.iteration), "held from start to end"
                assert s.iteration == pytest.approx(plan.prediction.iteration)
            elif isinstance(plan, BurstPlan):
                idle = sum(x.duration for x in drawn.spans if x.kind == "idle")
                assert s.device_time == pytest.approx(4 * drawn.duration - idle)
            else:
                assert s.iteration == pytest.approx(plan.phases[-1].iteration)
                computing = sum(w.forward + w.backward for w in plan.phases[-1].workers)
                assert computing * (1 - 1e-9) <= s.device_time <= c.devices * s.iteration * (1 + 1e-9)
            seen.add(type(plan))
    assert seen == {Plan, DepthPlan, BurstPlan}


def test_background_tasks_get_whole_tasks_only_and_gaps_go_on_in_the_next_iteration() -> None:
    """Ten seconds; a device that is busy from 4 to 6 has one gap of 8 s: two tasks of 3 s."""
    from dovetail.planning.burst.background import worth
    from dovetail.simulate.auto import gap_lengths

    assert gap_lengths([(4.0, 6.0)], 10.0) == [8.0] and worth(8.0, 3.0) == 6.0
    assert gap_lengths([(0.0, 6.0), (2.0, 3.0), (7.0, 8.0)], 10.0) == [1.0, 2.0]
    assert gap_lengths([(0.0, 10.0)], 10.0) == [] and worth(0.3, 0.1) == pytest.approx(0.3)
    job, net = profile(0, 3), network(1e-3, 1e-9)
    plan = choose(job, net, devices=2).chosen.plan
    with pytest.raises(Error, match="task: expected at least 0 and finite seconds, got inf"):
        score(plan, profile=job, network=net, devices=2, task=math.inf)


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_never_worse_than_the_policies_of_merging_and_overlap(seed: int) -> None:
    rng = random.Random(seed)
    n = 30
    job = made_profile([rng.randint(50, 4_000_000) for _ in range(n)], [rng.uniform(1e-4, 5e-3) for _ in range(n)])
    for fabric in ("10gbe", "100gbe", "nvlink"):
        net = preset(f"{fabric}-8")
        found = choose(job, net)
        singles = [*compare(job, net, workers=8), *compare(job, net, workers=8, overlap="forward")]
        assert found.value <= min(p.prediction.iteration for p in singles) * (1 + 1e-9)


def test_bounds_spare_most_of_the_planning() -> None:
    job = made_profile([3_000_000] * 40, [2e-3] * 40)
    found = choose(job, preset("100gbe-64"))
    assert len(found.dropped) > found.considered / 2 and found.gap == 0.0

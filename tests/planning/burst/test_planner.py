"""The burst planner against every plan there is."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.core.network import FloatArray
from dovetail.planning.burst import rules
from dovetail.planning.burst.graph import decompose
from dovetail.planning.burst.planner import BurstPlanner, useful_counts

from .burst_oracle import all_plans, front_of, made_planner, points, random_graph


def limits(rng: random.Random, values: FloatArray) -> list[float]:
    """Below the least, the least, in between, above the most."""
    low, high = float(values.min()), float(values.max())
    return [low - 1, low, *(rng.uniform(low, high) for _ in range(2)), high + 1]


def agrees_under_limits(rng: random.Random, planner: BurstPlanner, counts: tuple[int, ...]) -> None:
    time, work, memory = all_plans(planner, counts)
    fits = memory <= (np.inf if planner.memory is None else planner.memory)
    time, work = time[fits], work[fits]
    for limit in limits(rng, work):
        if limit < planner.one_device or not planner.one_device:
            continue
        within = work <= limit
        found = None
        if within.any():
            found = planner.fastest(amplification=limit / planner.one_device).prediction
            want = min(zip(time[within], work[within], strict=True))
            assert (found.iteration, found.device_time) == want
    for limit in limits(rng, time):
        within = time <= limit
        if not within.any():
            with pytest.raises(Error, match="no plan for 'made'"):
                planner.cheapest(iteration=limit)
            continue
        found = planner.cheapest(iteration=limit).prediction
        assert (found.device_time, found.iteration) == min(zip(work[within], time[within], strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_front_of_a_chain_is_the_front_of_all_plans(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(280):
        counts = rng.choice([(1, 2), (1, 2, 3), (1, 2, 4), (1, 3, 4, 6)])
        planner = made_planner(rng, rng.randint(1, 5), batch=12, devices=6, counts=counts)
        assert points(planner) == front_of(*all_plans(planner, counts)[:2])


@pytest.mark.parametrize("seed", range(4))
def test_the_front_of_a_graph_is_the_front_of_all_plans(seed: int) -> None:
    rng = random.Random(100 + seed)
    forks = 0
    for _ in range(90):
        layers = rng.randint(2, 6)
        counts = (1, 2, 3) if layers > 4 else (1, 2, 4, 5)
        planner = made_planner(rng, layers, batch=12, devices=6, counts=counts, edges=random_graph(rng, layers))
        forks += len(planner.edges) >= layers
        assert points(planner) == front_of(*all_plans(planner, counts)[:2])
    assert forks > 20, "graphs with forks that join were among them"


@pytest.mark.parametrize("seed", range(3))
def test_plans_under_a_limit_are_the_best_there_are(seed: int) -> None:
    rng = random.Random(200 + seed)
    for _ in range(30):
        layers = rng.randint(1, 6)
        counts = (1, 2, 3) if layers > 4 else (1, 2, 4, 5)
        edges = random_graph(rng, layers) if rng.random() < 0.7 else None
        planner = made_planner(rng, layers, batch=12, devices=6, counts=counts, edges=edges)
        agrees_under_limits(rng, planner, counts)


def test_plans_under_a_limit_are_the_best_of_many_choices() -> None:
    rng = random.Random(300)
    counts = useful_counts(60, 60)
    assert len(counts) == 15  # more than the planner takes at once without a coarse look first
    for _ in range(25):
        planner = made_planner(rng, 3, batch=60, devices=60, edges=[(0, 1), (1, 2), (0, 2)])
        agrees_under_limits(rng, planner, counts)


@pytest.mark.parametrize("seed", range(2))
def test_memory_is_a_constraint_of_whole_plans(seed: int) -> None:
    rng = random.Random(400 + seed)
    for _ in range(40):
        layers = rng.randint(1, 5)
        edges = random_graph(rng, layers) if rng.random() < 0.5 else None
        free = made_planner(rng, layers, batch=12, devices=6, counts=(1, 2, 4), edges=edges)
        time, work, memory = all_plans(free, (1, 2, 4))
        most = int(rng.uniform(memory.min(), memory.max() + 1))
        planner = BurstPlanner(free.profile, free.cost, 6, counts=(1, 2, 4), memory=most)
        fits = memory <= most
        assert points(planner) == front_of(time[fits], work[fits])
        assert all(p.prediction.memory <= most for p in planner.front())
        agrees_under_limits(rng, planner, (1, 2, 4))
        with pytest.raises(Error, match=r"no plan .* bytes per rank"):
            BurstPlanner(free.profile, free.cost, 6, counts=(1, 2, 4), memory=int(memory.min()) - 1).front()


@given(st.integers(1, 40), st.integers(1, 60))
def test_useful_counts_are_the_smallest_for_each_local_batch(batch: int, devices: int) -> None:
    smallest: dict[int, int] = {}
    for g in range(devices, 0, -1):
        smallest[-(-batch // g)] = g
    assert list(useful_counts(batch, devices)) == sorted(smallest.values())
    assert len(smallest) <= 2 * batch**0.5 + 1


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_by_trying_useful_counts_only(seed: int) -> None:
    rng = random.Random(500 + seed)
    layers = rng.randint(2, 3)
    planner = made_planner(rng, layers, batch=7, devices=9, edges=random_graph(rng, layers))
    assert points(planner) == front_of(*all_plans(planner, tuple(range(1, 10)))[:2])


@pytest.mark.parametrize("seed", range(20))
def test_the_front_keeps_what_it_promises(seed: int) -> None:
    rng = random.Random(600 + seed)
    planner = made_planner(rng, 6, batch=12, devices=6, edges=random_graph(rng, 6))
    front = points(planner)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(front))
    for g in range(1, 7):
        dp = rules.by_name(planner, f"dp:{g}").prediction
        assert any(t <= dp.iteration and w <= dp.device_time for t, w in front)
    assert planner.fastest().prediction.iteration == front[0][0]
    assert planner.fastest(amplification=1e6).prediction.iteration == front[0][0]
    assert planner.cheapest().prediction.device_time == front[-1][1]
    with pytest.raises(Error, match="iteration: expected seconds, at least 0, got nan"):
        planner.cheapest(iteration=float("nan"))
    if planner.one_device:
        assert planner.fastest(amplification=1).prediction.amplification <= 1
        limits = [p.prediction for p in planner.tradeoff()]
        assert all((p.iteration, p.device_time) in front for p in limits)


def test_more_devices_never_hurt() -> None:
    rng = random.Random(700)
    for _ in range(20):
        planner = made_planner(rng, 5, batch=16, devices=16, edges=random_graph(rng, 5))
        times = [
            BurstPlanner(planner.profile, planner.cost, g).fastest().prediction.iteration for g in (1, 2, 4, 8, 16)
        ]
        assert times == sorted(times, reverse=True)


def test_a_graph_whose_branches_cross_gets_one_line_that_names_them() -> None:
    bridge = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    with pytest.raises(Error, match=r"^layer graph: .*series-parallel.*'a', 'b', 'c', 'd' cross") as caught:
        decompose(4, bridge, names=["a", "b", "c", "d"])
    assert "\n" not in str(caught.value)
    with pytest.raises(Error, match="execution order"):
        decompose(3, [(1, 0)])


def test_bad_questions_get_one_line() -> None:
    planner = made_planner(random.Random(1), 3, batch=4, devices=4)
    for ask, line in (
        (lambda: planner.fastest(amplification=0.5), "amplification: expected at least 1"),
        (lambda: planner.predict([1, 2]), "counts: expected one of 1 to 4 devices for each of 3 layers"),
        (lambda: planner.predict([1, 2, 5]), "counts: expected one of 1 to 4 devices"),
        (lambda: rules.by_name(planner, "dp:5"), "no burst policy 'dp:5'"),
        (lambda: rules.by_name(planner, "magic"), "expected one of fastest"),
        (lambda: useful_counts(0, 4), "batch and devices"),
    ):
        with pytest.raises(Error, match=line):
            ask()

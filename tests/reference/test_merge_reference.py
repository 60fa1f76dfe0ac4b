"""The published GoogLeNet trace on K80s with the published ring model: every figure that we claim for merging.

The log has a row `[id, elements, backward us, comm us, merged comm us]` for each of 128 blobs, all of them twice, in
forward order. The two blobs of a layer (weight and bias) share one backward time, so there are 64 layers. Gradients are
float32; forward takes half as long as backward.
"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path

import pytest

from dovetail.core.network import Network, TableCost
from dovetail.core.profile import Profile
from dovetail.planning import compare, plan
from dovetail.planning.merge import exact, robust, rules
from dovetail.planning.merge import stream as streams
from dovetail.simulate import scale, simulate
from tests.planning.merge.oracle import made_network, made_profile

pytestmark = pytest.mark.reference

ALPHA = 45.25e-6
"""Seconds per message."""
BETA = 1.2 / (9 * 2**30 / 8)
"""Seconds to send one byte."""
GAMMA = 160 / 64e9
"""Seconds to add up one byte."""


@pytest.fixture(scope="module")
def blobs(reference_data: Path) -> list[tuple[int, float]]:
    """(elements, backward seconds) in forward order."""
    file = reference_data / "layers" / "googlenet_k80_8nodes.log"
    if not file.exists():
        pytest.skip(f"{file.name} is not among the reference data")
    rows = re.findall(r"\[(\d+), (\d+), ([\d.]+), [\d.]+, [\d.]+\]", file.read_text())
    assert len(rows) == 256
    first, second = rows[:128], rows[128:]
    assert first == second, "both passes over the blobs agree"
    assert [int(row[0]) for row in first] == list(range(128))
    return [(int(elements), float(us) * 1e-6) for _, elements, us in first]


@pytest.fixture(scope="module")
def googlenet(blobs: list[tuple[int, float]]) -> Profile:
    layers = [blobs[i : i + 2] for i in range(0, 128, 2)]
    assert all(weight[1] == bias[1] for weight, bias in layers)
    layers.reverse()  # to ready order
    return made_profile([4 * (w[0] + b[0]) for w, b in layers], [w[1] for w, _ in layers])


@pytest.fixture(scope="module")
def ring() -> Network:
    n = 8
    return made_network(2 * (n - 1) * ALPHA, (n - 1) / n * (2 * BETA + GAMMA), ranks=n)


def test_the_trace_is_read_as_published(googlenet: Profile) -> None:
    assert len(googlenet.tensors) == 64
    assert googlenet.backward_time() == pytest.approx(0.2053, abs=5e-5)
    assert googlenet.parameter_bytes == 4 * 13_379_136
    assert googlenet.forward_time() == pytest.approx(googlenet.backward_time() / 2)


@pytest.mark.parametrize(
    ("nodes", "gain"),
    [(8, 1.000), (16, 1.001), (32, 1.038), (64, 1.108), (128, 1.342), (256, 1.345), (1024, 1.123), (2048, 1.026)],
)
def test_the_optimum_is_so_much_faster_than_the_greedy_rule(
    googlenet: Profile, ring: Network, nodes: int, gain: float
) -> None:
    by_policy = {
        p.policy: p.prediction.iteration
        for p in compare(googlenet, ring, workers=nodes, policies=["mgwfbp-greedy", "optimal"])
    }
    assert by_policy["mgwfbp-greedy"] / by_policy["optimal"] == pytest.approx(gain, abs=6e-4)


@pytest.mark.parametrize(
    ("nodes", "speedups"),
    [
        (8, (7.0, 4.8, 7.8, 7.8)),
        (32, (19.1, 18.1, 27.1, 28.2)),
        (64, (28.0, 35.8, 48.3, 53.6)),
        (256, (43.3, 138.3, 138.3, 185.9)),
        (2048, (51.7, 860, 860, 882)),
    ],
)
def test_speed_ups_over_one_node(googlenet: Profile, ring: Network, nodes: int, speedups: tuple[float, ...]) -> None:
    policies = ["per-tensor", "single", "mgwfbp-greedy", "optimal"]
    points = scale(googlenet, ring, workers=[nodes], policies=policies)
    for point, published in zip(points, speedups, strict=True):
        assert point.speedup == pytest.approx(published, abs=0.51 if published >= 800 else 0.051)


@pytest.mark.parametrize("nodes", [2, 8, 64, 512, 2048])
def test_the_exact_algorithms_agree_and_the_timeline_ends_with_them(
    googlenet: Profile, ring: Network, nodes: int
) -> None:
    made = plan(googlenet, ring, workers=nodes, policy="optimal")
    stream, cost = streams.stream(googlenet), ring.cost(ranks=nodes)
    general = streams.objective(stream, exact.optimal(stream, cost), cost)
    assert made.prediction.iteration == pytest.approx(made.prediction.forward + general, rel=1e-12)
    assert made.prediction.lower_bound <= made.prediction.iteration
    assert simulate(made, googlenet, ring).duration == made.prediction.iteration


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_no_rule_beats_the_optimum_on_the_measured_tables(googlenet: Profile, reference_data: Path, nodes: int) -> None:
    """OSU all-reduce on 10GbE: clearly not affine, and not even monotone."""
    file = reference_data / "network" / f"allreduce{nodes}.log"
    if not file.exists():
        pytest.skip(f"{file.name} is not among the reference data")
    rows = re.findall(r"^(?:\d+,)?(\d+)\s+([\d.]+)", file.read_text(), re.MULTILINE)
    assert len(rows) == 266
    cost = TableCost(tuple(float(b) for b, _ in rows), tuple(float(us) * 1e-6 for _, us in rows))
    stream = streams.stream(googlenet)
    optimum = streams.finish(stream, exact.optimal(stream, cost), cost)
    assert exact.lower_bound(stream, cost) <= optimum
    others = [
        rules.per_tensor(stream),
        rules.fill(stream),
        rules.ddp(stream),
        rules.mgwfbp_greedy(stream, cost),
        rules.accumulate_while_busy(stream, cost),
        exact.fewest(stream, cost),
        robust.robust(stream, cost),
        *exact.best_per_count(stream, cost, 64).values(),
    ]
    assert min(streams.finish(stream, cuts, cost) for cuts in others) >= optimum * (1 - 1e-12)


def test_ready_times_accumulate_backwards_through_the_log(blobs: list[tuple[int, float]], googlenet: Profile) -> None:
    times = [seconds for _, seconds in blobs[::-2]]
    assert [t.ready for t in googlenet.tensors] == pytest.approx(list(accumulate(times)))

"""`plan --auto` on every published profile and several networks: never worse than the best single technique."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.measure.layer_table import read_layer_table
from dovetail.measure.presets import preset
from dovetail.planning import plan
from dovetail.planning.auto.options import OBJECTIVES, AnyPlan
from dovetail.planning.auto.search import throughput
from dovetail.planning.burst.cost import NetworkLinks, ProfileCost
from dovetail.planning.burst.overlap import fastest_overlapped
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.planning.depth import planner as depths
from dovetail.simulate.auto import choose, score
from tests.planning.merge.oracle import made_profile

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def profiles(reference_data: Path) -> dict[str, Profile]:
    table, log = (reference_data / "layers" / n for n in ("a100_layers.csv", "googlenet_k80_8nodes.log"))
    if not (table.exists() and log.exists()):
        pytest.skip("the published layer times are not among the reference data")
    rows = re.findall(r"\[(\d+), (\d+), ([\d.]+), [\d.]+, [\d.]+\]", log.read_text())[:128]
    blobs = [(int(elements), float(us) * 1e-6) for _, elements, us in rows]
    layers = [blobs[i : i + 2] for i in range(0, 128, 2)][::-1]
    googlenet = made_profile([4 * (w[0] + b[0]) for w, b in layers], [w[1] for w, _ in layers])
    return {"vgg": read_layer_table(table, "vgg"), "wrn": read_layer_table(table, "wrn"), "googlenet": googlenet}


def singles(job: Profile, net: Network, batch: int) -> list[AnyPlan]:
    """What each technique does on its own, on all devices, and burst on up to all."""
    devices, local = net.ranks, batch // net.ranks
    found: list[AnyPlan] = [plan(job, net, workers=devices, batch=local, policy=p) for p in ("ddp", "auto", "optimal")]
    found.append(plan(job, net, workers=devices, batch=local, policy="optimal", overlap="forward"))
    found += depths.compare(job, net, workers=devices, batch=local, policies=["full", "ladder", "balanced"])
    if len(job.layers[0].times) > 1:
        counts = tuple(2**i for i in range(devices.bit_length()))
        planner = BurstPlanner(job, ProfileCost(job, batch, NetworkLinks(net)), devices, counts=counts)
        found += [planner.fastest(), planner.cheapest(), fastest_overlapped(planner)]
    return found


CASES = [
    *(("vgg", network) for network in ("10gbe-8", "100gbe-8", "infiniband-32", "nvlink-8")),
    *(("wrn", network) for network in ("100gbe-8", "nvlink-4")),
    *(("googlenet", network) for network in ("10gbe-8", "10gbe-64", "infiniband-16")),
]


@pytest.mark.parametrize(("model", "network"), CASES)
def test_the_chosen_plan_is_never_worse_than_the_best_single_technique(
    profiles: dict[str, Profile], model: str, network: str
) -> None:
    job, net = profiles[model], preset(network)
    batch = (4 if model != "googlenet" else 8) * net.ranks
    rivals = singles(job, net, batch)
    scores = [score(p, profile=job, network=net, devices=net.ranks, task=5e-4) for p in rivals]
    for objective in OBJECTIVES:
        statistics = objective == "time"
        found = choose(job, net, batch=batch, objective=objective, statistics=statistics, task=5e-4)
        ours = found.value if objective != "throughput" else -found.value
        assert found.bound >= found.value if objective == "throughput" else found.bound <= found.value
        for single, s in zip(rivals, scores, strict=True):
            if s.iteration > found.within * (1 + 1e-9) or (isinstance(single, DepthPlan) and not statistics):
                continue
            theirs = {"time": s.iteration, "device-time": s.device_time}.get(objective, -throughput(found.question, s))
            assert ours <= theirs + 1e-9 * abs(theirs), (objective, single.policy)


def test_fewer_parts_are_never_better_in_the_ablation_of_the_shortest_time(profiles: dict[str, Profile]) -> None:
    found = choose(profiles["googlenet"], preset("10gbe-64"))
    times = [c.score.iteration for c in found.steps]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(times)) and found.gap == 0.0

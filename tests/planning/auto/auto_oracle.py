"""Made-up jobs and networks for `plan --auto`, and every plan there is for them by brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from dovetail.core.network import COLLECTIVES, Collective, Fit, Network
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.planning.auto.options import AnyPlan, Question, shared_out
from dovetail.planning.auto.search import Score, throughput
from dovetail.planning.burst.cost import NetworkLinks, ProfileCost
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.planning.depth import planner as depths
from dovetail.planning.merge.cycle import Bucketing
from dovetail.planning.merge.setting import MergeSetting, OverlapSetting
from tests.planning.merge.oracle import partitions


def network(latency: float, seconds_per_byte: float, *, ranks: int = 4) -> Network:
    """An all-reduce costs what its halves do."""
    fits = {c: (2 if c == "all_reduce" else 1) for c in COLLECTIVES}
    return Network(
        name="made",
        ranks=ranks,
        source="a test",
        measured=False,
        collectives={
            c: Collective(fit=Fit(latency=n * latency, seconds_per_byte=n * seconds_per_byte, error=0.0))
            for c, n in fits.items()
        },
    )


def profile(seed: int, layers: int, *, late: float = 0.0) -> Profile:
    """Layers with a fixed part, a part per sample and parameters, in random proportions; batches 1, 2, 4 and 8."""
    rng = random.Random(seed)
    made = []
    for i in range(layers):
        fixed, each = rng.choice([0.0, 1.0, 4.0]), rng.choice([0.25, 1.0, 2.0])
        times = tuple(
            LayerTime(batch=b, forward=exactly(fixed + each * b), backward=exactly(2 * (fixed + each * b)))
            for b in (1, 2, 4, 8)
        )
        nbytes = rng.choice([0, 10, 100, 1000]) if i else 10
        made.append(
            Layer(
                name=f"l{i}", type="Linear", parameter_bytes=nbytes, activation_bytes=rng.choice([1, 50]), times=times
            )
        )
    tensors, ready = [], 0.0
    for i in reversed(range(layers)):
        ready += made[i].backward(2)
        if made[i].parameter_bytes:
            tensors.append(
                ParameterTensor(
                    name=f"l{i}.w", layer=i, bytes=made[i].parameter_bytes, dtype="float32", ready=ready + late
                )
            )
    return Profile(name="made", device="none", batch=2, layers=tuple(made), tensors=tuple(tensors))


def cost(q: Question, s: Score) -> float:
    return {"time": s.iteration, "device-time": s.device_time, "throughput": -throughput(q, s)}[q.objective]


def everything(q: Question) -> Iterator[tuple[str, AnyPlan]]:
    """Every plan there is, by brute force: all partitions, all device counts, all policies of partial depth."""
    for g in (g for g in range(1, q.devices + 1) if q.batch % g == 0):
        plain = MergeSetting(q.profile, q.network, g, q.batch // g)
        both = OverlapSetting(q.profile, q.network, g, q.batch // g, optimizer=q.optimizer)
        for cuts in partitions(plain.stream):
            yield "merging", plain.of("given", plain.given(cuts))
            for ways in itertools.product(range(len(both.cycle.ways)), repeat=len(cuts) if g > 1 else 0):
                if ways:
                    yield "overlap", both.of("given", Bucketing(tuple(cuts), ways))
        if g > 1 and q.statistics:
            for name in ("ladder", "balanced", "guard"):
                yield "partial", depths.plan(q.profile, q.network, workers=g, policy=name, batch=q.batch // g)
    planner = BurstPlanner(
        shared_out(q.profile), ProfileCost(shared_out(q.profile), q.batch, NetworkLinks(q.network)), q.devices
    )
    for counts in itertools.product(range(1, q.devices + 1), repeat=len(q.profile.layers)):
        if len(set(counts)) > 1 or q.batch % counts[0]:
            yield "burst", planner.predict(counts)

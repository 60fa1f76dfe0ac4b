"""Is the burst planner exact, and how fast is it? The parts of benchmarks/burst_model.py about the planner itself."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Check
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.measure.presets import preset
from dovetail.planning.burst import rules
from dovetail.planning.burst.cost import LinkCosts, Links, NetworkLinks, ProfileCost
from dovetail.planning.burst.planner import BurstPlanner

ROOT = Path(__file__).resolve().parents[1]
Cells = list[dict[str, Any]]
LINKS: dict[str, LinkCosts] = {"nvlink": Links(), "100gbe": NetworkLinks(preset("100gbe-16"))}
"""Assumptions, both: NVLink's figures for any number of devices, and a ring of 100 Gbit Ethernet."""


def planner(
    profile: Profile, batch: int, devices: int, *, halving: bool = False, wires: LinkCosts = LINKS["nvlink"]
) -> BurstPlanner:
    """`halving`: only powers of two, as behind the reference figures."""
    counts = tuple(2**i for i in range(devices.bit_length()) if 2**i <= min(devices, batch)) if halving else ()
    return BurstPlanner(profile, ProfileCost(profile, batch, wires), devices, counts=counts)


def brute_force(chains: int, graphs: int) -> Check:
    """The planner against every plan there is, on made-up costs."""
    sys.path.insert(0, str(ROOT))
    from tests.planning.burst.burst_oracle import all_plans, front_of, made_planner, points, random_graph

    rng, wrong = random.Random(1), 0
    for i in range(chains + graphs):
        layers = rng.randint(2, 5)
        counts = rng.choice([(1, 2, 3), (1, 2, 4)])
        edges = random_graph(rng, layers) if i >= chains else None
        made = made_planner(rng, layers, batch=12, devices=6, counts=counts, edges=edges)
        wrong += points(made) != front_of(*all_plans(made, counts)[:2])
    name = f"planner = brute force on {chains:,} random chains and {graphs} random series-parallel graphs"
    return Check(name, f"{wrong} differ", "none", wrong == 0)


def speed(profiles: dict[str, Profile], rounds: int) -> tuple[Cells, list[Check]]:
    """Planning times, the median of some rounds; building the tables is included."""
    like = inception()
    widest = rules.by_name(planner(like, 1024, 1024), "dp:1024").prediction.iteration
    questions: dict[str, Callable[[BurstPlanner], Any]] = {
        "fastest": lambda b: b.fastest(),
        "1.25x in all": lambda b: b.fastest(amplification=1.25),
        "2x in all": lambda b: b.fastest(amplification=2.0),
        "cheapest at dp's speed": lambda b: b.cheapest(iteration=widest),
    }
    cells: Cells = []
    for q, ask in questions.items():
        cells.append(
            {"graph": "inception-like", "devices": 1024, "question": q, **_median(ask, like, 1024, 1024, rounds)}
        )
    vgg = {**questions, "whole front": lambda b: b.front()}
    del vgg["cheapest at dp's speed"]
    for q, ask in vgg.items():
        taken = _median(ask, profiles["vgg"], 32, 8, 3 * rounds)
        cells.append({"graph": "VGG16", "devices": 8, "question": q, **taken})
    large = max((c for c in cells if c["devices"] == 1024), key=lambda c: c["seconds"])
    small = max((c for c in cells[len(questions) : -1]), key=lambda c: c["seconds"])
    front = cells[-1]
    return cells, [
        Check(
            "an Inception-size graph (125 layers) for G = 1024, global batch 1024, exact plan, slowest of 4 questions",
            f"{large['seconds']:.2f} s of a core, {large['clock']:.2f} s by the clock",
            "< 1 s",
            large["seconds"] < 1,
        ),
        Check(
            "VGG16 for G = 8, exact plan, slowest of 3 questions",
            f"{small['seconds'] * 1e3:.1f} ms of a core, {small['clock'] * 1e3:.1f} ms by the clock; "
            f"its whole front {front['seconds'] * 1e3:.1f} ms",
            "< 20 ms",
            small["seconds"] < 0.020,
        ),
    ]


def _median(
    ask: Callable[[BurstPlanner], Any], profile: Profile, batch: int, devices: int, rounds: int
) -> dict[str, float]:
    """Seconds of one core, and by the clock; what others take of the core is not the planner's."""
    cores, clocks = [], []
    for _ in range(rounds):
        burst = planner(profile, batch, devices)
        core, clock = time.process_time(), time.perf_counter()
        ask(burst)
        cores.append(time.process_time() - core)
        clocks.append(time.perf_counter() - clock)
    return {"seconds": statistics.median(cores), "clock": statistics.median(clocks)}


def inception(seed: int = 0) -> Profile:
    """125 layers like Inception's in number, branches and nesting; their times are made up."""
    rng = random.Random(seed)
    edges: list[tuple[int, int]] = []
    count = 0

    def chain(start: int | None, length: int) -> int:
        nonlocal count
        for _ in range(length):
            if start is not None:
                edges.append((start, count))
            start, count = count, count + 1
        assert start is not None
        return start

    last = chain(None, 7)
    for block in range(11):
        ends = [chain(last, length) for length in ((1, 2, 3, 2) if block < 9 else (1, 1, 3, 2))]
        if block >= 9:  # the widest blocks fork again inside a branch
            fork = chain(last, 1)
            ends += [chain(fork, 1), chain(fork, 2)]
        join, count = count, count + 1
        edges += [(end, join) for end in ends]
        last = join
    chain(last, 125 - count)
    layers = []
    for i in range(125):
        fixed, per_sample = rng.uniform(40e-6, 200e-6), rng.uniform(5e-6, 120e-6)
        times = tuple(
            LayerTime(
                batch=b, forward=exactly((fixed + per_sample * b) / 3), backward=exactly((fixed + per_sample * b) / 1.5)
            )
            for b in (1, 16, 1024)
        )
        layers.append(
            Layer(
                name=f"layer{i}",
                type="Conv2d",
                parameter_bytes=rng.choice([0, 1 << 18, 1 << 20, 1 << 22]),
                activation_bytes=rng.choice([1 << 17, 1 << 19, 1 << 21]),
                times=times,
            )
        )
    tensor = ParameterTensor(name="all", layer=0, bytes=4, dtype="float32", ready=0.0)
    return Profile(
        name="inception-like", device="none", batch=16, layers=tuple(layers), tensors=(tensor,), edges=tuple(edges)
    )

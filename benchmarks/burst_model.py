"""Burst parallelism on paper: what the plans are worth on published A100 layer times. Everything here is predicted.

`model_study` is the first part of benchmarks/burst.py; `python benchmarks/burst_model.py [--quick] [--json FILE]` runs
it alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from common import Check, arguments, console, finish
from dovetail.core.burst import BurstPlan
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, Quantiles
from dovetail.measure.layer_table import read_layer_table
from dovetail.planning import burst_rules
from dovetail.planning.burst import BurstPlanner
from dovetail.planning.burst_background import background
from dovetail.planning.burst_cost import ProfileCost
from dovetail.planning.burst_overlap import fastest_overlapped, lower_bound, overlapped

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "layers" / "a100_layers.csv"
TASK = 0.5e-3
"""Seconds of a background task."""
AMPLIFICATION = 2.0
"""DeepPool's own default limit, per layer."""
REFERENCE: list[tuple[str, int, int, str, float]] = [
    # model, global batch, devices, plan, milliseconds: made once by other code from the same published times.
    ("vgg", 32, 8, "dp:2", 32.06),
    ("vgg", 32, 8, "dp:4", 20.73),
    ("vgg", 32, 8, "dp:8", 14.74),
    ("vgg", 32, 8, "fastest", 11.19),
    ("vgg", 32, 8, "fastest:1.25", 12.61),
    ("vgg", 32, 32, "fastest", 6.51),
    ("vgg", 32, 32, "dp:32", 10.41),
    ("wrn", 16, 8, "dp:2", 39.90),
    ("wrn", 16, 8, "dp:4", 30.55),
    ("wrn", 16, 8, "dp:8", 26.90),
    ("wrn", 16, 8, "fastest:1.25", 38.03),
    ("wrn", 16, 8, "fastest:1.5", 33.79),
    ("wrn", 16, 8, "fastest:2.0", 29.87),
    ("wrn", 32, 8, "dp:2", 61.54),
    ("wrn", 32, 8, "dp:4", 40.98),
    ("wrn", 32, 8, "dp:8", 31.09),
    ("wrn", 32, 8, "fastest:1.25", 47.34),
    ("wrn", 32, 8, "fastest:1.5", 38.07),
    ("wrn", 32, 8, "fastest:2.0", 33.55),
]


def planner(profile: Profile, batch: int, devices: int, *, halving: bool = False, smooth: bool = False) -> BurstPlanner:
    """`halving`: only powers of two, as behind the reference figures."""
    counts = tuple(2**i for i in range(devices.bit_length()) if 2**i <= min(devices, batch)) if halving else ()
    return BurstPlanner(profile, ProfileCost(profile, batch, smooth=smooth), devices, counts=counts)


def named(burst: BurstPlanner, name: str) -> BurstPlan:
    kind, _, limit = name.partition(":")
    return burst.fastest(amplification=float(limit)) if kind == "fastest" and limit else burst.policy(name)


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
                batch=b, forward=_once((fixed + per_sample * b) / 3), backward=_once((fixed + per_sample * b) / 1.5)
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


def _once(seconds: float) -> Quantiles:
    return Quantiles(median=seconds, low=seconds, high=seconds, samples=1)

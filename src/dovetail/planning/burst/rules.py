"""Burst plans by other rules, to compare with: data parallelism, a static partition, and the rule of DeepPool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error
from dovetail.planning.registry import Registry

from .cost import local_batch
from .planner import BurstPlanner

Rule = Callable[[BurstPlanner, float | None], BurstPlan]
"""From a planner and a limit on amplification (None: the rule's own default, or no limit) to a plan."""

DEFAULT_AMPLIFICATION = 2.0
"""DeepPool's own default."""
SMALL_LAYER = 300e-6
"""Seconds on one device up to which DeepPool lets a layer have any amplification."""


def data_parallel(burst: BurstPlanner) -> list[BurstPlan]:
    """Every layer on the same number of devices, for every number that can be useful."""
    return [_same(g, burst, None) for g in burst.choices]


def static_partition(
    burst: BurstPlanner, *, amplification: float | None = None, iteration: float | None = None
) -> BurstPlan:
    """Data-parallel on g devices, background work on the others for good: the fastest g within a limit.

    With `iteration` (seconds) it is the smallest g that is as fast as that.
    """
    plans = data_parallel(burst)
    if iteration is not None:
        enough = [p for p in plans if p.prediction.iteration <= iteration]
        if not enough:
            raise Error(f"static-partition: no number of devices up to {burst.devices} reaches {iteration:g} s")
        found = min(enough, key=lambda p: p.counts[0])
    else:
        within = [p for p in plans if amplification is None or p.prediction.amplification <= amplification]
        found = min(within or plans[:1], key=lambda p: (p.prediction.iteration, p.counts[0]))
    return burst.predict(found.counts, policy=f"static-partition:{found.counts[0]}")


def per_layer(burst: BurstPlanner, *, amplification: float = DEFAULT_AMPLIFICATION) -> BurstPlan:
    """The fastest plan on a chain in which every LAYER stays within the limit: DeepPool's aim, solved exactly.

    A layer's amplification is g·(computing + sync + re-sharding into it) over its computing on one device. One number
    per choice is enough, since the limit is on an edge and not on a sum: O(L·K²).
    """
    _check_chain(burst, "per-layer")
    counts, cost = list(burst.choices), burst.cost
    samples = local_batch(cost.batch, counts)
    total, back = np.zeros(len(counts)), list[list[int]]()
    for v in range(len(burst.profile.layers)):
        own = cost.compute(v, samples) + cost.sync(v, counts)
        moving = cost.reshard(v - 1, np.array(counts)[:, None], counts) if v else np.zeros((1, len(counts)))
        taken = np.array(counts) * (own + moving)
        may = taken <= amplification * float(cost.compute(v, cost.batch)) * (1 + 1e-12)
        time = np.where(may, (total[:, None] if v else 0.0) + own + moving, np.inf)
        back.append(time.argmin(axis=0).tolist())
        total = time.min(axis=0)
    if not np.isfinite(total.min()):
        raise Error(f"per-layer: no plan in which every layer stays within {amplification:g}")
    chosen = [int(total.argmin())]
    for came in reversed(back[1:]):
        chosen.append(came[chosen[-1]])
    return burst.predict([counts[k] for k in reversed(chosen)], policy=f"per-layer:{amplification:g}")


@dataclass(frozen=True)
class Violation:
    """A layer that takes more than the rule allows."""

    layer: str
    amplification: float


def deeppool(burst: BurstPlanner, *, amplification: float = DEFAULT_AMPLIFICATION) -> tuple[BurstPlan, list[Violation]]:
    """DeepPool's rule on a chain, a limit on every layer, and the layers of its plan that break the limit.

    Going forward, each count of a layer keeps one predecessor: the one with the least time so far. Only then is the
    limit tested, on that one: the layer's g·(computing + sync + re-sharding into it) over its computing on one device.
    A count above the limit is dropped, although it may have been within it behind a slower predecessor; that is what
    `per_layer` finds and this does not. Where no count of a layer is left, the one least above the limit stays: the
    plan breaks its own limit there. Layers of up to 300 us on one device may take anything. Counts are powers of two.
    """
    _check_chain(burst, "deeppool")
    cost, counts = burst.cost, _halvings(burst)
    samples = local_batch(cost.batch, counts)
    g, at = np.array(counts), range(len(counts))
    total, back = np.zeros(len(counts)), list[list[int]]()
    taken: list[list[float]] = []  # by layer and count, behind the predecessor that was kept
    for v in range(len(burst.profile.layers)):
        own = cost.compute(v, samples) + cost.sync(v, counts)
        moving = cost.reshard(v - 1, g[:, None], g) if v else np.zeros((len(counts), len(counts)))
        arrival = total[:, None] + moving if v else np.zeros_like(moving)
        came = arrival.argmin(axis=0).tolist()
        moved = np.array([moving[came[k], k] for k in at])
        alone = float(cost.compute(v, cost.batch))
        share = np.ones(len(counts)) if alone <= SMALL_LAYER else g * (own + moved) / alone
        new = np.array([arrival[came[k], k] for k in at]) + own
        allowed = np.isfinite(new) & (share <= amplification * (1 + 1e-12))
        if not allowed.any():
            allowed = np.arange(len(counts)) == np.where(np.isfinite(new), share, np.inf).argmin()
        total = np.where(allowed, new, np.inf)
        back.append(came)
        taken.append(share.tolist())
    chosen = [int(total.argmin())]
    for came in reversed(back[1:]):
        chosen.append(came[chosen[-1]])
    chosen.reverse()
    broken = [
        Violation(layer.name, taken[v][chosen[v]])
        for v, layer in enumerate(burst.profile.layers)
        if taken[v][chosen[v]] > amplification * (1 + 1e-12)
    ]
    return burst.predict([counts[k] for k in chosen], policy=f"deeppool:{amplification:g}"), broken


def deeppool_published(
    burst: BurstPlanner, *, amplification: float = DEFAULT_AMPLIFICATION
) -> tuple[BurstPlan, list[Violation]]:
    """The search in the code that was published with DeepPool, and the layers of its plan that break its own limit.

    Going forward, each count of a layer keeps one predecessor: the one with the least time so far among those whose
    OWN amplification stays below the limit, or is the least seen until then. That of a predecessor with h devices is
    h·(its computing + sync + re-sharding to here) over (its computing on one device + its sync), and 1 where it
    computes for up to 300 us. So a layer is tested one step late, on what it hands on, the last one never; where
    the only predecessor that survives is above the limit it is taken all the same. Counts are powers of two.
    """
    _check_chain(burst, "deeppool-published")
    cost, counts = burst.cost, _halvings(burst)
    samples = local_batch(cost.batch, counts)
    layers = range(len(burst.profile.layers))
    compute = [cost.compute(v, samples).tolist() for v in layers]
    sync = [cost.sync(v, counts).tolist() for v in layers]

    def taken(layer: int, at: int, moving: float) -> float:
        """The amplification of a layer that hands its output on in `moving` seconds."""
        alone = compute[layer][0]
        if alone <= SMALL_LAYER:
            return 1.0
        return float(counts[at] * (compute[layer][at] + sync[layer][at] + moving) / (alone + sync[layer][at]))

    total = [compute[0][k] + sync[0][k] for k in range(len(counts))]
    back: list[list[int]] = []
    for v in layers[1:]:
        came, new = [], []
        for k, g in enumerate(counts):
            least, least_taken, best = float("inf"), float("inf"), 0
            for p, h in enumerate(counts):
                moving = float(cost.reshard(v - 1, h, g))
                here = taken(v - 1, p, moving)
                time = total[p] + moving + compute[v][k] + sync[v][k]
                if time < least and (here < amplification or here < least_taken):
                    least, least_taken, best = time, here, p
            came.append(best)
            new.append(least)
        back.append(came)
        total = new
    at = min(range(len(counts)), key=lambda k: total[k])
    chosen = [at]
    for came in reversed(back):
        chosen.append(came[chosen[-1]])
    chosen.reverse()
    found = [counts[k] for k in chosen]
    broken = []
    for v in layers:
        moving = float(cost.reshard(v, found[v], found[v + 1])) if v + 1 < len(found) else 0.0
        if (here := taken(v, chosen[v], moving)) > amplification:
            broken.append(Violation(burst.profile.layers[v].name, here))
    return burst.predict(found, policy=f"deeppool-published:{amplification:g}"), broken


def _halvings(burst: BurstPlanner) -> list[int]:
    """The powers of two among the useful counts."""
    most = min(burst.devices, burst.cost.batch)
    return [2**i for i in range(most.bit_length())]


def _check_chain(burst: BurstPlanner, name: str) -> None:
    if len(burst.edges) != len(burst.profile.layers) - 1 or any(v != u + 1 for u, v in burst.edges):
        raise Error(f"{name}: expected a chain of layers, its rule follows one predecessor only")


def by_name(burst: BurstPlanner, name: str, *, amplification: float | None = None) -> BurstPlan:
    """The plan that the policy `name` makes; `amplification` limits it where the policy has a limit."""
    return POLICIES.parse(name).value(burst, amplification)


def _best_dp(burst: BurstPlanner, _: float | None) -> BurstPlan:
    return min(data_parallel(burst), key=lambda p: (p.prediction.iteration, p.prediction.device_time))


def _same(count: int, burst: BurstPlanner, _: float | None) -> BurstPlan:
    if not 1 <= count <= burst.devices:
        raise Error(f"no burst policy 'dp:{count}': expected dp:G with G from 1 to {burst.devices}")
    return burst.predict([count] * len(burst.profile.layers), policy=f"dp:{count}")


def _dp(argument: str) -> Rule:
    if not argument.isdecimal():
        raise ValueError(f"dp:G with G devices, as in dp:8, got {argument!r}")
    return partial(_same, int(argument))


POLICIES: Registry[Rule] = Registry("burst policy")
POLICIES.add("fastest", "the least time within the limit", lambda burst, limit: burst.fastest(amplification=limit))
POLICIES.add("cheapest", "the least device-time", lambda burst, _: burst.cheapest())
POLICIES.add("best-dp", "data-parallel on the number of devices that is fastest", _best_dp)
POLICIES.add(
    "static-partition",
    "data-parallel on some devices, background work on the others for good",
    lambda burst, limit: static_partition(burst, amplification=limit),
)
POLICIES.add(
    "per-layer",
    "the fastest plan in which every layer stays within the limit",
    lambda burst, limit: per_layer(burst, amplification=limit or DEFAULT_AMPLIFICATION),
)
POLICIES.add(
    "deeppool",
    "DeepPool's rule as its paper states it",
    lambda burst, limit: deeppool(burst, amplification=limit or DEFAULT_AMPLIFICATION)[0],
)
POLICIES.add(
    "deeppool-published",
    "DeepPool's rule as its published code has it",
    lambda burst, limit: deeppool_published(burst, amplification=limit or DEFAULT_AMPLIFICATION)[0],
)
POLICIES.family("dp", "G", "data-parallel on G devices", _dp)

"""Burst plans whose gradients travel while backward goes on: the merge planner's cost inside a burst plan.

The front charges every all-reduce in full. Here backward goes on meanwhile: the gradients of a run of layers with one
device count are cut into buckets by the merge planner, which go over one channel, first in first out, and the iteration
ends when backward and the last bucket have ended. Buckets do not cross from one group of devices to another. An
all-reduce then holds the network and not the devices, so device-time counts computing and re-sharding, and what sticks
out at the end on the devices of the last bucket.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error
from dovetail.core.network import FloatArray
from dovetail.core.profile import Profile
from dovetail.planning.merge import exact
from dovetail.planning.merge.cycle import slowed
from dovetail.planning.merge.stream import Stream, finish

from .cost import BurstCost, ProfileCost, local_batch
from .planner import BurstPlanner
from .rules import data_parallel

SHARES = (0.0, 0.25, 0.5, 1.0)
"""Shares of the all-reduces that are paid for, for which the candidates are made."""


@dataclass(frozen=True)
class _PartlyHidden:
    """A cost model in which only a share of every all-reduce is paid for."""

    cost: BurstCost
    share: float

    @property
    def batch(self) -> int:
        return self.cost.batch

    def compute(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.cost.compute(layer, samples)

    def forward(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.cost.forward(layer, samples)

    def sync(self, layer: int, devices: npt.ArrayLike, /) -> FloatArray:
        return self.share * self.cost.sync(layer, devices)

    def reshard(self, layer: int, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        return self.cost.reshard(layer, before, after)

    def memory(self, layer: int, samples: npt.ArrayLike, /) -> FloatArray:
        return self.cost.memory(layer, samples)


def partly_hidden(planner: BurstPlanner, share: float) -> BurstPlanner:
    """A planner of the same job that counts only `share` of the time of every all-reduce."""
    return replace(planner, cost=_PartlyHidden(planner.cost, share))


def overlapped(planner: BurstPlanner, plan: BurstPlan) -> BurstPlan:
    """The plan with the same counts, predicted with all-reduces that overlap with backward."""
    cost, counts = planner.cost, plan.counts
    assert isinstance(cost, ProfileCost), "buckets need the sizes of the gradients"
    samples = local_batch(cost.batch, counts).tolist()
    into = [0.0] * len(counts)
    for u, v in planner.edges:
        into[v] += float(cost.reshard(u, counts[u], counts[v]))
    now = sum(float(cost.forward(v, samples[v])) + into[v] / 2 for v in range(len(counts)))
    work = sum(g * (float(cost.compute(v, samples[v])) + into[v]) for v, g in enumerate(counts))
    backward = sum(float(cost.compute(v, n)) - float(cost.forward(v, n)) for v, n in enumerate(samples))
    communicating = sum(float(cost.sync(v, g)) for v, g in enumerate(counts))
    slower = slowed(cost.wires.slowing, communicating, backward)
    free, last = 0.0, 1
    ready: list[float] = []
    sizes: list[int] = []
    layers = list(reversed(range(len(counts))))
    for at, v in enumerate(layers):
        now += slower * (float(cost.compute(v, samples[v])) - float(cost.forward(v, samples[v])))
        for nbytes in _gradients(planner.profile, v):
            ready.append(max(now, free))
            sizes.append(nbytes)
        now += into[v] / 2
        if at + 1 == len(layers) or counts[layers[at + 1]] != counts[v]:
            if sizes and counts[v] > 1:
                stream, reduction = Stream(tuple(ready), tuple(sizes)), cost.wires.reduction(counts[v])
                cuts = exact.optimum(stream, reduction)
                free, last = finish(stream, cuts, reduction), counts[v]
            ready, sizes = [], []
    sticks_out = max(0.0, free - now)
    prediction = msgspec.structs.replace(
        plan.prediction, iteration=now + sticks_out, device_time=work + last * sticks_out
    )
    return msgspec.structs.replace(plan, prediction=prediction)


def lower_bound(planner: BurstPlanner) -> float:
    """Seconds that no plan beats, however well its gradients are hidden: the fastest where they cost nothing."""
    return partly_hidden(planner, 0.0).fastest().prediction.iteration


def fastest_overlapped(planner: BurstPlanner, *, amplification: float | None = None) -> BurstPlan:
    """The fastest of the overlapped `candidates` within a limit.

    What is hidden depends on all layers at once, so this is a choice among good plans and not the exact optimum;
    `lower_bound` says how far it can be from that.
    """
    found = candidates(planner, amplification=amplification)
    return min(found, key=lambda p: (p.prediction.iteration, p.prediction.device_time))


def candidates(planner: BurstPlanner, *, amplification: float | None = None) -> list[BurstPlan]:
    """Overlapped plans within a limit: data parallelism, and what is best where 0 to 100 % of the gradients is hidden.

    For callers that predict better than `overlapped` does, such as with the buckets that a job will really use.
    """
    plans = data_parallel(planner)
    for share in SHARES:
        partly = partly_hidden(planner, share)
        limits = [amplification] if amplification is not None else []
        plans.append(partly.fastest())
        for limit in [*limits, 1.0]:
            with contextlib.suppress(Error):  # memory may not allow so little device-time
                plans.append(partly.fastest(amplification=limit))
    fit = {p.counts: p for p in plans if planner.memory is None or p.prediction.memory <= planner.memory}
    found = [msgspec.structs.replace(overlapped(planner, p), policy="overlapped") for p in fit.values()]
    within = [p for p in found if amplification is None or p.prediction.amplification <= amplification * (1 + 1e-9)]
    if not within:
        raise Error(f"no overlapped plan for {planner.profile.name!r} within {amplification:g} and the memory given")
    return within


def _gradients(profile: Profile, layer: int) -> list[int]:
    """Bytes of a layer's gradients, in ready order; at least what the layer says it has."""
    found = [t.bytes for t in profile.tensors if t.layer == layer]
    return found or ([n] if (n := profile.layers[layer].parameter_bytes) else [])


def hidden_share(planner: BurstPlanner, plan: BurstPlan) -> float:
    """Share of a plan's all-reduces that backward hides; 1: all of it."""
    whole = float(np.sum([planner.cost.sync(v, g) for v, g in enumerate(plan.counts)]))
    paid = planner.predict(plan.counts).prediction.iteration
    return (paid - overlapped(planner, plan).prediction.iteration) / whole if whole else 1.0

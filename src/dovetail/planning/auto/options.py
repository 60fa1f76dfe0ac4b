"""The combinations that `plan --auto` chooses from: techniques on numbers of devices, as the runtime executes them.

| technique            | what runs it                                   | devices                                     |
|----------------------|------------------------------------------------|---------------------------------------------|
| ddp                  | torch's DistributedDataParallel as it is       | every number that shares the batch evenly   |
| merging              | its reducer, with the exact best buckets       | the same                                    |
| overlap              | `dovetail.optimizer`: each bucket whole, split | the same                                    |
| ladder, balanced,    | `PartialBackprop`; they change the statistics  | the same, only if that is allowed           |
| guard                | of the gradients                               |                                             |
| burst                | `Burst`: a number of devices for each layer    | up to all                                   |

The global batch is the same for all, so an iteration of one does the work of an iteration of any other. Each
combination has cheap lower bounds, so that most need never be planned: see `search.Search`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.files import MOST_SECONDS
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import LayerTime, Profile
from dovetail.planning.burst import bound, overlap, rules
from dovetail.planning.burst.bound import least_seconds
from dovetail.planning.burst.cost import NetworkLinks, ProfileCost, local_batch
from dovetail.planning.burst.planner import BurstPlanner, useful_counts
from dovetail.planning.depth import planner
from dovetail.planning.depth.cost import WorkerDevice
from dovetail.planning.merge import cycle_exact
from dovetail.planning.merge.cycle import Bucketing
from dovetail.planning.merge.setting import MergeSetting, OverlapSetting
from dovetail.planning.merge.stream import allowed

Objective = Literal["time", "device-time", "throughput"]
OBJECTIVES: tuple[Objective, ...] = ("time", "device-time", "throughput")
AnyPlan: TypeAlias = Plan | DepthPlan | BurstPlan

PARTIAL = ("ladder", "balanced", "guard")
TECHNIQUES = ("ddp", "merging", "overlap", *PARTIAL, "burst")
"""The simplest first: of equals that one is chosen."""
MOST_CELLS = 1500
"""Layers times device counts up to which burst plans are made of every useful count; beyond it of powers of two."""
FEW_CELLS = 400
"""The same, up to which every plan that `dovetail plan --burst` shows is a candidate: those take a while to make."""
LIMITS = (1.05, 1.25, 1.5, 2.0)
"""Device-times, in multiples of one device's, for which burst plans are made where not only the time counts."""
SHOWN = (1.1, 1.25, 1.5, 2.0, 3.0)
"""Device-times, in the same unit, for which `dovetail plan --burst` shows plans."""


@dataclass(frozen=True)
class Question:
    """One job on one cluster, and what is wanted of it."""

    profile: Profile
    network: Network
    devices: int
    """The most that the job may use."""
    batch: int
    """Global batch: samples of an iteration."""
    objective: Objective = "time"
    within: float | None = None
    """Seconds that an iteration may take."""
    task: float = 0.0
    """Seconds of a background task; gaps are worth the whole tasks that fit."""
    statistics: bool = False
    """Whether gradients may be other than those of the whole batch."""
    memory: int | None = None
    """Bytes of a device."""
    optimizer: float = 0.0
    """Seconds of the optimiser on one rank's share, where that stands between the phases (overlap)."""

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Numbers of devices that share the global batch evenly, ascending."""
        small = [g for g in range(1, math.isqrt(self.batch) + 1) if self.batch % g == 0]
        return tuple(sorted(g for g in {*small, *(self.batch // g for g in small)} if g <= self.devices))

    @cached_property
    def one_device(self) -> float:
        """Seconds of computing the global batch on one device."""
        return self.profile.forward_time(self.batch) + self.profile.backward_time(self.batch)

    def needed(self, devices: int) -> int:
        """Bytes on each of so many devices: parameters, gradients, the optimiser's state and outputs."""
        cost = ProfileCost(self.profile, self.batch)
        samples = -(-self.batch // devices)
        return int(sum(float(cost.memory(v, samples)) for v in range(len(self.profile.layers))))


Make = Callable[[float], Iterable[AnyPlan]]
"""The plans of a combination. Those that take longer than so many seconds may be left out."""


@dataclass(frozen=True)
class Combination:
    """One technique on so many devices; with burst, on up to so many."""

    technique: str
    devices: int
    bound: float
    """Seconds that no plan of it can go below."""
    held: int
    """Devices that it holds throughout the iteration."""
    work: Callable[[float], float]
    """Device-seconds that it holds at least in an iteration of at most so many seconds."""
    exact: bool
    """Whether `make` gives the best plan there is, and not only good ones."""
    make: Make


@dataclass(frozen=True)
class Excluded:
    """A technique, or some of its numbers of devices, that cannot be considered at all."""

    technique: str
    reason: str


def combinations(q: Question) -> tuple[list[Combination], list[Excluded]]:
    """Everything to choose from, and what had to be left out."""
    found: list[Combination] = []
    out: list[Excluded] = []
    shares = _that_fit(q, out)
    reasons = _refused(q)
    for g in shares:
        found += _parallel(q, g, reasons)
    if "partial" not in reasons and q.memory is not None and q.memory < 1:
        reasons["partial"] = "devices without memory hold no worker of any depth"
    if "partial" not in reasons:
        # A shallow worker needs less memory than a full one, so depth planning looks at memory itself.
        found += [_partial(q, g, name) for name in PARTIAL for g in q.shares if g > 1]
    if "burst" not in reasons:
        try:
            found += _burst(q)
        except Error as e:
            reasons["burst"] = str(e)
    return found, [*out, *(Excluded(technique, reason) for technique, reason in reasons.items())]


def reference(q: Question) -> Combination:
    """Torch's DDP on as many devices as share the batch, whether it fits into memory or not."""
    return _parallel(q, q.shares[-1], ("merging", "overlap"))[0]


def _that_fit(q: Question, out: list[Excluded]) -> list[int]:
    """Numbers of devices on which a local batch fits into memory."""
    if q.shares[-1] < q.devices:
        out.append(
            Excluded(
                "data parallelism on all devices",
                f"{q.devices:,} devices do not share a global batch of {q.batch:,} evenly; {q.shares[-1]:,} "
                f"{'does' if q.shares[-1] == 1 else 'do'}",
            )
        )
    if q.memory is None:
        return list(q.shares)
    fits = [g for g in q.shares if q.needed(g) <= q.memory]
    if not fits:
        # Partial depth keeps less, and burst also divides batches that are not shared evenly.
        g = q.shares[-1]
        needs = "one needs" if g == 1 else f"{g:,} need"
        out.append(
            Excluded(
                "data parallelism",
                f"{needs} {q.needed(g) / 2**30:.2f} GiB each, and there are {q.memory / 2**30:.2f}",
            )
        )
    elif len(fits) < len(q.shares):
        g = max(g for g in q.shares if g not in fits)
        out.append(
            Excluded(
                "data parallelism on fewer devices",
                f"{g:,} need {q.needed(g) / 2**30:.2f} GiB each, and there are {q.memory / 2**30:.2f}",
            )
        )
    return fits


def _refused(q: Question) -> dict[str, str]:
    """Techniques that this job or this network rules out, with the reason and the way out."""
    reasons: dict[str, str] = {}
    dtypes = sorted({t.dtype for t in q.profile.tensors})
    if len(dtypes) > 1:
        reasons["merging"] = f"torch's list of buckets cannot carry a plan for several dtypes ({', '.join(dtypes)})"
        reasons["overlap"] = f"it needs one dtype, and the model has {', '.join(dtypes)}"
    missing = [c for c in ("reduce_scatter", "all_gather") if c not in q.network.collectives]
    if missing:
        reasons["overlap"] = f"network {q.network.name!r} has no {missing[0]}: measure it with `dovetail network`"
    if not q.statistics:
        reasons["partial"] = "it changes the statistics of the gradients; --allow-statistics allows that"
    measured = sorted({t.batch for layer in q.profile.layers for t in layer.times})
    if q.devices < 2 or q.batch < 2:
        reasons["burst"] = "one device or one sample cannot be divided"
    elif len(measured) == 1:
        wanted = [b for b in _halvings(q.batch) if b * q.devices >= q.batch][-8:]
        reasons["burst"] = (
            f"only one local batch ({measured[0]}) was measured, which does not tell how layer times follow it: "
            f"`dovetail profile MODEL --batches {','.join(map(str, sorted(wanted)))}`"
        )
    return reasons


def _halvings(number: int) -> list[int]:
    found = []
    while number >= 1:
        found.append(number)
        number //= 2
    return found


def _parallel(q: Question, g: int, out: Container[str]) -> list[Combination]:
    """Data parallelism on so many devices: with torch's buckets, with the best, and overlapping with forward too."""
    setting = MergeSetting(q.profile, q.network, g, q.batch // g)
    bound = q.profile.forward_time(setting.batch) + setting.bound

    def merged(limit: float) -> list[AnyPlan]:
        return [setting.of("optimal", fewer(setting, setting.choose("optimal")))]

    made: list[tuple[str, float, Make]] = [("ddp", bound, lambda limit: [setting.plan("ddp")])]
    if g > 1 and "merging" not in out:
        made.append(("merging", bound, merged))
    if g > 1 and "overlap" not in out:
        both = OverlapSetting(q.profile, q.network, g, q.batch // g, optimizer=q.optimizer)

        def overlapped(limit: float) -> list[AnyPlan]:
            best = cycle_exact.within(both.cycle, limit)
            return [] if best is None else [both.of("optimal", fewer(both, best))]

        made.append(("overlap", both.bound, overlapped))
    return [
        Combination(name, g, bound=t, held=g, work=partial(_whole, g * t), exact=True, make=make)
        for name, t, make in made
    ]


def _whole(work: float, within: float) -> float:
    return work


def fewer(setting: MergeSetting, bucketing: Bucketing) -> Bucketing:
    """The same end with fewer buckets: without each cut, one after the other, that is not needed for it.

    A bucket costs a little that no measurement of single collectives sees. Two that become one have the way of either.
    """
    end = setting.end(bucketing) * (1 + 1e-12)
    at = 0
    while at < len(bucketing) - 1:
        cuts, ways = bucketing.cuts[:at] + bucketing.cuts[at + 1 :], bucketing.ways
        tries = [Bucketing(cuts, ways[:i] + ways[i + 1 :]) for i in (at, at + 1)]
        shorter = allowed(setting.stream, list(cuts))
        found = next((d for d in tries if shorter and setting.end(d) <= end), None)
        if found is None:
            at += 1
        else:
            bucketing = found
    return bucketing


def _partial(q: Question, g: int, name: str) -> Combination:
    """A depth policy on so many workers.

    At equal batches somebody goes back through everything; with any batches somebody has an even share of the samples
    and takes part in the last segment. Every segment has a bucket of its own, and gradients of a single contributor put
    half the bytes of an all-reduce on the wire, those of more contributors more.
    """
    batch, profile = q.batch // g, q.profile
    segments = min(g, len({t.layer for t in profile.tensors}))
    nbytes = sum(t.bytes if name == "guard" else t.bytes // 2 for t in profile.tensors)
    sending = least_seconds(q.network.cost("all_reduce", ranks=g), nbytes, buckets=segments)
    if name == "balanced":
        points = {t.batch for layer in profile.layers for t in layer.times if t.batch > batch}
        bound = min(profile.forward_time(b) for b in {batch, *points, q.batch}) + sending
    else:
        bound = profile.forward_time(batch) + max(profile.backward_time(batch), sending)
    devices = None if q.memory is None else [WorkerDevice(memory=q.memory)] * g

    def make(limit: float) -> list[AnyPlan]:
        return [planner.plan(profile, q.network, workers=g, policy=name, batch=batch, devices=devices)]

    return Combination(name, g, bound=bound, held=0, work=partial(_whole, 0.0), exact=True, make=make)


def _burst(q: Question) -> list[Combination]:
    profile = shared_out(q.profile)
    counts = useful_counts(q.batch, q.devices)
    if len(counts) * len(profile.layers) > MOST_CELLS:
        most = min(q.devices, q.batch)
        counts = tuple(sorted({*_halvings(most), *(2**i for i in range(most.bit_length()))}))
    cost = ProfileCost(profile, q.batch, NetworkLinks(q.network))
    planner = BurstPlanner(profile, cost, q.devices, counts=counts, memory=q.memory, network=q.network.name)

    # What `dovetail plan --burst` plans with.
    shown = replace(planner, profile=q.profile, cost=ProfileCost(q.profile, q.batch, NetworkLinks(q.network)))
    least = bound.relaxations(planner)

    def make(limit: float) -> list[AnyPlan]:
        # The best plans if 0 to 100 % of the communication hides, and the best where the links are the limit: the
        # simulator, which knows how much hides, then decides.
        plans = least + [overlap.partly_hidden(planner, share).fastest() for share in overlap.SHARES]
        plans += rules.data_parallel(planner)
        with contextlib.suppress(Error):  # its rule knows chains only
            plans.append(rules.deeppool(shown)[0])
        if len(counts) * len(profile.layers) <= FEW_CELLS:
            plans += shown.tradeoff(SHOWN)
        if q.objective != "time":
            plans += planner.tradeoff(LIMITS)
            with contextlib.suppress(Error):  # where no plan is as fast while all-reduces are paid for in full
                plans.append(planner.cheapest(iteration=min(limit, MOST_SECONDS)))
        made = {p.counts: planner.predict(p.counts, policy="auto") for p in plans if _of_its_own(q, p)}
        fit = [p for p in made.values() if q.memory is None or p.prediction.memory <= q.memory]
        return [p for p, seconds in zip(fit, _computing(planner, fit), strict=True) if seconds <= limit]

    return [
        Combination(
            "burst",
            q.devices,
            bound=bound.tightest(least),
            held=0,
            work=cache(partial(bound.least_work, planner)),
            exact=False,
            make=make,
        )
    ]


def _of_its_own(q: Question, plan: BurstPlan) -> bool:
    """Whether data parallelism cannot run it: that needs one number for all layers, which divides the batch."""
    return len(set(plan.counts)) > 1 or q.batch % plan.counts[0] != 0


def _computing(planner: BurstPlanner, plans: Sequence[BurstPlan]) -> list[float]:
    """Seconds that rank 0 computes at least, for every plan."""
    cost, counts = planner.cost, sorted({g for plan in plans for g in plan.counts})
    at = {g: k for k, g in enumerate(counts)}
    most = local_batch(cost.batch, counts)
    least = np.maximum(1, cost.batch // np.array(counts, dtype=np.int64))
    seconds = [np.minimum(cost.compute(v, most), cost.compute(v, least)) for v in range(len(planner.profile.layers))]
    return [sum(float(seconds[v][at[g]]) for v, g in enumerate(plan.counts)) for plan in plans]


def shared_out(profile: Profile) -> Profile:
    """Layers whose backward times add up to the profile's own.

    Where the last gradient is ready after the sum of the layers' times, the layers share the rest in proportion, as
    they do in the timeline of data parallelism. Otherwise burst would look faster by what it leaves out.
    """
    total = sum(layer.backward(profile.batch) for layer in profile.layers)
    factor = profile.backward_time() / total if total else 1.0
    if factor <= 1 + 1e-9:
        return profile

    def longer(t: LayerTime) -> LayerTime:
        return msgspec.structs.replace(t, backward=t.backward.scaled(factor))

    layers = tuple(
        msgspec.structs.replace(layer, times=tuple(longer(t) for t in layer.times)) for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)

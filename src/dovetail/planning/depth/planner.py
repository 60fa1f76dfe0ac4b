"""Depth plans: from a profile and a number of workers to segments, a depth and a local batch for each worker.

    plan(profile, network, workers=4, policy="balanced")     one plan
    compare(profile, network, workers=4)                     one for every policy

The layers are cut into segments of equal backward time. A policy says how many of the last segments each worker
backpropagates through and how many samples it takes, in one phase of the training or in several. For every phase the
cost model then predicts each worker's time, memory and traffic; the merge planner schedules the segments' gradients
from the moment the slowest contributor has them; and the longer of computing and communicating is the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec

from dovetail.core.depth_plan import DepthPhase, DepthPlan, WorkerPrediction
from dovetail.core.errors import Error
from dovetail.core.files import MOST_BYTES, MOST_COUNT
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.planning.merge import exact
from dovetail.planning.merge.cycle import slowed
from dovetail.planning.merge.stream import objective
from dovetail.planning.registry import Registry

from .buckets import depth_stream
from .cost import DepthCosts, WorkerDevice
from .segmentation import segments as cut
from .shares import assign, balance, deepen

__all__ = ["COMPARED", "POLICIES", "WorkerDevice", "compare", "plan"]

LATE = 0.5
"""Share of the training after which a late policy begins: full depth first, partial depth when the noise hurts less."""
COMPARED = ("full", "ladder", "late-ladder", "balanced", "late-balanced")


@dataclass(frozen=True)
class DepthSetting:
    """The inputs of a depth policy."""

    costs: DepthCosts
    batch: int
    """Samples per worker if all have the same number."""
    min_contributors: int
    network: Network | None = None

    @property
    def workers(self) -> int:
        return len(self.costs.devices)

    @property
    def segments(self) -> int:
        return len(self.costs.segments)

    @property
    def total(self) -> int:
        return self.batch * self.workers

    def even(self) -> tuple[int, ...]:
        return (self.batch,) * self.workers

    def limits(self) -> list[int]:
        """The deepest depth that each worker's memory holds at equal batches."""
        return [self.costs.deepest(w, self.batch) for w in range(self.workers)]

    def seconds(self, worker: int, depth: int) -> float:
        """Seconds of a worker at equal batches; depth 0 is forward alone."""
        return self.costs.seconds(worker, depth, self.batch)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The ladder's contributors from the input to the output, but never fewer than asked for."""
        k, m = self.workers, self.segments
        return tuple(max(self.min_contributors, -(-(s + 1) * k // m)) for s in range(m))

    @cached_property
    def rungs(self) -> tuple[int, ...]:
        """The depths that give these counts, the shallowest first."""
        return tuple(sum(c >= self.workers - i for c in self.counts) for i in range(self.workers))

    def placed(self, depths: Sequence[int]) -> tuple[int, ...]:
        """The same depths, assigned to the workers that they suit best; unchanged where all devices are alike."""
        alike = len(set(self.costs.devices)) == 1
        if alike and all(d <= limit for d, limit in zip(depths, self.limits(), strict=True)):
            return tuple(depths)
        return assign(depths, self.seconds, limits=self.limits())

    def balanced(self, depths: Sequence[int]) -> tuple[int, ...]:
        """Local batches with which workers of these depths finish together, the sending that follows included.

        A worker's deepest segment cannot be sent before that worker is done, and gradients leave from the last segment
        to the first. So after a worker has finished, its deepest segment and all those before it are still to be sent:
        it has to be done earlier by that much.
        """
        most = min(self.total, MOST_COUNT)  # what a plan can say
        caps = [self.costs.largest(w, d, most) for w, d in enumerate(depths)]
        sending = self._sending(depths)
        after = [sum(sending[: self.segments - d + 1]) for d in depths]

        def seconds(worker: int, batch: int) -> float:
            return self.costs.seconds(worker, depths[worker], batch) + after[worker]

        measured = sorted({t.batch for layer in self.costs.profile.layers for t in layer.times})
        return balance(seconds, self.total, caps=caps, knots=measured)

    def _sending(self, depths: Sequence[int]) -> list[float]:
        """Seconds that sending each segment takes, as one bucket."""
        k = self.workers
        if self.network is None or k < 2:
            return [0.0] * self.segments
        cost = self.network.cost("all_reduce", ranks=k)
        seconds = []
        for s, n in enumerate(self.costs.segment_bytes):
            contributors = sum(d >= self.segments - s for d in depths)
            seconds.append(float(cost(n * (contributors + k - 2) / (2 * (k - 1)))))
        return seconds


Choice = tuple[float, tuple[int, ...], tuple[int, ...]]
"""(begins, depths, batches) of a phase."""
Choose = Callable[[DepthSetting], list[Choice]]


def _full(s: DepthSetting) -> list[Choice]:
    return [(0.0, (s.segments,) * s.workers, s.even())]


def _ladder(s: DepthSetting) -> list[Choice]:
    return [(0.0, s.placed(s.rungs), s.even())]


def _balanced(s: DepthSetting) -> list[Choice]:
    # Where devices differ, depths follow their speeds at equal batches; batches then even out what is left.
    depths = s.rungs if len(set(s.costs.devices)) == 1 else _by_speed(s)
    return [(0.0, depths, s.balanced(depths))]


def _by_speed(s: DepthSetting) -> tuple[int, ...]:
    """Depths by device for unequal batches: the slower and the smaller the shallower."""
    order = sorted(range(s.workers), key=lambda w: (s.costs.devices[w].speed, s.limits()[w], w))
    depths = [0] * s.workers
    for worker, depth in zip(order, sorted(s.rungs), strict=True):
        depths[worker] = depth
    return tuple(depths)


def _heterogeneous(s: DepthSetting) -> list[Choice]:
    return [(0.0, deepen(s.counts, s.seconds, limits=s.limits()), s.even())]


def _late(choose: Choose, begins: float) -> Choose:
    def both(s: DepthSetting) -> list[Choice]:
        return [*_full(s), *((begins, depths, batches) for _, depths, batches in choose(s))]

    return both


def _given(depths: tuple[int, ...], s: DepthSetting) -> list[Choice]:
    if len(depths) != s.workers:
        raise Error(f"depths: expected one for each of {s.workers} workers, got {len(depths)}")
    if min(depths) < 1 or max(depths) != s.segments:
        raise Error(
            f"depths: expected 1 to {s.segments} and somebody at {s.segments}, got {','.join(map(str, depths))}"
        )
    small = next((w for w, limit in enumerate(s.limits()) if depths[w] > limit), None)
    if small is not None:
        raise Error(f"depths: worker {small} has memory for depth {s.limits()[small]} at most, got {depths[small]}")
    return [(0.0, depths, s.even())]


def _late_by(choose: Choose, argument: str) -> Choose:
    try:
        begins = float(argument)
    except ValueError:
        begins = 0.0
    if not 0 < begins < 1:
        raise ValueError(f"a share of the training above 0 and below 1, got {argument!r}")
    return _late(choose, begins)


def _depths(argument: str) -> Choose:
    if not all(part.strip().isdecimal() for part in argument.split(",")):
        raise ValueError("whole numbers such as depths:1,2,4,4")
    return partial(_given, tuple(int(part) for part in argument.split(",")))


POLICIES: Registry[Choose] = Registry("policy")
POLICIES.add("full", "everybody backpropagates through everything", _full)
POLICIES.add("ladder", "worker i through the last i segments", _ladder)
POLICIES.add("late-ladder", "full depth first, the ladder in the last half of training", _late(_ladder, LATE))
POLICIES.add("balanced", "the ladder, with local batches such that all finish together", _balanced)
POLICIES.add("late-balanced", "full depth first, balanced in the last half of training", _late(_balanced, LATE))
POLICIES.add("heterogeneous", "as deep as each device goes while nobody waits for it", _heterogeneous)
POLICIES.add("guard", "starts at full depth; the guard then lowers it as the noise allows", _full)
POLICIES.family(
    "late-ladder",
    "SHARE",
    "the ladder after this share of the training, such as late-ladder:0.75",
    partial(_late_by, _ladder),
)
POLICIES.family("late-balanced", "SHARE", "balanced after this share of the training", partial(_late_by, _balanced))
POLICIES.family("depths", "D,D,…", "these depths, one for each worker", _depths)


def plan(
    profile: Profile,
    network: Network | None = None,
    *,
    workers: int | None = None,
    policy: str = "ladder",
    segments: int | None = None,
    batch: int | None = None,
    min_contributors: int = 1,
    devices: Sequence[WorkerDevice] | None = None,
    cuts: Sequence[str] | None = None,
    optimizer_copies: int = 2,
) -> DepthPlan:
    """A depth plan by one policy.

    `workers` defaults to the number of devices or to the network's ranks, `segments` to the number of workers (or as
    many as the layers allow), `batch` to the profile's own. Without a network communication takes no time. `cuts` names
    the modules before which a segment may begin; `optimizer_copies` is the optimiser's state in copies of the weights.
    """
    count, samples = _workers(workers, devices, network), profile.batch if batch is None else batch
    for what, number in (("workers", count), ("batch", samples)):
        if not 1 <= number <= MOST_COUNT:
            raise Error(f"{what}: expected 1 to {MOST_COUNT:,}, got {number}")
    if devices is not None and len(devices) != count:
        raise Error(f"devices: expected one for each of {count} workers, got {len(devices)}")
    if not 1 <= min_contributors <= count:
        raise Error(f"min_contributors: expected 1 to {count}, got {min_contributors}")
    possible = len({t.layer for t in profile.tensors}) if cuts is None else len(cuts) + 1
    found = cut(profile, min(count, possible) if segments is None else segments, cuts=cuts)
    costs = DepthCosts(
        profile, found, tuple([WorkerDevice()] * count if devices is None else devices), optimizer_copies
    )
    setting = DepthSetting(costs, samples, min_contributors, network)
    even = _phase(costs, _full(setting)[0])
    choices = POLICIES.parse(policy).value(setting)
    for _, depths, batches in choices:
        _check_memory(costs, policy, depths, batches)
    phases = tuple(_phase(costs, choice) for choice in choices)
    most = max(worker.memory for phase in (even, *phases) for worker in phase.workers)
    if most > MOST_BYTES:  # more than a stored plan can say
        raise Error(f"batch: expected workers that need at most {MOST_BYTES:,} bytes, got {most:,} with {samples:,}")
    made = DepthPlan(
        policy=policy,
        profile=profile.name,
        network=network.name if network else "none",
        layers=tuple(layer.name for layer in profile.layers),
        segments=found,
        phases=phases,
        full=even,
    )
    full = _timed(msgspec.structs.replace(made, phases=(even,)), profile, network)[0]
    return msgspec.structs.replace(made, phases=_timed(made, profile, network), full=full)


def _workers(workers: int | None, devices: Sequence[WorkerDevice] | None, network: Network | None) -> int:
    if workers is not None:
        return workers
    if devices is not None:
        return len(devices)
    if network is None:
        raise Error("workers: expected a number, or a network or devices that imply one")
    return network.ranks


def compare(
    profile: Profile,
    network: Network | None = None,
    *,
    workers: int | None = None,
    batch: int | None = None,
    policies: Sequence[str] = COMPARED,
) -> list[DepthPlan]:
    """One plan for every policy, in the order in which they are given."""
    return [plan(profile, network, workers=workers, batch=batch, policy=name) for name in policies]


def _check_memory(costs: DepthCosts, policy: str, depths: Sequence[int], batches: Sequence[int]) -> None:
    """Raises an Error where a worker's memory is too small: not every policy chooses depths by memory."""
    for w, (device, depth, batch) in enumerate(zip(costs.devices, depths, batches, strict=True)):
        needed = costs.memory(depth, batch)
        if device.memory is not None and needed > device.memory:
            raise Error(
                f"{policy}: worker {w} at depth {depth} with {batch} samples needs {needed:,} bytes, expected at most "
                f"{device.memory:,}"
            )


def _phase(costs: DepthCosts, choice: Choice) -> DepthPhase:
    begins, depths, batches = choice
    return DepthPhase(
        begins=begins, depths=depths, batches=batches, workers=costs.predict(depths, batches), iteration=0.0
    )


def _timed(plan: DepthPlan, profile: Profile, network: Network | None) -> tuple[DepthPhase, ...]:
    """The plan's phases with their iteration times; computing is slower while gradients are sent, where measured."""
    if network is None or plan.workers < 2:
        return tuple(msgspec.structs.replace(phase, iteration=_computed(phase)) for phase in plan.phases)
    cost, timed = network.cost("all_reduce", ranks=plan.workers), []
    share = 0.0 if network.contention is None else network.contention.compute
    for i, phase in enumerate(plan.phases):
        stream, _ = depth_stream(plan, profile, phase=i)
        if share:
            factor = slowed(share, float(exact.remaining(stream, cost)[0][0]), _computed(phase))
            longer = tuple(_longer(worker, factor) for worker in phase.workers)
            phase = msgspec.structs.replace(phase, workers=longer)
            phases = (*plan.phases[:i], phase, *plan.phases[i + 1 :])
            stream, _ = depth_stream(msgspec.structs.replace(plan, phases=phases), profile, phase=i)
        ends = max(_computed(phase), objective(stream, exact.fewest(stream, cost), cost))
        timed.append(msgspec.structs.replace(phase, iteration=ends))
    return tuple(timed)


def _longer(worker: WorkerPrediction, factor: float) -> WorkerPrediction:
    return msgspec.structs.replace(worker, forward=factor * worker.forward, backward=factor * worker.backward)


def _computed(phase: DepthPhase) -> float:
    """Seconds that the slowest worker computes."""
    return max(w.forward + w.backward for w in phase.workers)

"""One model on one network with a number of workers: what policies choose from, and what a choice is predicted to take.

`MergeSetting` is for plans that torch's reducer executes, `OverlapSetting` for those of dovetail's exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, get_args

from dovetail.core.errors import Error
from dovetail.core.files import MOST_COUNT, MOST_SECONDS
from dovetail.core.network import CollectiveName, Cost, Network, Precision
from dovetail.core.plan import MIB, BucketKind, Overlap, Plan, Prediction, from_cuts
from dovetail.core.profile import Profile

from . import cycle as cycles
from . import cycle_choice, cycle_exact, exact, rules
from .cycle import Bucketing, Way
from .cycle_choice import CHOICES, Memory
from .cycle_labels import lower_bound
from .policies import POLICIES
from .robust import THRESHOLDS_MIB
from .stream import objective, stream

KINDS: tuple[BucketKind, ...] = ("whole", "split")
NEEDED: dict[BucketKind, tuple[CollectiveName, ...]] = {
    "whole": ("all_reduce",),
    "split": ("reduce_scatter", "all_gather"),
}
Precisions = Literal["full", "bf16", "int8", "auto"]


def setting_of(
    plan: Plan, profile: Profile, network: Network, *, workers: int | None, batch: int | None
) -> MergeSetting:
    """The setting in which a plan can be predicted: it has all the ways that the plan uses."""
    if plan.overlap == "backward":
        return MergeSetting(profile, network, workers, batch)
    return OverlapSetting(
        profile,
        network,
        workers,
        batch,
        optimizer=plan.prediction.optimizer,
        precisions=tuple(p for p in get_args(Precision) if p in {"full", *(b.precision for b in plan.buckets)}),
    )


def setting_for(
    profile: Profile,
    network: Network,
    *,
    workers: int | None,
    batch: int | None,
    overlap: Overlap,
    optimizer: float,
    memory: Memory,
    precision: Precisions,
    kinds: Sequence[BucketKind],
) -> MergeSetting:
    """One model on one network, as `plan` takes it; one clear line for what cannot be."""
    known: dict[str, tuple[str, tuple[str, ...]]] = {
        "overlap": (overlap, get_args(Overlap)),
        "memory": (memory, get_args(Memory)),
        "precision": (precision, get_args(Precisions)),
    }
    for option, (value, values) in known.items():
        if value not in values:
            names = [repr(v) for v in values]
            raise Error(f"{option}: expected {', '.join(names[:-1])} or {names[-1]}, got {value!r}")
    if not kinds or not set(kinds) <= set(KINDS):
        raise Error(f"kinds: expected some of {', '.join(KINDS)}, got {', '.join(map(str, kinds)) or 'none'}")
    if overlap == "forward":
        return OverlapSetting(
            profile,
            network,
            workers,
            batch,
            optimizer=optimizer,
            memory=memory,
            precisions=_allowed(network, precision),
            kinds=tuple(k for k in KINDS if k in kinds),
        )
    if optimizer:
        raise Error("optimizer: expected with overlap='forward' only; otherwise no plan changes when it runs")
    for option, changed in (("memory", memory != "time"), ("precision", precision != "full")):
        if changed:
            raise Error(f"{option}: expected with overlap='forward' only; torch's reducer runs the other plans")
    return MergeSetting(profile, network, workers, batch)


def _allowed(network: Network, precision: Precisions) -> tuple[Precision, ...]:
    if precision == "full":
        return ("full",)
    if precision == "auto" and network.reduced:
        return tuple(p for p in get_args(Precision) if p == "full" or p in network.reduced)
    if precision == "auto" or precision not in network.reduced:
        what = "collectives of fewer bytes" if precision == "auto" else f"collectives in {precision}"
        raise Error(f"precision: network {network.name!r} has no {what}: measure them with `dovetail network`")
    return ("full", precision)


class MergeSetting:
    """One model on one network with a number of workers."""

    overlap: Overlap = "backward"

    def __init__(self, profile: Profile, network: Network, workers: int | None, batch: int | None) -> None:
        self.workers = network.ranks if workers is None else workers
        self.batch = profile.batch if batch is None else batch
        for what, number in (("workers", self.workers), ("batch", self.batch)):
            if not 1 <= number <= MOST_COUNT:
                raise Error(f"{what}: expected 1 to {MOST_COUNT:,}, got {number}")
        self.profile, self.network = profile, network
        self.stream = stream(profile, batch=self.batch)
        self.prepare()

    def prepare(self) -> None:
        """Sets what collectives cost, and stretches computing where they slow it down: backward only, here."""
        self.cost = self.price("all_reduce")
        if self.network.contention is not None:
            communicating = float(exact.remaining(self.stream, self.cost)[0][0])
            factor = cycles.slowed(self.network.contention.compute, communicating, self.stream.backward)
            self.stream = self.stream.stretched(factor)

    def price(self, collective: CollectiveName, precision: Precision = "full") -> Cost:
        return self.network.cost(collective, ranks=self.workers, precision=precision)

    def plan(self, policy: str) -> Plan:
        return self.of(policy, self.choose(policy))

    def choose(self, policy: str) -> Bucketing:
        return self.given(POLICIES.parse(policy).value(self.stream, self.cost))

    def given(self, cuts: list[int]) -> Bucketing:
        """Given buckets, in the ways that are best for them: here there is one."""
        return Bucketing(tuple(cuts), (0,) * len(cuts))

    def buckets(self, plan: Plan) -> Bucketing:
        """The buckets of a plan, as a bucketing of this setting."""
        return self.given([b.stop for b in plan.buckets])

    def end(self, bucketing: Bucketing) -> float:
        """The objective: seconds from the start of backward until it and communication are over."""
        return objective(self.stream, list(bucketing.cuts), self.cost)

    def ways(self, bucketing: Bucketing) -> list[tuple[BucketKind, Precision]]:
        """Kind and precision of every bucket."""
        return [("whole", "full")] * len(bucketing.cuts)

    def of(self, policy: str, bucketing: Bucketing) -> Plan:
        kinds, precisions = zip(*self.ways(bucketing), strict=True)
        return from_cuts(
            list(bucketing.cuts),
            self.profile,
            policy=policy,
            network=self.network.name,
            workers=self.workers,
            batch=self.batch,
            prediction=self.predict(bucketing),
            overlap=self.overlap,
            kinds=kinds,
            precisions=precisions,
        )

    def predict(self, bucketing: Bucketing) -> Prediction:
        forward, backward, end = self.profile.forward_time(self.batch), self.stream.backward, self.end(bucketing)
        return Prediction(
            iteration=forward + end,
            forward=forward,
            backward=backward,
            exposed=end - backward,
            lower_bound=forward + self.bound,
        )

    @cached_property
    def bound(self) -> float:
        """Seconds from the start of backward before which no bucketing ends the iteration."""
        return max(self.stream.backward, exact.lower_bound(self.stream, self.cost))

    def promising(self) -> Iterator[tuple[str, Bucketing]]:
        """Yields (policy, buckets), torch's default first, then the most promising; each is made when asked for."""
        yield "ddp", self.choose("ddp")
        yield "auto", self.choose("auto")
        yield "fewest", self.choose("fewest")
        thresholds = {mib: self.given(rules.by_size(self.stream, mib * MIB)) for mib in THRESHOLDS_MIB}
        by_promise = sorted(thresholds, key=lambda m: (self.end(thresholds[m]), -m))
        yield f"threshold:{by_promise[0]}", thresholds[by_promise[0]]
        yield "robust", self.choose("robust")
        yield "optimal", self.choose("optimal")
        yield "accumulate-while-busy", self.choose("accumulate-while-busy")
        for mib in by_promise[1:]:
            yield f"threshold:{mib}", thresholds[mib]
        yield "single", self.choose("single")


class OverlapSetting(MergeSetting):
    """The same where every bucket is whole or split. Rules for one phase cut by backward alone."""

    overlap = "forward"

    def __init__(
        self,
        profile: Profile,
        network: Network,
        workers: int | None,
        batch: int | None,
        *,
        optimizer: float = 0.0,
        memory: Memory = "time",
        precisions: tuple[Precision, ...] = ("full",),
        kinds: tuple[BucketKind, ...] = KINDS,
    ) -> None:
        if not 0 <= optimizer <= MOST_SECONDS:
            raise Error(f"optimizer: expected seconds, at least 0, got {optimizer}")
        self.optimizer, self.memory = float(optimizer), memory
        # Where all-reduces were not measured, all buckets are split.
        measured = tuple(k for k in kinds if k != "whole" or "all_reduce" in network.collectives)
        self.kinds, self.precisions = measured or kinds, precisions
        super().__init__(profile, network, workers, batch)

    def prepare(self) -> None:
        ways = [way for kind in self.kinds for p in self.precisions for way in self._ways(kind, p)]
        factor = 1.0
        if self.network.contention is not None:
            # By what there is in full precision, so that every plan of a network is predicted alike.
            there = [kind for kind in KINDS if set(NEEDED[kind]) <= set(self.network.collectives)]
            least = cycles.cheapest([way for kind in there for way in self._ways(kind, "full")])
            computing = self.stream.backward + self.profile.forward_time(self.batch)
            communicating = float(exact.remaining(self.stream, least)[0][0])
            factor = cycles.slowed(self.network.contention.compute, communicating, computing)
        self.cycle = cycles.cycle(self.profile, ways, batch=self.batch, slowdown=factor)
        # Rules that know one phase cut by the cost of a reduce-scatter, where there are any.
        full = [way for way in ways if way.precision == "full"]
        self.stream, self.cost = self.cycle.backward, full[-1].reduce

    def _ways(self, kind: BucketKind, precision: Precision) -> Iterator[Way]:
        """The way of this kind and precision, unless the network has no such collectives of fewer bytes."""
        needed = NEEDED[kind]
        if precision != "full" and not set(needed) <= set(self.network.reduced.get(precision, {})):
            return
        costs = [self.price(name, precision) for name in needed]
        seconds = self.optimizer * (self.workers if kind == "whole" else 1)
        update = cycles.by_bytes(seconds, self.profile.parameter_bytes)
        yield Way(kind, precision, costs[0], costs[1] if kind == "split" else None, update)

    def choose(self, policy: str) -> Bucketing:
        if policy in CHOICES:
            return cycle_choice.choose(self.cycle, CHOICES[policy], memory=self.memory)
        return super().choose(policy)

    def given(self, cuts: list[int]) -> Bucketing:
        return cycle_choice.choose(self.cycle, lambda among: cycle_exact.ways_for(among, cuts))

    def buckets(self, plan: Plan) -> Bucketing:
        of = {(way.kind, way.precision): w for w, way in enumerate(self.cycle.ways)}
        for b in plan.buckets:
            if (b.kind, b.precision) not in of:
                raise Error(f"network {self.network.name!r} has no collectives for {b.kind} buckets in {b.precision}")
        return Bucketing(tuple(b.stop for b in plan.buckets), tuple(of[b.kind, b.precision] for b in plan.buckets))

    def end(self, bucketing: Bucketing) -> float:
        return cycles.period(self.cycle, bucketing)

    def ways(self, bucketing: Bucketing) -> list[tuple[BucketKind, Precision]]:
        return [(self.cycle.ways[w].kind, self.cycle.ways[w].precision) for w in bucketing.ways]

    def predict(self, bucketing: Bucketing) -> Prediction:
        forward, backward, iteration = self.cycle.forward, self.stream.backward, self.end(bucketing)
        return Prediction(
            iteration=iteration,
            forward=forward,
            backward=backward,
            exposed=max(0.0, iteration - forward - backward - self.optimizer),
            lower_bound=self.bound,
            optimizer=self.optimizer,
        )

    @cached_property
    def bound(self) -> float:
        return lower_bound(self.cycle)

"""Planning: pure functions from a profile and a network to a plan. No torch, no I/O.

    plan(profile, network)        the plan to use
    compare(profile, network)     one plan for every policy, the fastest first
    candidates(profile, network)  plans worth trying on the real system

Each builds the stream of gradients at the local batch, asks a policy for the cuts at the cost of one all-reduce among
the workers, and predicts: iteration = forward + max(backward, finish of the last bucket).

With `overlap="forward"` a bucket is reduce-scattered behind backward and all-gathered behind the next forward
(`planning.merge.cycle`), and `optimizer` is what the optimiser takes in between on a rank's shards, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from dovetail.core.errors import Error
from dovetail.core.files import MOST_COUNT, MOST_SECONDS
from dovetail.core.network import CollectiveName, Cost, Network
from dovetail.core.plan import MIB, Overlap, Plan, Prediction, from_cuts
from dovetail.core.profile import Profile

from . import cycle as cycles
from . import cycle_exact, exact, rules
from .policies import COMPARED, POLICIES
from .robust import THRESHOLDS_MIB
from .stream import objective, stream

__all__ = ["candidates", "compare", "plan", "predict"]


def plan(
    profile: Profile,
    network: Network,
    *,
    workers: int | None = None,
    batch: int | None = None,
    policy: str = "auto",
    overlap: Overlap = "backward",
    optimizer: float = 0.0,
) -> Plan:
    """A plan by one policy; `workers` defaults to the network's own number of ranks, `batch` to the profile's."""
    return _setting(profile, network, workers, batch, overlap, optimizer).plan(policy)


def compare(
    profile: Profile,
    network: Network,
    *,
    workers: int | None = None,
    batch: int | None = None,
    policies: Sequence[str] | None = None,
    overlap: Overlap = "backward",
    optimizer: float = 0.0,
) -> list[Plan]:
    """One plan for every policy by predicted iteration time; among equals, the one with fewer buckets first."""
    setting = _setting(profile, network, workers, batch, overlap, optimizer)
    plans = [setting.plan(name) for name in policies or COMPARED]
    return sorted(plans, key=lambda p: (p.prediction.iteration, len(p.buckets)))


def candidates(
    profile: Profile,
    network: Network,
    *,
    workers: int | None = None,
    batch: int | None = None,
    count: int = 4,
    overlap: Overlap = "backward",
    optimizer: float = 0.0,
) -> list[Plan]:
    """Up to `count` distinct bucketings to try on the real system: torch's default, then the others by promise.

    After `ddp` come the robust choice, the fewest buckets near the optimum and the best size threshold; where those
    coincide, the optimum, further thresholds and one bucket take their place. Fewer come back if no more exist.
    """
    setting = _setting(profile, network, workers, batch, overlap, optimizer)
    plans: dict[tuple[int, ...], Plan] = {}
    for name, cuts in setting.promising():
        if len(plans) == max(count, 1):
            break
        if tuple(cuts) not in plans:
            plans[tuple(cuts)] = setting.of(name, cuts)
    return list(plans.values())


def predict(plan: Plan, profile: Profile, network: Network, *, workers: int | None = None) -> Plan:
    """The same buckets, predicted from this profile and this network, at the profile's own batch."""
    if tuple(t.name for t in profile.tensors) != plan.tensors:
        raise Error(f"plan for {plan.profile!r}: expected the tensors of profile {profile.name!r} in its order")
    setting = _setting(profile, network, workers, None, plan.overlap, plan.prediction.optimizer)
    return setting.of(plan.policy, [b.stop for b in plan.buckets])


def _setting(
    profile: Profile, network: Network, workers: int | None, batch: int | None, overlap: Overlap, optimizer: float
) -> MergeSetting:
    if overlap not in ("backward", "forward"):
        raise Error(f"overlap: expected 'backward' or 'forward', got {overlap!r}")
    if overlap == "backward":
        if optimizer:
            raise Error("optimizer: expected with overlap='forward' only; otherwise no plan changes when it runs")
        return MergeSetting(profile, network, workers, batch)
    return OverlapSetting(profile, network, workers, batch, optimizer=optimizer)


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
        self.cost = self.price("all_reduce" if self.overlap == "backward" else "reduce_scatter")

    def price(self, collective: CollectiveName) -> Cost:
        return self.network.cost(collective, ranks=self.workers)

    def plan(self, policy: str) -> Plan:
        return self.of(policy, self.choose(policy))

    def choose(self, policy: str) -> list[int]:
        return POLICIES.parse(policy).value(self.stream, self.cost)

    def end(self, cuts: list[int]) -> float:
        """The objective: seconds from the start of backward until it and communication are over."""
        return objective(self.stream, cuts, self.cost)

    def of(self, policy: str, cuts: list[int]) -> Plan:
        return from_cuts(
            cuts,
            self.profile,
            policy=policy,
            network=self.network.name,
            workers=self.workers,
            batch=self.batch,
            prediction=self.predict(cuts),
            overlap=self.overlap,
        )

    def predict(self, cuts: list[int]) -> Prediction:
        forward, backward, end = self.profile.forward_time(self.batch), self.stream.backward, self.end(cuts)
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

    def promising(self) -> Iterator[tuple[str, list[int]]]:
        """Yields (policy, cuts), torch's default first, then the most promising; each is made when it is asked for."""
        yield "ddp", rules.ddp(self.stream)
        yield "auto", self.choose("auto")
        yield "fewest", self.choose("fewest")
        thresholds = {mib: rules.by_size(self.stream, mib * MIB) for mib in THRESHOLDS_MIB}
        by_promise = sorted(thresholds, key=lambda m: (self.end(thresholds[m]), -m))
        yield f"threshold:{by_promise[0]}", thresholds[by_promise[0]]
        yield "robust", self.choose("robust")
        yield "optimal", self.choose("optimal")
        yield "accumulate-while-busy", rules.accumulate_while_busy(self.stream, self.cost)
        for mib in by_promise[1:]:
            yield f"threshold:{mib}", thresholds[mib]
        yield "single", rules.fill(self.stream)


class OverlapSetting(MergeSetting):
    """The same where communication hides behind forward too. Rules for one phase cut by backward alone."""

    overlap = "forward"

    def __init__(
        self, profile: Profile, network: Network, workers: int | None, batch: int | None, *, optimizer: float
    ) -> None:
        if not 0 <= optimizer <= MOST_SECONDS:
            raise Error(f"optimizer: expected seconds, at least 0, got {optimizer}")
        super().__init__(profile, network, workers, batch)
        self.optimizer = float(optimizer)
        self.cycle = cycles.cycle(
            profile,
            self.cost,
            self.price("all_gather"),
            batch=self.batch,
            update=cycles.by_bytes(self.optimizer, profile.parameter_bytes),
        )

    def choose(self, policy: str) -> list[int]:
        of_both_phases = {
            "auto": cycle_exact.safest,
            "robust": cycle_exact.robust,
            "fewest": cycle_exact.fewest,
            "optimal": cycle_exact.optimal,
        }
        return of_both_phases[policy](self.cycle) if policy in of_both_phases else super().choose(policy)

    def end(self, cuts: list[int]) -> float:
        return cycles.period(self.cycle, cuts)

    def predict(self, cuts: list[int]) -> Prediction:
        forward, backward, iteration = self.cycle.forward.backward, self.stream.backward, self.end(cuts)
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
        return cycles.lower_bound(self.cycle)

"""What a tuner drives: a model with an optimiser of dovetail's; reducer_target.py has the one without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from dovetail import measure, planning
from dovetail.core.network import CollectiveName, Network, Precision
from dovetail.core.plan import Overlap, Plan
from dovetail.core.profile import Profile
from dovetail.train.rank_times import RankIteration, rank_iteration

from .. import reducer
from ..layer_watch import LayerWatch
from ..observe import ObservedIteration
from ..pass_stamps import PassSeconds
from ..wire import coded, ring
from ..wire.lane import queued
from .reducer_target import OWN
from .trials import TrialPlan

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

LEAST_SPLIT = 0.5
"""Share of the bytes that must be in split buckets where memory is to be saved."""
TRIPLE: tuple[CollectiveName, ...] = ("all_reduce", "reduce_scatter", "all_gather")
"""What the exchange's buckets need."""
PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "full": (),
    "bf16": ("bf16",),
    "int8": ("int8",),
    "auto": ("bf16", "int8"),
}
"""What may travel in place of full gradients, by the wrapper's argument."""


class ExchangeTarget:
    """A model with an attached optimiser: torch's reducer or the exchange carries its gradients, as the plan says.

    It is watched with the exchange in charge, all buckets split. Iterations end in `optimizer.step()`.
    """

    overlap: Overlap = "forward"
    own: Any = None

    def __init__(self, ddp: Any) -> None:
        self._ddp: DistributedDataParallel = ddp
        assert self._ddp.exchange is not None, "an optimiser is attached"
        self._exchange = self._ddp.exchange
        self.name, self.group, self.device = type(ddp.module).__name__, ddp.process_group, self._exchange.device
        self.parameters = [(s.name, s.parameter) for s in self._exchange.slots]
        self._policy = reducer.own_policy(ddp._bucket_config)
        self._torchs: Network | None = None
        self._clock = self._exchange.clock
        self._last = self._clock.stamp()
        self._layers = LayerWatch(ddp.module, [p for _, p in self.parameters], self._clock)

    def begin(self, on_iteration: Callable[[ObservedIteration], None]) -> None:
        self._on_iteration = on_iteration
        self._last = self._clock.stamp()

    def before_forward(self) -> None:
        """Nothing is to be done before `after_step`."""

    def after_forward(self) -> None:
        """Nothing is to be done before `after_step`."""

    def after_step(self) -> None:
        self._on_iteration(self._seen(self._clock.stamp()))
        self._last = self._clock.stamp()  # planning and changes of buckets are not part of the next iteration

    def _seen(self, now: Any) -> ObservedIteration:
        exchange = self._exchange
        passed = exchange.stamps.seconds(self._clock, self._last, now, exchange.uses) if exchange.watching else None
        if passed is None:
            return ObservedIteration(forward=0.0, total=0.0, period=self._clock.seconds([self._last, now])[1], ready=())
        used, waited = {}, 0.0
        for index, before, after in passed.waits:
            used[index] = before - passed.began - waited
            waited += after - before
        return ObservedIteration(
            forward=passed.ended - passed.began - waited,
            total=passed.now - passed.began,
            period=passed.now,
            ready=tuple((i, t - passed.ended) for i, t in passed.ready if t >= passed.ended),
            used=used,
            update=passed.update,
            alone=self._alone(passed),
        )

    def _alone(self, passed: PassSeconds) -> RankIteration:
        visits, marks = self._layers.taken(self._last)
        marks += [("ready", self._layers.layers[i], t) for i, t in passed.ready if t >= passed.ended]
        return rank_iteration(
            visits,
            marks,
            previous=0.0,
            began=passed.called,
            forwarded=passed.ended,
            ended=passed.now,
            optimizer=passed.update,
            waits=[(passed.called, passed.began), *((start, stop) for _, start, stop in passed.waits)],
        )

    def unready(self) -> bool:
        return False

    def watch(self, *, every_gradient: bool) -> None:
        self._exchange.watching = every_gradient
        if every_gradient:
            self._layers.open()
        else:
            self._layers.close()

    def hooked(self, late: bool) -> str | None:
        return "a communication hook reduces whole gradients"

    def probe(self, profile: Profile) -> Plan | None:
        return None

    def network(self, max_bytes: int, budget: float) -> Network:
        """The exchange's own collectives, in fewer bytes too where that is allowed; torch's are kept beside."""
        exchange = self._exchange
        exchange.settle()  # so the lane is idle on every rank once the first collective below is over
        reduced = PRECISIONS[self._ddp.precision]
        share = budget / (4 + 3 * len(reduced))

        def measured(
            collectives: tuple[CollectiveName, ...], via: Mapping[CollectiveName, Callable[[torch.Tensor], object]]
        ) -> Network:
            return measure.network(
                self.group,
                max_bytes=max_bytes,
                collectives=collectives,
                budget=share * len(collectives),
                device=self.device,
                via=via,
            )

        self._torchs = measured(("all_reduce",), {})
        ours = measured(TRIPLE, queued(exchange.lane, ring.timed(exchange.group), exchange.tags))
        fewer = {
            p: measured(TRIPLE, queued(exchange.lane, coded.timed(exchange.group, p), exchange.tags)).collectives
            for p in reduced
        }
        return msgspec.structs.replace(ours, reduced=fewer)

    def watched(self, profile: Profile, network: Network, optimizer: float) -> tuple[Plan, Profile]:
        return self._split(profile, network, optimizer), profile

    def _split(self, profile: Profile, network: Network, optimizer: float) -> Plan:
        """Buckets of torch's sizes, all split."""
        return planning.plan(
            profile, network, policy=self._policy, overlap="forward", optimizer=optimizer, kinds=("split",)
        )

    def contenders(self, profile: Profile, network: Network, optimizer: float, count: int) -> list[TrialPlan]:
        """torch's reducer with its own buckets and with planned ones, then the exchange's plans, the best first.

        With memory="shard" the optimiser's state must stay split: there plans of mostly split buckets compete alone.
        """
        memory, precision = self._ddp.memory, self._ddp.precision
        own: list[TrialPlan] = []
        if memory == "time":
            assert self._torchs is not None
            # While torch's reducer is in charge every rank updates everything.
            links = msgspec.structs.replace(self._torchs, contention=network.contention)
            update = optimizer * dist.get_world_size(self.group)
            for policy, label in ((self._policy, OWN), ("auto", "plan auto, by torch's reducer")):
                plan = planning.plan(profile, links, policy=policy)
                own.append(TrialPlan(plan=plan, label=label, predicted=plan.prediction.iteration + update))
        else:
            sizes = self._split(profile, network, optimizer)
            own.append(TrialPlan(sizes, "split buckets of torch's sizes", sizes.prediction.iteration))

        given: dict[str, Any] = {"overlap": "forward", "optimizer": optimizer, "memory": memory, "precision": precision}
        split = {**given, "kinds": ("split",)}
        more = planning.candidates(profile, network, count=count, **(given if memory == "time" else split))
        # What a bucket costs beyond its collective is not in the prediction: few buckets compete with many.
        fewest = planning.plan(profile, network, policy="fewest", **given)
        found = [planning.plan(profile, network, **given), fewest, planning.plan(profile, network, **split), *more]
        plans = [
            TrialPlan(plan=p, label=_label(p), predicted=p.prediction.iteration)
            for p in found
            if memory == "time" or _split_share(p) >= LEAST_SPLIT
        ]
        # One more than torch's reducer alone has: merging, plans of both kinds and all split are to meet.
        return _distinct([*own, *plans])[: count + 1]

    def notes(self, profile: Profile, network: Network) -> tuple[str, ...]:
        return ()

    def use(self, order: list[int], plan: Plan, *, baseline: bool = False) -> None:
        if plan.overlap == "forward":
            self._ddp.use_exchange(order, plan.buckets)
        else:
            self._ddp.use_reducer(None if baseline else reducer.planned(self._ddp, plan))

    def changing(self) -> bool:
        return False

    def enforce(self) -> None:
        """A plan never waits: `use` puts it in force."""

    def restore(self, *, now: bool) -> None:
        """The buckets of the moment stay: moving the optimiser's state needs all ranks, and one may be lost."""

    def close(self) -> None:
        self._exchange.watching = False
        self._layers.close()


def _distinct(contenders: list[TrialPlan]) -> list[TrialPlan]:
    """Each bucketing once, under the first of its names."""
    found: dict[object, TrialPlan] = {}
    for contender in contenders:
        found.setdefault((contender.plan.overlap, contender.plan.buckets), contender)
    return list(found.values())


def _split_share(plan: Plan) -> float:
    """Share of the bytes of which every rank keeps the optimiser's state of its n-th only."""
    return sum(b.bytes for b in plan.buckets if b.kind == "split") / plan.bytes


def _label(plan: Plan) -> str:
    counts = Counter(b.kind if b.precision == "full" else f"{b.kind} in {b.precision}" for b in plan.buckets)
    return f"plan {plan.policy}, {' and '.join(f'{n} {what}' for what, n in sorted(counts.items()))}"

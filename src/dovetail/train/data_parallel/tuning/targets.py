"""What a tuner drives: a model under torch's reducer, and a model with an optimiser of dovetail's."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail import measure, planning
from dovetail.core.errors import Error
from dovetail.core.network import CollectiveName, Network, Precision
from dovetail.core.plan import Overlap, Plan
from dovetail.core.profile import Profile
from dovetail.measure.clock import Clock
from dovetail.train import agree
from dovetail.train.stragglers import RankIteration, rank_iteration

from .. import comm_hooks, reducer
from ..comm_hooks import TimedHook
from ..layer_watch import LayerWatch
from ..observe import ObservedIteration, Observer
from ..reducer import ReducerBuckets
from ..wire import coded, ring
from ..wire.lane import queued
from . import packing
from .trials import TrialPlan
from .tuning_report import forward_gain

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

OWN = "torch's own buckets"
NEVER = -1.0
"""Ready time of a parameter that had no gradient so far."""
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


class ReducerTarget:
    """A DDP module whose gradients torch's reducer carries. Iterations end inside backward."""

    overlap: Overlap = "backward"

    def __init__(self, ddp: TorchDDP) -> None:
        self._ddp = ddp
        module = getattr(ddp.module, "_orig_mod", ddp.module)  # a compiled module is named after what was compiled
        self.name, self.group, self.device = type(module).__name__, ddp.process_group, ddp.device
        self.parameters = reducer.reduced(ddp)
        self._kinds = dict(zip((n for n, _ in self.parameters), reducer.kinds(ddp), strict=True))
        self._own = reducer.current(ddp)
        self._next: ReducerBuckets | None = None
        self._call = comm_hooks.carried(reducer.comm_hook(ddp))
        self._timer: TimedHook | None = None
        self._timing = False
        self._last_ready: dict[int, float] = {}

    def begin(self, on_iteration: Callable[[ObservedIteration], None]) -> None:
        self._on_iteration = on_iteration
        self._observer = Observer(self._ddp, [p for _, p in self.parameters], self._ended)

    def _ended(self, iteration: ObservedIteration) -> None:
        if self._timer is not None and self._timing:
            self._timer.end_iteration()
        if iteration.ready:
            iteration = replace(iteration, ready=self._completed(iteration.ready))
        self._on_iteration(iteration)

    def _completed(self, ready: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        """The same with the parameters that got no gradient, by time. A collective where torch looks for unused ones.

        To torch's reducer such a parameter is ready when the first gradient is. One that had a gradient in an earlier
        iteration, or has one on another rank, counts as ready when it is there: buckets wait for it then.
        """
        self._last_ready |= dict(ready)
        count, first = len(self.parameters), ready[0][1]
        if reducer.rebuilds(self._ddp):
            unused = set(range(count)) - {i for i, _ in ready}
            return tuple(sorted([*((i, first) for i in sorted(unused)), *ready], key=lambda one: one[1]))
        mine = [self._last_ready.get(i, NEVER) for i in range(count)]
        latest = agree.largest(mine, self.group, self.device)
        first = min(t for t in latest if t > NEVER)
        return tuple(sorted(enumerate(max(first, t) for t in latest), key=lambda one: one[1]))

    def before_forward(self) -> None:
        if self._next is not None and self._ddp.require_backward_grad_sync and torch.is_grad_enabled():
            # Here and not at the end of backward: the autograd engine still holds the old reducer's callbacks there.
            # torch complains of an unfinished backward pass; a new reducer would hide it.
            self._ddp._check_reducer_finalized()
            self._replace()
        self._observer.before_forward()

    def after_forward(self) -> None:
        self._observer.after_forward()

    def after_step(self) -> None:
        """Iterations end earlier, inside backward."""

    def unready(self) -> bool:
        return comm_hooks.waits(reducer.comm_hook(self._ddp))

    def watch(self, *, every_gradient: bool) -> None:
        self._observer.watch(every_gradient=every_gradient)
        self._timing = every_gradient

    def hooked(self, late: bool) -> str | None:
        hook = reducer.comm_hook(self._ddp)
        assert hook is not None
        if comm_hooks.hangs(hook, self.group):
            return "PowerSGD waits inside gloo's own threads and hangs with more than one bucket"
        if late and not comm_hooks.stateless(hook):
            return "a communication hook with a state of its own came after the first step"
        self._call = comm_hooks.carried(hook)
        self.watch(every_gradient=False)
        if hook.call is not None:
            self._timer = TimedHook(self._call or hook.call, self.device)
        self._next = self._own
        return None

    def probe(self, profile: Profile) -> Plan | None:
        """Buckets of many sizes, where a communication hook must be timed."""
        hook = reducer.comm_hook(self._ddp)
        if hook is None or self._timer is None:
            return None
        if agree.largest([float(comm_hooks.holds_tensors(hook))], self.group, self.device)[0]:
            raise Error(
                f"the communication hook {hook.name} keeps tensors, which may belong to the buckets as they are"
            )
        profile = packing.by_kind(profile, self._kinds)
        return packing.doubling(packing.gathered(profile), dist.get_world_size(self.group))

    def network(self, max_bytes: int, budget: float) -> Network:
        hook, timer, self._timer = reducer.comm_hook(self._ddp), self._timer, None
        if timer is not None:
            assert hook is not None
            return timer.network(hook.name, self.group, self.device)
        via: dict[CollectiveName, Callable[[torch.Tensor], object]] = {}
        if hook is not None and hook.builtin == BuiltinCommHookType.FP16_COMPRESS:
            via["all_reduce"] = lambda flat: _in_half(flat, self.group)
        return measure.network(
            self.group, max_bytes=max_bytes, collectives=("all_reduce",), budget=budget, device=self.device, via=via
        )

    def watched(self, profile: Profile, network: Network, optimizer: float) -> tuple[Plan, Profile] | None:
        hook = reducer.comm_hook(self._ddp)
        if hook is not None and hook.call is not None:
            return None  # its buckets were timed in training
        return self._torchs(profile, network)

    def _torchs(self, profile: Profile, network: Network) -> tuple[Plan, Profile]:
        """torch's own buckets as a plan, and the gradients in the order in which torch packs them."""
        policy = reducer.own_policy(self._own.config)
        if reducer.capped(self._ddp):
            return planning.plan(profile, network, policy=policy), profile
        index = {name: i for i, (name, _) in enumerate(self.parameters)}
        found = reducer.own_members(self._ddp, self._own.config, [index[t.name] for t in profile.tensors])
        buckets = [[self.parameters[i][0] for i in bucket] for bucket in found]
        return packing.as_plan(buckets, packing.by_kind(profile, self._kinds), network, policy=policy)

    def contenders(self, profile: Profile, network: Network, optimizer: float, count: int) -> list[TrialPlan]:
        first, _ = self._torchs(profile, network)
        order = profile
        if not reducer.capped(self._ddp):
            order = packing.arranged(packing.by_kind(profile, self._kinds), network)
        rest = planning.candidates(order, network, count=count)
        plans = [first, *(p for p in rest if packing.members(p) != packing.members(first))][:count]
        return [
            TrialPlan(plan=p, label=f"plan {p.policy}" if i else OWN, predicted=p.prediction.iteration)
            for i, p in enumerate(plans)
        ]

    def notes(self, profile: Profile, network: Network) -> tuple[str, ...]:
        if (hook := reducer.comm_hook(self._ddp)) is not None:
            return (f"all-reduce stands for the communication hook {hook.name}",)
        with contextlib.suppress(Exception):  # a failed note must not cost the plan
            return (forward_gain(profile, network),)
        return ()

    def use(self, order: list[int], plan: Plan, *, baseline: bool = False) -> None:
        self._next = self._own if baseline else reducer.planned(self._ddp, plan)

    def changing(self) -> bool:
        return self._next is not None

    def restore(self, *, now: bool) -> None:
        # Under torch's own buckets a timed hook stays, and just calls the user's: a new reducer would begin with other
        # buckets than those that the user's hook may remember.
        self._next = self._own if reducer.current(self._ddp) != self._own else None
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        if now and self._next is not None:
            self._replace()

    def close(self) -> None:
        self._observer.close()

    def _replace(self) -> None:
        assert self._next is not None
        reducer.replace(self._ddp, self._next, call=self._timer or self._call)
        self._next = None


class ExchangeTarget:
    """A model with an attached optimiser: torch's reducer or the exchange carries its gradients, as the plan says.

    It is watched with the exchange in charge, all buckets split. Iterations end in `optimizer.step()`.
    """

    overlap: Overlap = "forward"

    def __init__(self, ddp: Any) -> None:
        self._ddp: DistributedDataParallel = ddp
        assert self._ddp.exchange is not None, "an optimiser is attached"
        self._exchange = self._ddp.exchange
        self.name, self.group, self.device = type(ddp.module).__name__, ddp.process_group, self._exchange.device
        self.parameters = [(s.name, s.parameter) for s in self._exchange.slots]
        self._policy = reducer.own_policy(ddp._bucket_config)
        self._torchs: Network | None = None
        self._last = time.perf_counter()
        # On the host's clock, as the exchange's own times are.
        self._layers = LayerWatch(ddp.module, [p for _, p in self.parameters], Clock(torch.device("cpu")))

    def begin(self, on_iteration: Callable[[ObservedIteration], None]) -> None:
        self._on_iteration = on_iteration
        self._last = time.perf_counter()

    def before_forward(self) -> None:
        """Nothing is to be done before `after_step`."""

    def after_forward(self) -> None:
        """Nothing is to be done before `after_step`."""

    def after_step(self) -> None:
        self._on_iteration(self._seen(time.perf_counter()))
        self._last = time.perf_counter()  # planning and changes of buckets are not part of the next iteration

    def _seen(self, now: float) -> ObservedIteration:
        exchange = self._exchange
        began, ended = exchange.forward_span
        used, waited = {}, 0.0
        for index, before, after in exchange.uses:
            if began <= before <= ended:
                used[index] = before - began - waited
                waited += after - before
        return ObservedIteration(
            forward=ended - began - waited,
            total=now - began,
            period=now - self._last,
            ready=tuple((i, t - ended) for i, t in exchange.stamps if t >= ended),
            used=used,
            update=exchange.updating,
            alone=self._alone(now) if exchange.watching else None,
        )

    def _alone(self, now: float) -> RankIteration:
        exchange = self._exchange
        visits, marks = self._layers.taken(0.0)
        (began, forwarded), called = exchange.forward_span, self._ddp.forward_called
        marks += [("ready", self._layers.layers[i], t) for i, t in exchange.stamps if t >= forwarded]
        return rank_iteration(
            visits,
            marks,
            previous=self._last,
            began=called,
            forwarded=forwarded,
            ended=now,
            optimizer=exchange.updating,
            waits=[
                (called, began),
                *((start, stop) for _, start, stop in exchange.uses if began <= start <= forwarded),
            ],
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
        return _distinct([*own, *plans])[:count]

    def notes(self, profile: Profile, network: Network) -> tuple[str, ...]:
        return ()

    def use(self, order: list[int], plan: Plan, *, baseline: bool = False) -> None:
        if plan.overlap == "forward":
            self._ddp.use_exchange(order, plan.buckets)
        else:
            self._ddp.use_reducer(None if baseline else reducer.planned(self._ddp, plan))

    def changing(self) -> bool:
        return False

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


def _in_half(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    """What torch's built-in 16-bit hook does."""
    half = flat.to(torch.float16)
    dist.all_reduce(half, group=group)
    flat.copy_(half)

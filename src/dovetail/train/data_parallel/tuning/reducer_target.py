"""What a tuner drives without an optimiser of dovetail's: a model under torch's reducer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail import measure, planning
from dovetail.core.errors import Error
from dovetail.core.network import CollectiveName, Network
from dovetail.core.plan import Overlap, Plan
from dovetail.core.profile import Profile
from dovetail.train import agree

from .. import comm_hooks, reducer
from ..comm_hooks import TimedHook
from ..observe import ObservedIteration, Observer
from ..reducer import ReducerBuckets
from . import packing
from .trials import TrialPlan
from .tuning_report import forward_gain

OWN = "torch's own buckets"
NEVER = -1.0
"""Ready time of a parameter that had no gradient so far."""


class ReducerTarget:
    """A DDP module whose gradients torch's reducer carries. Iterations end inside backward."""

    overlap: Overlap = "backward"

    def __init__(self, ddp: TorchDDP, own: ReducerBuckets | None = None, *, together: bool = True) -> None:
        """`own` are the buckets from before planning: by default those that it has now.

        `together`: all ranks watch the same iterations. Otherwise nothing is asked of other ranks, and parameters
        without a gradient have no ready time.
        """
        self._ddp = ddp
        module = getattr(ddp.module, "_orig_mod", ddp.module)  # a compiled module is named after what was compiled
        self.name, self.group, self.device = type(module).__name__, ddp.process_group, ddp.device
        self.parameters = reducer.reduced(ddp)
        self._kinds = dict(zip((n for n, _ in self.parameters), reducer.kinds(ddp), strict=True))
        self.own = own if own is not None else reducer.current(ddp)
        self._next: ReducerBuckets | None = None
        self._call = comm_hooks.carried(reducer.comm_hook(ddp))
        self._timer: TimedHook | None = None
        self._timing = False
        self._last_ready: dict[int, float] = {}
        self._together = together

    def begin(self, on_iteration: Callable[[ObservedIteration], None]) -> None:
        self._on_iteration = on_iteration
        self._observer = Observer(self._ddp, [p for _, p in self.parameters], self._ended)

    def _ended(self, iteration: ObservedIteration) -> None:
        if self._timer is not None and self._timing:
            self._timer.end_iteration()
        if iteration.ready and self._together:
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
            self.enforce()
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
        if comm_hooks.hangs(hook, self.group, self.device):
            return "PowerSGD waits inside gloo's own threads and hangs with more than one bucket"
        if late and not comm_hooks.stateless(hook):
            return "a communication hook with a state of its own came after the first step"
        self._call = comm_hooks.carried(hook)
        self.watch(every_gradient=False)
        if hook.call is not None:
            self._timer = TimedHook(self._call or hook.call, self.device)
        self._next = self.own
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
        policy = reducer.own_policy(self.own.config)
        if reducer.capped(self._ddp):
            return planning.plan(profile, network, policy=policy), profile
        index = {name: i for i, (name, _) in enumerate(self.parameters)}
        found = reducer.own_members(self._ddp, self.own.config, [index[t.name] for t in profile.tensors])
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
        buckets = self.own if baseline else reducer.planned(self._ddp, plan)
        # A new reducer for the buckets that are in force anyway would only cost iterations and begin its counts anew.
        in_force = buckets == reducer.current(self._ddp) and self._timer is None
        self._next = None if in_force else buckets

    def changing(self) -> bool:
        return self._next is not None

    def restore(self, *, now: bool) -> None:
        # Under torch's own buckets a timed hook stays, and just calls the user's: a new reducer would begin with other
        # buckets than those that the user's hook may remember.
        self._next = self.own if reducer.current(self._ddp) != self.own else None
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        if now:
            self.enforce()

    def enforce(self) -> None:
        if self._next is not None:
            reducer.replace(self._ddp, self._next, call=self._timer or self._call)
            self._next = None

    def close(self) -> None:
        self._observer.close()


def _in_half(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    """What torch's built-in 16-bit hook does."""
    half = flat.to(torch.float16)
    dist.all_reduce(half, group=group)
    flat.copy_(half)

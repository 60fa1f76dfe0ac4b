"""PartialBackprop: each worker backpropagates through the last part of the network only."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from dovetail.core import files
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.measure.collective_timer import backend_of
from dovetail.planning.depth import buckets
from dovetail.planning.depth.guard import Decision, Guard
from dovetail.planning.depth.straggler import Stragglers
from dovetail.train.device_streams import is_queued
from dovetail.train.integrations import keep

from . import autoplan
from .courier import Courier
from .lifecycle import BackpropState
from .planned import BackpropOptions, PlannedBackprop
from .rotation import RotatingBatches


class PartialBackprop(nn.Module):
    """Data parallelism in which worker i backpropagates through the last d_i segments of the model only.

    Before each forward pass a worker takes the parameters of its first segments out of autograd: that part of the
    network runs forward as usual, but keeps no activation and gets no backward pass. In backward each segment's
    gradient leaves as soon as the worker has it: it is averaged over the workers that computed it, weighted by their
    samples, and delivered to all, so that after `backward()` every parameter has the same `.grad` on every rank and
    replicas stay identical. Clipping, optimisers and schedulers see nothing unusual. `no_sync()` accumulates as DDP's.

    The guard is on unless switched off: training begins at full depth; every few steps the noise in each segment's
    gradient is measured, and the number of its contributors becomes the smallest that the bound allows, never below the
    plan's. `decisions` and `explain()` show what it measured and decided. `state` says where the module stands between
    forward pass and exchange (`lifecycle` has the table).

    Args:
        module: the model, the same on all ranks; the first rank's parameters and buffers are copied to the others.
        plan: segments and depths, from `dovetail plan` or `train.partial.segments.cut`. Or a policy's name: then the
            model is profiled on its first batch. "guard" starts from the ladder; "ladder" is the plain one, unguarded.
        guard: bound and rhythm of the guard; None follows the plan's depths as they stand.
        stragglers: when given, a worker that is slow for a while gets a shallower depth, and gets it back.
        rotate: "data": depths stay and the sampler of `batches()` moves the data; "depth": the depths go round.
        steps: length of the training, for a plan with phases.
        profile: with a network too, the merge planner decides which gradients travel together; without, each segment's
            travel as one.
        network: what communication costs, for the merge planner.
        merging: the merge planner's policy.
        process_group: the ranks; all by default.
        uneven_use: True for models that use some layers only for some inputs.
        timeout: seconds after which a rank that does not answer counts as lost.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: DepthPlan | str,
        *,
        guard: Guard | None = Guard(),
        stragglers: Stragglers | None = None,
        rotate: Literal["data", "depth"] = "data",
        steps: int | None = None,
        profile: Profile | None = None,
        network: Network | None = None,
        merging: str = "auto",
        process_group: dist.ProcessGroup | None = None,
        uneven_use: bool = False,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise Error("PartialBackprop: expected ranks that are connected: call init_process_group first")
        if rotate not in ("data", "depth"):
            raise Error(f"rotate: expected 'data' or 'depth', got {rotate!r}")
        parent = process_group if process_group is not None else dist.group.WORLD
        self.module, self.steps = module, steps
        self.workers, self.rank = dist.get_world_size(parent), dist.get_rank(parent)
        if isinstance(plan, DepthPlan) and plan.workers != self.workers:
            raise Error(
                f"plan for {plan.profile!r} is for {plan.workers} workers: expected {self.workers}, one for each rank"
            )
        # A group of our own: the user's collectives must not come between ours.
        ranks, most = dist.get_process_group_ranks(parent), timedelta(seconds=timeout)
        self._group = dist.new_group(ranks, timeout=most, backend=dist.get_backend_config(parent))
        device, hosts = next(module.parameters()).device, self._group
        if is_queued(device) and not backend_of(self._group, torch.device("cpu")):
            hosts = dist.new_group(ranks, timeout=most, backend="gloo")
            keep(hosts)
        keep(self._group)
        self._courier = Courier(self._group, hosts, device=device, timeout=timeout)
        weakref.finalize(self, self._courier.close)
        self._options = BackpropOptions(None if plan == "ladder" else guard, stragglers, rotate, steps, uneven_use)
        self._check_same_on_all_ranks(plan)
        self._courier.share([*(p.data for p in module.parameters()), *module.buffers()])
        self._sync = True
        self._planned: PlannedBackprop | None = None
        self._policy = ""
        if isinstance(plan, DepthPlan):
            merged = buckets.buckets(plan, profile, network, policy=merging) if profile and network else ()
            self._planned = self._under(plan, merged)
        elif profile is not None or network is not None:
            raise Error("profile, network: expected a plan made from them beside them, got a policy's name")
        else:
            self._policy = plan

    @property
    def plan(self) -> DepthPlan | None:
        """The plan; None until it is made, on the first batch, when only a policy's name was given."""
        return self._planned.plan if self._planned else None

    @property
    def state(self) -> BackpropState:
        """Where the module stands on this rank."""
        return self._planned.state if self._planned else BackpropState.AWAITING_PLAN

    @property
    def depths(self) -> tuple[int, ...]:
        """How deep each worker goes in the step that is running or comes next; empty while there is no plan."""
        return self._planned.depths if self._planned else ()

    @property
    def step(self) -> int:
        """Synchronised steps so far."""
        return self._planned.step if self._planned else 0

    @property
    def decisions(self) -> list[Decision]:
        """What the guard measured and decided, the oldest first."""
        monitor = self._planned.schedule.monitor if self._planned else None
        return list(monitor.decisions) if monitor else []

    def resume(self, step: int) -> None:
        """Counts on from a checkpoint's step, on all ranks alike. The guard begins anew, at full depth."""
        if self._planned is None or self._planned.step:
            raise Error("resume: expected before the first step, and with a plan")
        self._planned.begin_at(step)

    def batches(self, data: Sized, *, shuffle: bool = True, seed: int = 0) -> RotatingBatches:
        """Batches of this rank, by the plan: `DataLoader(data, batch_sampler=model.batches(data))`."""
        if self.plan is None:
            raise Error("batches: the plan is made on the first batch: give a plan to let it make the batches")
        return RotatingBatches(data, self.plan, rank=self.rank, steps=self.steps, shuffle=shuffle, seed=seed)

    def explain(self) -> str:
        """The depths of all workers and the guard's last decision, in a few lines."""
        if self.plan is None or self._planned is None:
            return f"partial backpropagation, {self.workers} workers: the plan ({self._policy}) follows the first batch"
        layers, segments = self.plan.layers, self.plan.segments
        cuts = ", ".join(layers[s.start] for s in segments)
        lines = [
            f"partial backpropagation, {self.workers} workers, {len(segments)} segments from {cuts}",
            f"step {self.step}: depths {' '.join(map(str, self.depths))}",
        ]
        monitor = self._planned.schedule.monitor
        if monitor is None:
            lines.append(f"guard: off; the plan's depths ({self.plan.policy}) stand")
        elif self.workers == 1:
            lines.append("guard: one rank has no noise to measure; full depth")
        elif not monitor.decisions:
            lines.append("guard: has not measured enough yet; full depth until then")
        else:
            lines.append(f"guard: {monitor.decisions[-1]}")
        return "\n".join(lines)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass. With gradients, the first one makes the plan where only a policy was given."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._planned is None:
            self._planned = self._under(
                autoplan.first_plan(self.module, args, kwargs, policy=self._policy, group=self._group)
            )
        return self._planned.forward(args, kwargs, sync=self._sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to this rank's gradients; the first one after it sends them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def __getstate__(self) -> Any:
        raise Error("PartialBackprop: holds a thread and a process group, which cannot be copied: copy its `module`")

    def _under(self, plan: DepthPlan, merged: Sequence[Sequence[str]] = ()) -> PlannedBackprop:
        bucket_of = {name: i for i, names in enumerate(merged) for name in names}
        return PlannedBackprop(self.module, plan, self._options, self._courier, bucket_of)

    def _check_same_on_all_ranks(self, plan: DepthPlan | str) -> None:
        """Ranks with different plans, options or models would wait for each other."""
        given = (files.encode(plan) if isinstance(plan, DepthPlan) else plan, self._options)
        shapes = [(n, tuple(p.shape), str(p.dtype)) for n, p in self.module.named_parameters()]
        everyone = self._courier.gather_objects((given, shapes))
        for rank, (their_options, their_shapes) in enumerate(everyone):
            if their_options != everyone[0][0]:
                raise Error(f"PartialBackprop: expected the same plan and options on all ranks, rank {rank} has others")
            if their_shapes != everyone[0][1]:
                raise Error(f"PartialBackprop: expected the same model on all ranks, rank {rank} has another")

"""PartialBackprop: each worker backpropagates through the last part of the network only."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dovetail.core import files
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.measure.passes import tensors_in
from dovetail.planning.depth import buckets
from dovetail.planning.depth.guard import Decision, Guard
from dovetail.planning.depth.straggler import Stragglers
from dovetail.train.data_parallel.observe import Backward
from dovetail.train.integrations import keep

from . import autoplan
from .courier import Bucket, Courier, Delivery, Word
from .depths import schedule
from .noise import OptimiserMetric
from .rotation import RotatingBatches
from .segments import Leaf, Segments

log = logging.getLogger("dovetail")


class PartialBackprop(nn.Module):
    """Data parallelism in which worker i backpropagates through the last d_i segments of the model only.

    Before each forward pass a worker takes the parameters of its first segments out of autograd: that part of the
    network runs forward as ever, but keeps no activation and gets no backward pass. In backward each segment's gradient
    leaves as soon as the worker has it: it is averaged over the workers that computed it, weighted by their samples,
    and delivered to all, so that after `backward()` every parameter has the same `.grad` on every rank and replicas
    stay identical. Clipping, optimisers and schedulers see nothing unusual. `no_sync()` accumulates as DDP's does.

    The guard is on unless switched off: training begins at full depth; every few steps the noise in each segment's
    gradient is measured, and the number of its contributors becomes the smallest that the bound allows, never below the
    plan's. `decisions` and `explain()` tell what it saw.

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
        self.module, self.steps = module, steps
        self.plan: DepthPlan | None = plan if isinstance(plan, DepthPlan) else None
        self._policy = "" if isinstance(plan, DepthPlan) else plan
        parent = process_group if process_group is not None else dist.group.WORLD
        self.workers, self.rank = dist.get_world_size(parent), dist.get_rank(parent)
        if isinstance(plan, DepthPlan) and plan.workers != self.workers:
            raise Error(
                f"plan for {plan.profile!r} is for {plan.workers} workers: expected {self.workers}, one for each rank"
            )
        self._guard = None if plan == "ladder" else guard
        self._stragglers, self._rotate, self._uneven_use = stragglers, rotate, uneven_use
        # A group of our own: what the user does in between must not come between our collectives.
        self._group = dist.new_group(dist.get_process_group_ranks(parent), timeout=timedelta(seconds=timeout))
        keep(self._group)
        self._courier = Courier(self._group, device=next(module.parameters()).device, timeout=timeout)
        weakref.finalize(self, self._courier.close)
        told = files.encode(plan) if isinstance(plan, DepthPlan) else plan
        self._agree((told, guard, stragglers, rotate, steps, uneven_use))
        self._courier.share([*(p.data for p in module.parameters()), *module.buffers()])
        self._sync = True
        self._now: tuple[int, ...] = ()
        self._step = 0
        if isinstance(plan, DepthPlan):
            chosen = buckets.buckets(plan, profile, network, policy=merging) if profile and network else ()
            self._settle(plan, chosen)
        elif profile is not None or network is not None:
            raise Error("profile, network: expected a plan made from them beside them, got a policy's name")

    def _settle(self, plan: DepthPlan, buckets: Sequence[Sequence[str]] = ()) -> None:
        """Everything that needs the plan. All ranks come here with the same one."""
        self.plan = plan
        self._segments = Segments(self.module, plan)
        self._depths = schedule(
            plan,
            guard=self._guard,
            stragglers=self._stragglers,
            rotate=self._rotate == "depth",
            steps=self.steps,
            speak=self.rank == 0,
        )
        self._wish = {name: i for i, names in enumerate(buckets) for name in names}
        self._index = {leaf: i for i, leaf in enumerate(self._segments.leaves)}
        self._bucket_leaves(self._segments.leaves)
        self._metric = OptimiserMetric([leaf.parameter for leaf in self._segments.leaves])
        self._checked: set[tuple[int, ...]] = set()
        self._moving: list[torch.Tensor] | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._backward = Backward(self._outer_ended)
        self._armed = self._under_way = self._counted = self._reached = self._opaque = False
        self._trouble = ""
        self._delivery: Delivery | None = None
        self._seen: set[Leaf] = set()
        self._samples, self._spent, self._last_spent, self._mark = 0, 0.0, 0.0, 0.0
        self._passed = 0, 0.0
        self._now = self._previous = self._depths.at(0)
        self._listen()

    @property
    def depths(self) -> tuple[int, ...]:
        """How deep each worker goes in the step that is running or comes next."""
        return self._now

    @property
    def step(self) -> int:
        """Synchronised steps so far."""
        return self._step

    @property
    def decisions(self) -> list[Decision]:
        """What the guard saw and decided, the oldest first."""
        watch = self._depths.watch if self.plan else None
        return list(watch.decisions) if watch else []

    def resume(self, step: int) -> None:
        """Counts on from a checkpoint's step, on all ranks alike. The guard begins anew, at full depth."""
        if self.plan is None or self._step:
            raise Error("resume: expected before the first step, and with a plan")
        self._step = step
        self._now = self._previous = self._depths.at(step)

    def batches(self, data: Sized, *, shuffle: bool = True, seed: int = 0) -> RotatingBatches:
        """Batches of this rank, by the plan: `DataLoader(data, batch_sampler=model.batches(data))`."""
        if self.plan is None:
            raise Error("batches: the plan is made on the first batch: give a plan to let it make the batches")
        return RotatingBatches(data, self.plan, rank=self.rank, steps=self.steps, shuffle=shuffle, seed=seed)

    def explain(self) -> str:
        """Where the workers stand and what the guard decided last, in a few lines."""
        if self.plan is None:
            return f"partial backpropagation, {self.workers} workers: the plan ({self._policy}) follows the first batch"
        layers, segments = self.plan.layers, self.plan.segments
        cuts = ", ".join(layers[s.start] for s in segments)
        lines = [
            f"partial backpropagation, {self.workers} workers, {len(segments)} segments from {cuts}",
            f"step {self._step}: depths {' '.join(map(str, self._now))}",
        ]
        watch = self._depths.watch
        if watch is None:
            lines.append(f"guard: off; the plan's depths ({self.plan.policy}) stand")
        elif self.workers == 1:
            lines.append("guard: one rank has no noise to measure; full depth")
        elif not watch.decisions:
            lines.append("guard: has not measured enough yet; full depth until then")
        else:
            lines.append(f"guard: {watch.decisions[-1]}")
        return "\n".join(lines)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self.plan is None:
            self._settle(autoplan.first_plan(self.module, args, kwargs, policy=self._policy, group=self._group))
        if self._delivery is not None:
            self._courier.abandon(self._delivery)
            raise Error(f"step {self._step}: its backward pass did not end: training cannot go on from here")
        depth = self._now[self.rank]
        if self._moving is None and not self._before:
            self._before = {n: b.clone() for n, b in self.module.named_buffers() if b.is_floating_point()}
        self._backward.forget()
        if self._segments.thrown_away():
            self._seen.clear()
            self._samples, self._spent = 0, 0.0
        start = time.perf_counter()
        self._segments.freeze(depth)
        try:
            with self._segments.aliases():
                output = self.module(*args, **kwargs)
        except BaseException as e:
            self._segments.thaw()
            self._courier.tell_failure(self._step, wait=isinstance(e, Exception))
            if depth == self._segments.count or isinstance(e, Error) or not isinstance(e, Exception):
                raise
            why = next(iter(str(e).strip().splitlines()), "no reason given")
            raise Error(f"{self._place()}: {type(e).__name__}: {why}") from e
        self._opaque = not self._backward.expect(output)
        self._armed, self._under_way, self._counted, self._reached = self._sync, True, False, False
        self._mark = time.perf_counter()
        self._passed = _samples(args, kwargs), self._mark - start
        return output

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

    def _place(self) -> str:
        assert self.plan is not None
        depth, count = self._now[self.rank], self._segments.count
        first = self.plan.layers[self.plan.segments[count - depth].start]
        return f"rank {self.rank} at depth {depth} of {count}: the model does not bear a cut before layer {first!r}"

    def _agree(self, options: tuple[Any, ...]) -> None:
        """Ranks that were told different things would wait for each other."""
        shapes = [(n, tuple(p.shape), str(p.dtype)) for n, p in self.module.named_parameters()]
        said: list[Any] = [None] * self.workers
        dist.all_gather_object(said, (options, shapes), group=self._group)
        for rank, (their_options, their_shapes) in enumerate(said):
            if their_options != said[0][0]:
                raise Error(f"PartialBackprop: expected the same plan and options on all ranks, rank {rank} has others")
            if their_shapes != said[0][1]:
                raise Error(f"PartialBackprop: expected the same model on all ranks, rank {rank} has another")

    def _bucket_leaves(self, leaves: Sequence[Leaf]) -> None:
        """One bucket for each segment and dtype, or the merge planner's; the last segments first."""
        groups: dict[tuple[Any, ...], list[Leaf]] = {}
        ordered = sorted(leaves, key=lambda leaf: (-leaf.segment, self._wish.get(leaf.name, -1), -self._index[leaf]))
        for leaf in ordered:
            wish = -1 if leaf.alias else self._wish.get(leaf.name, -1)
            groups.setdefault((-leaf.segment, wish, str(leaf.parameter.dtype)), []).append(leaf)
        self._buckets = [Bucket.of(groups[key]) for key in groups]
        self._bucket_of = {leaf: b for b, bucket in enumerate(self._buckets) for leaf in bucket.leaves}

    def _listen(self) -> None:
        """Hooks hold us weakly: a module that the user drops goes."""
        us = weakref.ref(self)

        def gradient(index: int) -> Callable[[torch.Tensor], None]:
            def ready(_: torch.Tensor) -> None:
                if (me := us()) is not None:
                    me._on_gradient(me._segments.leaves[index])

            return ready

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (me := us()) is not None:
                me._metric.seen(optimizer)

        for leaf, index in self._index.items():
            leaf.tensor.register_post_accumulate_grad_hook(gradient(index))
        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def _on_gradient(self, leaf: Leaf) -> None:
        if not self._under_way:  # a backward pass that is not ours, through `module` itself
            if self._opaque:  # or the rest of one that ended too early for us
                self._trouble = self._trouble or leaf.gradient_inside()
                self._end_in_trouble(self._step)
            return
        if self._backward.inside():
            self._trouble = self._trouble or leaf.gradient_inside()
        self._reached = True
        if not self._counted:
            self._counted = True
            # Only now: a forward pass that nobody goes back through does not count.
            self._samples += self._passed[0]
            self._spent += self._passed[1]
            if self._armed:
                self._begin()
        self._seen.add(leaf)
        bucket = self._bucket_of.get(leaf)
        if bucket is None:
            self._trouble = self._trouble or (
                f"parameter {leaf.name!r} got its first gradient, after it had none in the first step on any rank: "
                "pass uneven_use=True"
            )
        elif self._delivery is not None:
            self._missing[bucket].discard(leaf)
            if not self._missing[bucket]:
                self._delivery.ready[bucket].set()

    def _outer_ended(self) -> None:
        if self._reached:  # or else somebody asked for gradients of something else
            self._reached = False
            self._end_of_backward()

    def _begin(self) -> None:
        """The first gradient of a synchronised backward pass: every rank comes here, at every such pass."""
        watch = self._depths.watch
        leaves = [leaf for bucket in self._buckets for leaf in bucket.leaves]
        measured = watch is not None and watch.due(self._step)
        known = measured and self._metric.known(leaves)
        word = Word(self._step, float(self._samples), self._last_spent, known, self._metric.learning_rate)
        self._missing = [set(bucket.leaves) for bucket in self._buckets]
        self._delivery = Delivery(word, self._now, self._segments.count, self._buckets, self._seen)
        self._delivery.metric = self._metric if measured else None
        self._delivery.buffers = self._moving or []
        self._courier.begin(self._delivery)

    def _end_of_backward(self) -> None:
        self._spent += time.perf_counter() - self._mark
        self._mark = time.perf_counter()
        delivery = self._delivery
        if delivery is not None:
            self._courier.finish(delivery)
            self._delivery, self._armed, self._under_way = None, False, False
            if self._now not in self._checked:
                self._check_use()
            elif self._trouble:
                self._end_in_trouble(self._step + 1)
            self._segments.join_aliases()
            self._look_back(delivery)
        else:
            self._segments.hold(self._seen)
        self._segments.thaw()

    def _end_in_trouble(self, next_step: int) -> None:
        """Other ranks may know nothing of it. They have got all gradients of this step: they hear of it at the next."""
        self._courier.tell_failure(next_step)
        raise Error(f"step {self._step}: {self._trouble}")

    def _look_back(self, delivery: Delivery) -> None:
        """What the step says about the next ones. All ranks have heard the same."""
        watch, pace = self._depths.watch, self._depths.pace
        if watch is not None:
            watch.follow(delivery.words[0].rate)
        if watch is not None and delivery.metric is not None:
            watch.take(delivery, self._depths.order(self._step), self._depths.least(self._step))
        if pace is not None and self._step:
            for line in pace.update([word.seconds for word in delivery.words], self._previous):
                if self.rank == 0:
                    log.info("step %d: %s", self._step, line)
        self._previous = self._now
        self._step += 1
        self._now = self._depths.at(self._step)
        self._seen = set()
        self._last_spent = self._spent / max(self._samples, 1)  # workers may have different batches
        self._samples, self._spent = 0, 0.0

    def _check_use(self) -> None:
        """Once for every assignment of depths: did each contributor get the gradients that it should have?"""
        moving = [
            n for n, b in self.module.named_buffers() if n in self._before and not torch.equal(b, self._before[n])
        ]
        said: list[Any] = [None] * self.workers
        mine = [self._index[leaf] for leaf in self._seen]
        dist.all_gather_object(said, (mine, moving, self._trouble), group=self._group)
        if line := next((theirs for *_, theirs in said if theirs), ""):
            raise Error(f"step {self._step}: {line}")
        seen = [set(theirs) for theirs, *_ in said]
        if not self._uneven_use and (line := self._segments.uneven(seen, self._now)):
            raise Error(line)
        if self._moving is None:
            names = {name for _, theirs, _ in said for name in theirs}
            self._moving = [b for n, b in self.module.named_buffers() if n in names]
            self._before = {}
            self._courier.share(self._moving)
            if not self._uneven_use:
                self._leave_out(set.union(*seen))
        self._checked.add(self._now)

    def _leave_out(self, used: set[int]) -> None:
        """Parameters that nobody uses need not travel."""
        if len(used) < len(self._index):
            self._bucket_leaves([leaf for leaf, index in self._index.items() if index in used])


def _samples(args: Any, kwargs: Any) -> int:
    """The first dimension of the first tensor."""
    return next((len(t) for t in tensors_in((args, kwargs)) if t.dim()), 1)

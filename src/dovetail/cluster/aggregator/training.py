"""A job's training state, and one step of it: parameters, buffers, optimiser, scheduler, guard. No sockets, no files.

All that the next step depends on is in `state()`: a training restored from it goes on with the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from dovetail.cluster.job.arena import Arena
from dovetail.cluster.job.division import Division
from dovetail.cluster.job.objects import (
    AGGREGATOR,
    JobError,
    Samples,
    Schedule,
    blaming,
    make_model,
    make_optimizer,
    mixed,
    seed_everything,
    use_defaults,
)
from dovetail.cluster.job.spec import TrainingJob
from dovetail.cluster.transport.messages import Described, Done
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.files import decode
from dovetail.train.partial.depths import Depths, schedule
from dovetail.train.partial.noise import OptimiserMetric

from . import checkpoint
from .averaging import Means
from .cuts import divide

log = logging.getLogger("dovetail")
FORMAT = 1


class NotFinite(Error):
    """A loss that is not a number: another try would end the same way."""


class Training:
    """Owned by one process, the aggregator; the tasks' gradients come through the arena."""

    def __init__(self, job: TrainingJob, memory: str, state: dict[str, Any] | None = None) -> None:
        """Makes everything new, in an arena of that name, or as a checkpoint's `state` has it."""
        use_defaults(job)
        self.job = job
        self.model = make_model(job)
        samples = Samples(job)
        division = _remembered(job, state) or divide(job, self.model, samples)
        self.division, self.iteration = division, 0
        self._depths = _depths(job, division)
        optimizer = make_optimizer(job, self.model)
        self.arena = Arena.create(memory, self.model, job.workers, division=division)
        try:
            self.arena.publish()
            self.arena.bind(self.model)
            _bind_buffers(self.model, self.arena)
            self._optimizer, self._schedule = optimizer, Schedule(job, optimizer)
            self._means = Means(self.arena)
            self._metric = OptimiserMetric([leaf.parameter for leaf in self.arena.leaves])
            if state is not None:
                self._restore(state)
        except BaseException:
            self.arena.unlink()
            raise

    def depths(self) -> tuple[int, ...]:
        """Of each worker in the iteration that comes next."""
        return self._depths.at(self.iteration) if self._depths else (1,) * self.job.workers

    def step(self, done: dict[int, Done], depths: Sequence[int]) -> float:
        """All workers' gradients are in the arena: averages them, steps, and gives the iteration's loss."""
        ordered = [done[worker] for worker in range(self.job.workers)]
        for one in ordered:
            if not math.isfinite(one.loss):
                raise NotFinite(f"iteration {self.iteration}: the loss of worker {one.worker} is {one.loss}")
        samples = [one.samples for one in ordered]
        self._means.average(samples, depths)
        if self._depths is not None and self._depths.watch is not None:
            self._watch(samples, depths)
        self._means.give()
        with torch.no_grad():
            for dtype, flat in self.arena.buffers.items():
                flat.copy_(self.arena.next_buffers[dtype])
        loss = sum(one.loss for one in ordered) / sum(samples)
        seed_everything(mixed(self.job.seed, 2, self.iteration, AGGREGATOR))
        with blaming(f"iteration {self.iteration}: optimizer"):
            self._optimizer.step()
        with blaming(f"iteration {self.iteration}: scheduler"):
            self._schedule.step(loss)
        self.iteration += 1
        return loss

    def _watch(self, samples: list[int], depths: Sequence[int]) -> None:
        assert self._depths is not None and self._depths.watch is not None
        watch = self._depths.watch
        rate = max((float(group.get("lr", 0.0)) for group in self._optimizer.param_groups), default=0.0)
        watch.follow(rate)
        if watch.due(self.iteration):
            self._metric.seen(self._optimizer)
            step = self.iteration
            delivery = self._means.measured(self._metric, samples, depths, step=step, rate=rate)
            watch.take(delivery, self._depths.order(step), self._depths.least(step))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, with tensors of its own."""
        persistent = self.model.state_dict()
        others = {name: buffer for name, buffer in self.model.named_buffers() if name not in persistent}
        watch = self._depths.watch if self._depths else None
        return {
            "format": FORMAT,
            "iteration": self.iteration,
            "model": checkpoint.copied(dict(persistent)),
            "buffers": checkpoint.copied(others),
            "optimizer": checkpoint.copied(self._optimizer.state_dict()),
            "scheduler": checkpoint.copied(self._schedule.state()),
            "guard": None if watch is None else watch.state(),
            "division": msgspec.json.encode(self.division).decode(),
            "divided": _divided(self.job),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
        with blaming(f"checkpoint of iteration {self.iteration}"):
            self.model.load_state_dict(state["model"])
            buffers = dict(self.model.named_buffers())
            with torch.no_grad():
                for name, value in state.get("buffers", {}).items():
                    buffers[name].copy_(value)
            self._optimizer.load_state_dict(state["optimizer"])
            self._schedule.restore(state.get("scheduler"))
            if self._depths is not None and self._depths.watch is not None and state.get("guard"):
                self._depths.watch.restore(state["guard"])

    def described(self, epoch: int, job: str) -> Described:
        """What the coordinator plans with."""
        division, layout = self.division, self.arena.layout
        shares = tuple(division.shares[d] for d in self.depths()) if division.plan else ()
        weights = layout.parameters.bytes + layout.buffers.bytes
        if self.job.profile is not None:
            weights = max(weights, self.job.profile.parameter_bytes)
        count = max(1, len(division.forward))
        return Described(
            job=job,
            epoch=epoch,
            workers=self.job.workers,
            iterations=self.job.steps,
            forward=sum(division.forward) / count,
            backward=sum(division.backward) / count,
            off_device=self.job.off_device,
            depths=shares,
            persistent_bytes=weights,
            ephemeral_bytes=weights + division.activations,
        )


def _bind_buffers(model: nn.Module, arena: Arena) -> None:
    """The model's buffers are the arena's, so that checkpoints have the job's."""
    views = arena.layout.buffers.views(arena.buffers)
    place = {id(buffer): view for buffer, view in zip(list(model.buffers()), views, strict=True)}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = place[id(buffer)]


def _depths(job: TrainingJob, division: Division) -> Depths | None:
    if not division.plan:
        return None
    plan = decode(division.plan, DepthPlan)
    guard = job.guard if job.spb == "guard" else None
    return schedule(plan, guard=guard, stragglers=None, rotate=False, steps=job.steps, speak=True)


def _divided(job: TrainingJob) -> str:
    """What a division depends on besides the model: one made for something else is not used again."""
    return repr((job.workers, job.batch, job.spb, job.task_seconds, job.profile.name if job.profile else ""))


def _remembered(job: TrainingJob, state: dict[str, Any] | None) -> Division | None:
    if state is None or state.get("divided") != _divided(job):
        return None
    try:
        return msgspec.json.decode(state["division"], type=Division)
    except (KeyError, msgspec.MsgspecError) as e:
        raise JobError(f"checkpoint of iteration {state['iteration']}: its division cannot be read: {e}") from None

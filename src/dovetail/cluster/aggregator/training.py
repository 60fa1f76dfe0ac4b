"""A job's training state (parameters, buffers, optimiser, scheduler, guard) and its update. No sockets, no files.

Everything that the next iteration depends on is in `state()`: a training restored from it continues with the same bits.
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
    LearningRateSchedule,
    Samples,
    job_errors,
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
from dovetail.train.partial.depths import DepthSchedule, schedule
from dovetail.train.partial.noise_monitor import OptimiserMetric

from . import checkpoint
from .averaging import GradientAverager
from .cuts import divide

log = logging.getLogger("dovetail")
FORMAT = 1
"""Version of the checkpoint's format."""


class NotFinite(Error):
    """A loss that is not a finite number: a retry would end the same way."""


class Training:
    """The aggregator owns it; the tasks' gradients come through the arena."""

    def __init__(self, job: TrainingJob, memory: str, state: dict[str, Any] | None = None) -> None:
        """Makes everything in a new arena named `memory`, and restores `state`, a checkpoint's, if there is one."""
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
            self._optimizer, self._scheduler = optimizer, LearningRateSchedule(job, optimizer)
            self._averager = GradientAverager(self.arena)
            self._metric = OptimiserMetric([leaf.parameter for leaf in self.arena.leaves])
            if state is not None:
                self._restore(state)
        except BaseException:
            self.arena.unlink()
            raise

    def depths(self) -> tuple[int, ...]:
        """Depth of each worker in the next iteration, in segments."""
        return self._depths.at(self.iteration) if self._depths else (1,) * self.job.workers

    def update(self, done: dict[int, Done], depths: Sequence[int]) -> float:
        """Ends an iteration whose gradients are in the arena: averages them, runs the optimiser, returns the loss."""
        ordered = [done[worker] for worker in range(self.job.workers)]
        for one in ordered:
            if not math.isfinite(one.loss):
                raise NotFinite(f"iteration {self.iteration}: the loss of worker {one.worker} is {one.loss}")
        samples = [one.samples for one in ordered]
        self._averager.average(samples, depths)
        if self._depths is not None and self._depths.monitor is not None:
            self._watch(samples, depths)
        self._averager.set_gradients()
        with torch.no_grad():
            for dtype, flat in self.arena.buffers.items():
                flat.copy_(self.arena.next_buffers[dtype])
        loss = sum(one.loss for one in ordered) / sum(samples)
        seed_everything(mixed(self.job.seed, 2, self.iteration, AGGREGATOR))
        with job_errors(f"iteration {self.iteration}: optimizer"):
            self._optimizer.step()
        with job_errors(f"iteration {self.iteration}: scheduler"):
            self._scheduler.step(loss)
        self.iteration += 1
        return loss

    def _watch(self, samples: list[int], depths: Sequence[int]) -> None:
        assert self._depths is not None and self._depths.monitor is not None
        watch = self._depths.monitor
        rate = max((float(group.get("lr", 0.0)) for group in self._optimizer.param_groups), default=0.0)
        watch.follow(rate)
        if watch.due(self.iteration):
            self._metric.seen(self._optimizer)
            step = self.iteration
            measured = self._averager.measured(self._metric, samples, depths, step=step)
            watch.take(measured, self._depths.order(step), self._depths.least(step))

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, with its own tensors."""
        persistent = self.model.state_dict()
        others = {name: buffer for name, buffer in self.model.named_buffers() if name not in persistent}
        watch = self._depths.monitor if self._depths else None
        return {
            "format": FORMAT,
            "iteration": self.iteration,
            "model": checkpoint.copied(dict(persistent)),
            "buffers": checkpoint.copied(others),
            "optimizer": checkpoint.copied(self._optimizer.state_dict()),
            "scheduler": checkpoint.copied(self._scheduler.state()),
            "guard": None if watch is None else watch.state(),
            "division": msgspec.json.encode(self.division).decode(),
            "divided": _divided(self.job),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
        with job_errors(f"checkpoint of iteration {self.iteration}"):
            self.model.load_state_dict(state["model"])
            buffers = dict(self.model.named_buffers())
            with torch.no_grad():
                for name, value in state.get("buffers", {}).items():
                    buffers[name].copy_(value)
            self._optimizer.load_state_dict(state["optimizer"])
            self._scheduler.restore(state.get("scheduler"))
            if self._depths is not None and self._depths.monitor is not None and state.get("guard"):
                self._depths.monitor.restore(state["guard"])

    def described(self, attempt: int, job: str) -> Described:
        """The message with what the coordinator needs for placement."""
        division, layout = self.division, self.arena.layout
        shares = tuple(division.shares[d] for d in self.depths()) if division.plan else ()
        weights = layout.parameters.bytes + layout.buffers.bytes
        if self.job.profile is not None:
            weights = max(weights, self.job.profile.parameter_bytes)
        count = max(1, len(division.forward))
        return Described(
            job=job,
            attempt=attempt,
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
    """Makes the model's buffers views of the arena, so that checkpoints contain the job's buffers."""
    views = arena.layout.buffers.views(arena.buffers)
    place = {id(buffer): view for buffer, view in zip(list(model.buffers()), views, strict=True)}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = place[id(buffer)]


def _depths(job: TrainingJob, division: Division) -> DepthSchedule | None:
    if not division.plan:
        return None
    plan = decode(division.plan, DepthPlan)
    guard = job.guard if job.spb == "guard" else None
    return schedule(plan, guard=guard, stragglers=None, rotate=False, steps=job.steps, speak=True)


def _divided(job: TrainingJob) -> str:
    """What a division depends on besides the model: a stored one is used again only if this is equal."""
    return repr((job.workers, job.batch, job.spb, job.task_seconds, job.profile.name if job.profile else ""))


def _remembered(job: TrainingJob, state: dict[str, Any] | None) -> Division | None:
    if state is None or state.get("divided") != _divided(job):
        return None
    try:
        return msgspec.json.decode(state["division"], type=Division)
    except (KeyError, msgspec.MsgspecError) as e:
        raise JobError(f"checkpoint of iteration {state['iteration']}: its division cannot be read: {e}") from None

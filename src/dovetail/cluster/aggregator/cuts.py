"""Divides a job: how many samples each worker takes and, for partial depth, where the model is cut.

Segments have equal backward times by the job's own profile, if its layers are the model's, and otherwise by counted
operations. Before the first iteration the model is tried at every depth on one worker's samples: a model that cannot be
cut is refused then, instead of giving wrong gradients later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from dovetail.cluster.job.division import Division, even
from dovetail.cluster.job.objects import JobError, Samples, job_errors, mixed, seed_everything
from dovetail.cluster.job.spec import TrainingJob
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.files import encode
from dovetail.core.profile import Profile
from dovetail.measure.passes import untouched
from dovetail.planning.depth import planner as depths
from dovetail.planning.depth.cost import DepthCosts, WorkerDevice
from dovetail.planning.depth.shares import balance
from dovetail.train.partial.segments import Segments

from .flops import counted

Law = Callable[[float], tuple[float, float]]
"""Maps samples, as a multiple of an even share, to the seconds of a forward and of a whole backward pass."""


def divide(job: TrainingJob, model: nn.Module, samples: Samples) -> Division:
    """The job's division. For partial depth it runs the job's code on one worker's samples; the model is unchanged."""
    batches = even(job.batch, job.workers)
    law = _law(job)
    activations = 0
    if job.profile is not None:
        activations = job.profile.batch * sum(layer.activation_bytes for layer in job.profile.layers)
    if job.spb == "off" or job.workers == 1:
        return _timed(Division(batches=batches, activations=activations), law)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise JobError(f"spb: {name or type(model).__name__}: compiled modules run no hooks and cannot be cut")
    run = _trial(job, model, samples, batches[0])
    with untouched(model, torch.device("cpu")), job_errors("the first samples"):
        profile = counted(model, run, batches[0])
    fits = job.profile is not None and _fits(job.profile, model)
    plan, shares = _plan(job, job.profile if fits and job.profile is not None else profile, fits=fits)
    with untouched(model, torch.device("cpu")):
        _try_every_depth(model, plan, run)
    if job.spb == "balanced":
        batches = _balanced(job, plan, shares, law or _counted_law(profile))
        plan = msgspec.structs.replace(
            plan,
            policy=job.spb,
            phases=tuple(msgspec.structs.replace(phase, batches=batches) for phase in plan.phases),
        )
    activations = activations or profile.batch * sum(layer.activation_bytes for layer in profile.layers)
    return _timed(Division(batches=batches, plan=encode(plan), shares=shares, activations=activations), law)


def _law(job: TrainingJob) -> Law | None:
    if job.task_seconds is not None:
        forward, backward = job.task_seconds
        return lambda share: (forward * share, backward * share)
    if job.profile is None:
        return None
    profile = job.profile

    def seconds(share: float) -> tuple[float, float]:
        batch = share * profile.batch
        low = max(1, math.floor(batch))
        part = batch - low

        def between(at: Callable[[int], float]) -> float:
            return max(0.0, at(low) + part * (at(low + 1) - at(low)))

        return between(profile.forward_time), between(profile.backward_time)

    return seconds


def _counted_law(profile: Profile) -> Law:
    forward, backward = profile.forward_time(), profile.backward_time()
    return lambda share: (forward * share, backward * share)


def _timed(division: Division, law: Law | None) -> Division:
    if law is None:
        return division
    share = sum(division.batches) / len(division.batches)
    times = [law(b / share) for b in division.batches]
    return msgspec.structs.replace(division, forward=tuple(f for f, _ in times), backward=tuple(b for _, b in times))


def _trial(job: TrainingJob, model: nn.Module, samples: Samples, count: int) -> Callable[[], torch.Tensor]:
    with job_errors("the first samples"):
        batch: Any = samples.batch(0, 0, count)

    def run() -> torch.Tensor:
        seed_everything(mixed(job.seed, 0, 3))
        return job.loss(model, batch)

    return run


def _fits(profile: Profile, model: nn.Module) -> bool:
    """Whether the profile's layers are this model's, so that its cuts are."""
    modules = dict(model.named_modules())
    modules.setdefault(type(model).__name__, model)
    held = {id(p) for layer in profile.layers if layer.name in modules for p in modules[layer.name].parameters(False)}
    return all(layer.name in modules for layer in profile.layers) and all(
        id(p) in held for p in model.parameters() if p.requires_grad
    )


def _plan(job: TrainingJob, profile: Profile, *, fits: bool) -> tuple[DepthPlan, tuple[float, ...]]:
    """The ladder's plan, which is also the guard's least depth, and the share of backward that each depth takes."""
    owners = len({t.layer for t in profile.tensors})
    if owners < 2:
        raise JobError(
            f"spb: expected a model of at least two layers that own parameters and run one after another, got {owners}"
        )
    try:
        plan = depths.plan(profile, workers=job.workers, policy="ladder")
    except Error as e:
        raise JobError(f"spb: {e}") from None
    count = len(plan.segments)
    costs = DepthCosts(profile, plan.segments, (WorkerDevice(),), 0)
    whole = costs.backward(0, count, profile.batch)
    if not fits or whole <= 0:  # segments of equal counted time: an emulated device takes exactly that
        return plan, tuple(d / count for d in range(count + 1))
    return plan, tuple(costs.backward(0, d, profile.batch) / whole for d in range(count + 1))


def _balanced(job: TrainingJob, plan: DepthPlan, shares: tuple[float, ...], law: Law) -> tuple[int, ...]:
    share, deep = job.batch / job.workers, plan.phases[0].depths

    def seconds(worker: int, batch: int) -> float:
        forward, backward = law(batch / share)
        return forward + backward * shares[deep[worker]]

    return balance(seconds, job.batch, caps=[None] * job.workers)


def _try_every_depth(model: nn.Module, plan: DepthPlan, run: Callable[[], torch.Tensor]) -> None:
    try:
        segments = Segments(model, plan)
    except Error as e:
        raise JobError(f"spb: {e}") from None
    with job_errors("the first samples"):
        full = _leaves_with_gradients(segments, segments.count, run)
    for deep in range(1, segments.count):
        first = plan.layers[plan.segments[segments.count - deep].start]
        with job_errors(f"spb: the model cannot be cut before layer {first!r}"):
            some = _leaves_with_gradients(segments, deep, run)
        wanted = {leaf.name for leaf in segments.contributed(deep)} & full
        if lost := sorted(wanted - some):
            raise JobError(
                f"spb: parameter {lost[0]!r} gets no gradient with a cut before layer {first!r}, but gets one without: "
                "the cut breaks this model (reentrant checkpointing does so)"
            )


def _leaves_with_gradients(segments: Segments, deep: int, run: Callable[[], torch.Tensor]) -> set[str]:
    for leaf in segments.leaves:
        leaf.tensor.grad = None
    segments.freeze(deep)
    try:
        with segments.aliases():
            run().backward()
    finally:
        segments.thaw()
    return {leaf.name for leaf in segments.contributed(deep) if leaf.tensor.grad is not None}

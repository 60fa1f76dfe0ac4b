"""How depths change while training runs, and what is sent when: run on every rank, as depth_scenarios."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.planning.depth.guard import Guard, moments
from dovetail.planning.depth.straggler import Stragglers
from dovetail.train.partial.module import PartialBackprop
from dovetail.train.partial.segments import cut

from .depth_models import build, cuts, inputs, loss
from .depth_scenarios import HANGS, difference, identical, oracle, partial, plan_of, wrapped_module


def guarded(steps: int, epsilon: float, *, optimizer: str = "Adam", annealed: bool = False) -> dict[str, Any]:
    """Trains under the guard; the noise it reports is compared with that of all workers' gradients in one process."""
    k, rank = dist.get_world_size(), dist.get_rank()
    guard = Guard(epsilon=epsilon, every=4, patience=2, smoothing=1.0, annealed=annealed)
    ours = partial("transformer", list(range(1, k + 1)), guard=guard)
    learner = getattr(torch.optim, optimizer)(ours.parameters(), lr=0.01)
    depths, same, worst = [], True, 0.0
    for step in range(steps):
        depths.append(list(ours.depths))
        data = [inputs("transformer", 4, 100 * step + w) for w in range(k)]
        learner.zero_grad()
        if step % 4 == 3 and step > 4:
            mine = _noise(ours, learner, data)
        loss(ours(data[rank])).backward()
        if step % 4 == 3 and step > 4:
            reported = [n * 4 * k for n in ours.decisions[-1].noise]
            worst = max(worst, *(abs(a - b) / b if b != a else 0.0 for a, b in zip(reported, mine, strict=True)))
        learner.step()
        if annealed:
            learner.param_groups[0]["lr"] *= 0.7
        same &= identical(ours.module)
    return {
        "depths": depths,
        "same": same,
        "worst": worst,
        "counts": [d.counts for d in ours.decisions],
        "lines": [str(d) for d in ours.decisions],
        "explained": ours.explain(),
    }


def _noise(ours: PartialBackprop, learner: Any, data: list[torch.Tensor]) -> list[float]:
    """B_noise per segment from first principles."""
    gradients = []
    for batch in data:
        one = copy.deepcopy(ours.module)
        one.zero_grad()
        loss(one(batch)).backward()
        gradients.append([p.grad for p in one.parameters() if p.grad is not None])
    plan = plan_of(ours)
    home = {n: s for s, seg in enumerate(plan.segments) for n in plan.layers[seg.start : seg.stop]}
    result = []
    for segment in range(len(plan.segments)):
        squares, mean_square = [0.0] * len(data), 0.0
        for i, (name, parameter) in enumerate(ours.module.named_parameters()):
            if home[name.rpartition(".")[0]] != segment:
                continue
            v = learner.state[parameter].get("exp_avg_sq")
            scale = torch.ones_like(parameter) if v is None else torch.where(v > 0, v.sqrt().reciprocal(), 0.0)
            each = [g[i] for g in gradients]
            mean_square += float((torch.stack(each).mean(0).square() * scale).sum())
            squares = [s + float((g.square() * scale).sum()) for s, g in zip(squares, each, strict=True)]
        result.append(moments(squares, [len(d) for d in data], mean_square).noise_scale)
    return result


def slow_for_a_while() -> dict[str, Any]:
    """The deepest worker says for some steps that it took three times as long; what follows from that is real."""
    k, rank = dist.get_world_size(), dist.get_rank()
    ours = partial("skips", list(range(1, k + 1)), stragglers=Stragglers(slow=1.5, patience=3))
    depths, same = [], True
    for step in range(16):
        depths.append(list(ours.depths))
        loss(ours(inputs("skips", 3, 10 * step + rank))).backward()
        planned = ours._planned
        assert planned is not None
        fraction = 1 + 2 * depths[-1][rank] / len(planned.plan.segments)
        planned._seconds_per_sample = fraction * (3.0 if rank == k - 1 and 2 <= step < 8 else 1.0)
        same &= identical(ours.module)
        ours.zero_grad()
    return {"depths": depths, "same": same}


def phases() -> dict[str, Any]:
    """Full depth in the first half, the ladder in the second."""
    k, rank = dist.get_world_size(), dist.get_rank()
    model = build("skips")
    plan = cut(model, inputs("skips", 3, 0), at=cuts("skips", k, 8), depths=list(range(1, k + 1)))
    late = msgspec.structs.replace(plan.phases[0], begins=0.5)
    plan = msgspec.structs.replace(plan, phases=(plan.full, late))
    said = {}
    try:
        PartialBackprop(model, plan, guard=None)
    except Error as e:
        said["without"] = str(e)
    ours = PartialBackprop(model, plan, guard=None, steps=6, timeout=HANGS)
    try:
        copy.deepcopy(ours)
    except Error as e:
        said["copied"] = str(e)
    depths = []
    for step in range(6):
        depths.append(list(ours.depths))
        loss(ours(inputs("skips", 3, 10 * step + rank))).backward()
    resumed = PartialBackprop(model, plan, guard=None, steps=6, timeout=HANGS)
    resumed.resume(4)
    loss(resumed(inputs("skips", 3, rank))).backward()
    said["resumed"] = f"{resumed.step} {resumed.depths}"
    return {"depths": depths, "same": identical(model), **said}


def launched_early() -> dict[str, Any]:
    """The deepest worker's first layer waits for the last segment's delivery: in vain if that came after backward."""
    import threading

    k, rank = dist.get_world_size(), dist.get_rank()
    ours = partial("skips", list(range(1, k + 1)))
    delivered = threading.Event()
    reduce = ours._courier._reduce

    def watched(delivery: Any, bucket: Any, squares: torch.Tensor) -> None:
        reduce(delivery, bucket, squares)
        if bucket.segment == k - 1:
            delivered.set()

    ours._courier._reduce = watched  # type: ignore[method-assign]
    arrived: list[bool] = []
    if rank == k - 1:
        wrapped_module(ours).scale.register_hook(lambda _: arrived.append(delivered.wait(HANGS)))
    for step in range(2):
        delivered.clear()
        loss(ours(inputs("skips", 3, 10 * step + rank))).backward()
    return {"arrived": arrived}


def merged() -> dict[str, Any]:
    """Buckets from the merge planner, from a profile of the model on a fast network."""
    from dovetail import measure
    from dovetail.planning.depth import planner

    k, rank = dist.get_world_size(), dist.get_rank()
    model = build("transformer")
    profile = measure.profile(model, inputs("transformer", 3, 0), steps=2, warmup=1, batches=[3])
    network = measure.preset("10gbe-2")
    box = [profile]
    dist.broadcast_object_list(box, src=0)
    plan = planner.plan(box[0], network, workers=k, policy="ladder")
    ours = PartialBackprop(
        model, plan, guard=None, profile=box[0], network=network, merging="per-tensor", timeout=HANGS
    )
    data = [inputs("transformer", 3, w) for w in range(k)]
    expected = oracle(model, plan, list(range(1, k + 1)), data, [1.0] * k)
    loss(ours(data[rank])).backward()
    assert ours._planned is not None
    buckets = ours._planned._buckets
    return {
        "worst": difference(model, expected),
        "same": identical(model),
        "buckets": len(buckets),
        "tensors": len(list(model.parameters())),
        "sent": [bucket.segment for bucket in buckets],
    }


def dies(step_of_death: int, patience: float) -> str:
    """One rank vanishes; the others must end with one line."""
    import os
    import sys

    k = dist.get_world_size()
    ours = partial("skips", list(range(1, k + 1)), timeout=patience)
    for step in range(6):
        if step == step_of_death and dist.get_rank() == k - 1:
            os._exit(0)
        try:
            loss(ours(inputs("skips", 3, step))).backward()
        except Error as e:
            print(f"dovetail: {e}", file=sys.stderr, flush=True)
            os._exit(5)
    return "went on"

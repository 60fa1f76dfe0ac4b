"""What the tests of partial backpropagation run on every rank. Each function returns what the test then asserts on."""

from __future__ import annotations

import copy
import hashlib
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.train.partial.module import PartialBackprop
from dovetail.train.partial.segments import cut

from .depth_models import build, cuts, inputs, loss

HANGS = 300.0  # seconds after which something that is bound to happen counts as hanging


def digest(model: nn.Module) -> str:
    """The bits of all parameters, buffers and gradients."""
    said = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]:
        said.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return said.hexdigest()


def identical(model: nn.Module) -> bool:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, digest(model))
    return len(set(said)) == 1


def untied(model: nn.Module) -> nn.Module:
    """A copy in which every use of a shared parameter is a parameter of its own, under its own name."""
    model = copy.deepcopy(model)
    taken: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in taken:
                module._parameters[name] = nn.Parameter(parameter.detach().clone())
            taken.add(id(parameter))
    return model


def oracle(
    model: nn.Module, plan: Any, depths: list[int], batches: list[torch.Tensor], weights: list[float]
) -> dict[str, torch.Tensor]:
    """In one process: every worker's full gradient, masked by segment, averaged over the contributors."""
    per_worker = []
    for batch in batches:
        one = untied(model)
        one.zero_grad()
        loss(one(batch)).backward()
        per_worker.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    home = {layer: s for s, seg in enumerate(plan.segments) for layer in plan.layers[seg.start : seg.stop]}
    shared = {id(p): n for n, p in model.named_parameters()}
    names = {n: shared[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    result: dict[str, torch.Tensor] = {}
    for name in per_worker[0]:
        layer = name.rpartition(".")[0] or type(model).__name__
        chosen = [w for w, d in enumerate(depths) if d >= len(plan.segments) - home[layer]]
        total = sum(weights[w] for w in chosen)
        mean = torch.stack([per_worker[w][name] * weights[w] / total for w in chosen]).sum(dim=0)
        result[names[name]] = result[names[name]] + mean if names[name] in result else mean
    return result


def difference(model: nn.Module, expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error of any parameter's gradient; infinite where one is missing or too many."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        if (parameter.grad is None) != (name not in expected):
            return float("inf")
        if parameter.grad is not None:
            scale = float(expected[name].abs().max()) or 1.0
            worst = max(worst, float((parameter.grad - expected[name]).abs().max()) / scale)
    return worst


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients of all parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def wrapped_module(ours: PartialBackprop) -> Any:
    """The user's own module, with the attributes of its class."""
    return ours.module


def plan_of(ours: PartialBackprop) -> DepthPlan:
    assert ours.plan is not None
    return ours.plan


def exact(
    kind: str, segments: int, blocks: int, rounds: int, *, uneven: bool = False, rotate: str = "data", **options: Any
) -> dict[str, Any]:
    """Random depth vectors; two steps each, so that the second starts from what the first has done."""
    k, rank = dist.get_world_size(), dist.get_rank()
    chance = random.Random(f"{kind} {k}")
    worst, same = 0.0, True
    for round_ in range(rounds):
        depths = (
            list(range(1, k + 1)) if round_ == 0 and segments >= k else [chance.randint(1, segments) for _ in range(k)]
        )
        depths[chance.randrange(k)] = segments
        sizes = [chance.randint(2, 5) if uneven else 3 for _ in range(k)]
        model = build(kind, **options)
        plan = cut(model, inputs(kind, 3, 0), at=cuts(kind, segments, blocks), depths=depths, batches=sizes)
        ours = PartialBackprop(model, plan, guard=None, rotate=rotate, timeout=HANGS)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            data = [inputs(kind, sizes[w], 1000 * step + w) for w in range(k)]
            moved = [depths[(w + step) % k] for w in range(k)] if rotate == "depth" else depths
            expected = oracle(model, plan, moved, data, [float(s) for s in sizes])
            optimizer.zero_grad()
            loss(ours(data[rank])).backward()
            worst = max(worst, difference(model, expected))
            same &= identical(model) and all(
                p.requires_grad == (not frozen(kind, n)) for n, p in model.named_parameters()
            )
            optimizer.step()
        same &= identical(model)
    return {"worst": worst, "same": same}


def frozen(kind: str, name: str) -> bool:
    return kind == "unused" and name.startswith("blocks.1.")


def partial(kind: str, depths: list[int], *, dtype: torch.dtype = torch.float64, **options: Any) -> PartialBackprop:
    """Four blocks, two segments (two workers) or four (four workers), cut evenly."""
    model = build(kind, dtype=dtype)
    segments = max(depths)
    plan = cut(model, inputs(kind, 3, 0, dtype=dtype), at=cuts(kind, segments, 4), depths=depths)
    return PartialBackprop(model, plan, **{"guard": None, "timeout": HANGS, **options})


def accumulates() -> dict[str, Any]:
    """Three passes of different sizes, two of them in no_sync, then clipping: equal to one process with all of it."""
    k, rank = dist.get_world_size(), dist.get_rank()
    ours = partial("tied", list(range(1, k + 1)))
    sizes = [[2, 3, 1], [4, 1, 2], [1, 1, 1], [2, 2, 2]][:k]
    data = [[inputs("tied", n, 10 * w + i) for i, n in enumerate(sizes[w])] for w in range(k)]
    expected: dict[str, torch.Tensor] = {}
    for i in range(3):  # gradients add up; a worker counts with all its samples
        part = oracle(ours.module, ours.plan, list(ours.depths), [d[i] for d in data], [float(sum(s)) for s in sizes])
        expected = {n: expected.get(n, 0) + g for n, g in part.items()}
    with ours.no_sync():
        loss(ours(data[rank][0])).backward()
        loss(ours(data[rank][1])).backward()
    loss(ours(data[rank][2])).backward()
    wrong = difference(ours.module, expected)
    norm = nn.utils.clip_grad_norm_(ours.parameters(), 0.01)
    true_norm = torch.stack([g.norm() for g in expected.values()]).norm()
    # Not zeroed: the next step adds to what is there, as DDP does.
    before = gradients(ours.module)
    again = oracle(ours.module, ours.plan, list(ours.depths), [d[0] for d in data], [float(s[0]) for s in sizes])
    loss(ours(data[rank][0])).backward()
    return {
        "worst": max(wrong, difference(ours.module, {n: before[n] + g for n, g in again.items()})),
        "norm": abs(float(norm / true_norm) - 1),
        "same": identical(ours.module),
        "steps": ours.step,
    }


def mixed_precision() -> dict[str, Any]:
    """bf16 autocast: gradients in single precision, equal to the oracle's; an overflow reaches every rank."""
    k, rank = dist.get_world_size(), dist.get_rank()
    ours = partial("transformer", list(range(1, k + 1)), dtype=torch.float32)
    data = [inputs("transformer", 4, w) for w in range(k)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = oracle(ours.module, ours.plan, list(ours.depths), data, [1.0] * k)
        loss(ours(data[rank])).backward()
    worst, same = difference(ours.module, expected), identical(ours.module)
    kinds = sorted({str(g.dtype) for g in gradients(ours.module).values()})
    ours.zero_grad()
    (loss(ours(data[rank])) * (float("inf") if rank == k - 1 else 1.0)).backward()  # the deepest worker overflows
    overflowed = all(not bool(g.isfinite().all()) for g in gradients(ours.module).values())
    return {"worst": worst, "same": same, "dtypes": kinds, "overflowed": overflowed}


def half_precision() -> dict[str, Any]:
    """Parameters in bf16: summed up in single precision, delivered in bf16."""
    k, rank = dist.get_world_size(), dist.get_rank()
    ours = partial("skips", list(range(1, k + 1)), dtype=torch.bfloat16)
    data = [inputs("skips", 4, w, dtype=torch.bfloat16) for w in range(k)]
    expected = oracle(ours.module, ours.plan, list(ours.depths), data, [1.0] * k)
    loss(ours(data[rank])).backward()
    return {"worst": difference(ours.module, expected), "same": identical(ours.module)}


def statistics() -> dict[str, Any]:
    """Batch norms before the cut see every batch, and after a step all ranks hold the first rank's statistics."""
    k, rank = dist.get_world_size(), dist.get_rank()
    ours = partial("cnn", [1] + [2] * (k - 1))
    alone: Any = copy.deepcopy(ours.module)
    norm = wrapped_module(ours).blocks[0][1]
    moved, equal = True, True
    for step in range(3):
        data = [inputs("cnn", 4, 10 * step + w) for w in range(k)]
        before = norm.running_mean.clone()
        loss(ours(data[rank])).backward()
        moved &= not torch.equal(before, norm.running_mean)
        alone(data[0])
        equal &= torch.equal(norm.running_mean, alone.blocks[0][1].running_mean)
    return {"moved": moved, "equal": equal, "same": identical(ours.module)}


def stays_out() -> dict[str, Any]:
    """Evaluation, also on one rank only; forward without backward; the user's own collectives in between."""
    k, rank = dist.get_world_size(), dist.get_rank()
    ours, theirs = partial("tied", list(range(1, k + 1))), partial("tied", list(range(1, k + 1)))
    equal = True
    for step in range(3):
        for model, disturbed in ((ours, True), (theirs, False)):
            model.zero_grad()
            if disturbed and rank == 0:
                model.eval()
                with torch.no_grad():
                    model(inputs("tied", 2, 99))
                model.train()
                model(inputs("tied", 3, 98)).sum()  # no backward pass follows
            value = loss(model(inputs("tied", 3, 10 * step + rank)))
            value.backward()
            if disturbed:
                dist.all_reduce(value.detach())
        equal &= digest(ours.module) == digest(theirs.module)
    return {"equal": equal, "keys": sorted(ours.state_dict())[:1]}


def kept_bytes(kind: str, depth: int, segments: int) -> int:
    """Bytes that autograd keeps of a forward pass at a depth."""
    from dovetail.train.partial.segments import Segments

    model = build(kind)
    plan = cut(model, inputs(kind, 4, 0), at=cuts(kind, segments, 8), depths=[segments])
    parts = Segments(model, plan)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    parts.freeze(depth)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(inputs(kind, 4, 1))
    assert output.requires_grad
    parts.thaw()
    return sum(kept.values())


def refuses() -> dict[str, str]:
    """One line each, on every rank, and no rank waits for another."""
    k = dist.get_world_size()
    said: dict[str, str] = {}

    def attempt(name: str, run: Any) -> None:
        try:
            run()
            said[name] = "went on"
        except Error as e:
            said[name] = str(e)

    def step(model: PartialBackprop, kind: str) -> None:
        loss(model(inputs(kind, 3, dist.get_rank()))).backward()

    ladder = list(range(1, k + 1))
    attempt("hooked", lambda: step(partial("hooked", ladder), "hooked"))
    attempt("reentrant", lambda: step(reentrant(ladder), "checkpointed"))
    attempt("lost", lambda: step(partial("forgetful", ladder), "forgetful"))
    attempt("workers", lambda: partial("skips", [*ladder, k]))
    attempt("other model", lambda: PartialBackprop(build("tied"), plan_of(partial("cnn", ladder)), guard=None))
    attempt("other options", lambda: partial("skips", ladder, uneven_use=dist.get_rank() == 0))
    attempt("rotate", lambda: partial("skips", ladder, rotate="both"))
    attempt("cut", lambda: partial("skips", ladder[:-1]))
    return said


def reentrant(depths: list[int]) -> PartialBackprop:
    model = build("checkpointed", reentrant=True)
    plan = cut(model, inputs("checkpointed", 3, 0), at=cuts("checkpointed", max(depths), 4), depths=depths)
    return PartialBackprop(model, plan, guard=None, timeout=HANGS)

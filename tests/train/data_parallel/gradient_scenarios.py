"""What the tests of gradients run on every rank: scripts that clip, scale, read and write them; a rank on its own."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.train.data_parallel.sharded import together
from dovetail.train.data_parallel.wire import lane

from .overlap_scenarios import OPTIMIZERS, both, difference, loss, refusal

Act = Callable[[Any, Any], Any]


def _halves(model: Any) -> list[list[nn.Parameter]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [parameters[::2], parameters[1::2]]


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _with_total(model: Any, opt: Any) -> torch.Tensor:
    total: torch.Tensor = nn.utils.get_total_norm(_gradients(model.parameters()))
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total, foreach=True)
    return total


def _by_hand(model: Any, opt: Any) -> float:
    """As many scripts of before torch 0.4 do."""
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.detach().data.norm(2).item() ** 2
    total = math.sqrt(total)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(min(1.0, 0.05 / (total + 1e-6)))
    return total


def _stacked(model: Any, opt: Any) -> torch.Tensor:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total: torch.Tensor = torch.norm(torch.stack([torch.norm(g.detach(), 2.0) for g in gradients]), 2.0)
    for g in gradients:
        g /= 2 + total
    return total


CLIPS: dict[str, Act] = {
    "plain": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "foreach": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=True),
    "one by one": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False),
    "order 1": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.05, 1.0),
    "order inf": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 0.05, math.inf),
    "order -inf": lambda model, opt: nn.utils.get_total_norm(_gradients(_halves(model)[0]), -math.inf),
    "order 0": lambda model, opt: nn.utils.get_total_norm(_gradients(_halves(model)[0]), 0.0),
    "apart": lambda model, opt: sum(nn.utils.clip_grad_norm_(half, 0.03) for half in _halves(model)),
    "with total": _with_total,
    "value": lambda model, opt: nn.utils.clip_grad_value_(model.parameters(), 0.003),
    "value, foreach": lambda model, opt: nn.utils.clip_grad_value_(model.parameters(), 0.003, foreach=True),
    "by hand": _by_hand,
    "stacked": _stacked,
}


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """Counts calls of dist.all_reduce in the block."""
    real, calls = dist.all_reduce, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = real


def clips(way: str) -> dict[str, float]:
    """Clips as a script does, for six iterations; the all-reduces of the last one are counted."""
    pairs, norms = both(OPTIMIZERS["adam"]), []
    for step in range(6):
        for model, opt in pairs:
            opt.zero_grad()
            loss(model, step).backward()
            with counted_all_reduces() as calls:
                norm = CLIPS[way](model, opt)
            norms.append(0.0 if norm is None else float(norm))
            opt.step()
    return {
        "difference": difference(pairs[1][0], pairs[0][0]),
        "norms": max(abs(a - b) for a, b in zip(norms[::2], norms[1::2], strict=True)),
        "collectives": calls[0],
    }


def not_finite() -> list[str]:
    """What torch's function says of a gradient with one NaN, in which one rank has it in its share."""
    said = []
    for order in (2.0, math.inf):
        for model, _ in both(OPTIMIZERS["sgd"]):
            poison(model, math.nan)
            loss(model, 0).backward()
            try:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
            except RuntimeError as e:
                said.append(str(e).split(",")[0])
            said.append(str(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, order))))
    return said


def poison(model: Any, value: float) -> Any:
    """One element of one gradient becomes this on the first rank, until the handle is removed."""

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        changed.view(-1)[-1] = value
        return changed

    return model.module.attention.in_proj_weight.register_hook(poisoned if dist.get_rank() == 0 else lambda g: g)


def scaled(clip: bool) -> dict[str, Any]:
    """GradScaler with steps that are skipped, accumulation, and clipping of unscaled gradients."""
    pairs, scales = both(OPTIMIZERS["adam"]), []
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in pairs]
    skipped = []
    for step in range(8):
        for (model, opt), scaler in zip(pairs, scalers, strict=True):
            handle = poison(model, math.inf) if step in (2, 5) else None
            with model.no_sync():
                scaler.scale(loss(model, 2 * step)).backward()
            scaler.scale(loss(model, 2 * step + 1)).backward()
            before = scaler.get_scale()
            if clip:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=step % 2 == 0)
            scales.append(scaler.get_scale())
            if scaler.get_scale() < before:
                skipped.append(step)
            if handle is not None:
                handle.remove()
    return {
        "difference": difference(pairs[1][0], pairs[0][0]),
        "same scales": scales[::2] == scales[1::2],
        "skipped": skipped,
    }


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of a view": lambda g: g.detach().data.norm(1).item(),
    "vector norm by rows": lambda g: torch.linalg.vector_norm(g, 2, dim=-1),
    "arithmetic": lambda g: (g + 1) * g,
    "abs, mean": lambda g: g.abs().mean().item(),
    "sum": lambda g: g.sum(),
    "all finite": lambda g: torch.isfinite(g).all(),
    "numpy": lambda g: torch.from_numpy(g.cpu().numpy().copy()),
    "clone": lambda g: g.clone(),
    "index": lambda g: g[0] if g.dim() else g,
    "flat": lambda g: g.flatten().double(),
    "histogram": lambda g: torch.histc(g.float(), bins=5),
    "deepcopy": copy.deepcopy,
    "joined": lambda g: torch.cat([g.flatten(), g.flatten()]),
    "into another": lambda g: torch.empty(g.shape, dtype=g.dtype).copy_(g),
}


def _double(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).double()


def reads() -> dict[str, Any]:
    """Every way of reading gradients, against torch's; and what is counted."""
    (theirs, a), (ours, b) = both(OPTIMIZERS["sgd"])
    before = ours.explain()
    for step in range(2):
        for model, opt in ((theirs, a), (ours, b)):
            opt.zero_grad()
            loss(model, step).backward()
    named = [(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True) if p.requires_grad]
    found: dict[str, Any] = {
        way: max(float((_double(read(g)) - _double(read(h))).abs().max()) for g, h in named)
        for way, read in READS.items()
    }
    found["print"] = 0.0 if all(str(g.clone()) == str(g) for g, _ in named) else 1.0
    for opt in (a, b):
        opt.step()
    found["difference"] = difference(ours, theirs)
    line = next(line for line in ours.explain().splitlines() if "read whole" in line)
    split = sum(1 for bucket in ours.exchange.buckets if bucket.kind == "split" for _ in bucket.members)
    return {"found": found, "before": before, "line": line, "split": split}


def _assigns(model: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def _replaces(model: Any) -> None:
    for k, p in enumerate(model.parameters()):
        if p.grad is not None and k % 2:
            p.grad = torch.full_like(p, 0.01 * k, requires_grad=False).detach()


def _copies(model: Any) -> None:
    for k, p in enumerate(model.parameters()):
        if p.grad is not None and k % 2:
            p.grad.copy_(torch.linspace(0, 0.01 * k, p.numel(), dtype=p.dtype).reshape(p.shape))


def _writes_into_views(model: Any) -> None:
    for p in model.parameters():
        if p.grad is not None and p.grad.dim():
            p.grad[0] = 0.25
            p.grad.view(p.shape)[-1].mul_(3)


def _numbers(model: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(0.5)
            p.grad += 0.001
            p.grad.clamp_(-0.01, 0.01).nan_to_num_(0.0)
            p.grad.sub_(torch.tensor(0.0005, dtype=p.dtype))
            p.grad.neg_().neg_()


def _tensors(model: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(p.detach(), alpha=0.01)
            p.grad += 0.1 * p.detach()
            torch._foreach_add_([p.grad], [p.detach()], alpha=0.001)


WRITES = {
    write.__name__.removeprefix("_"): write
    for write in (_assigns, _replaces, _copies, _writes_into_views, _numbers, _tensors)
}


def writes(way: str) -> float:
    """Changes gradients as a script does, and steps; in every other iteration they are not zeroed."""
    pairs = both(OPTIMIZERS["sgd"])
    for step in range(4):
        for model, opt in pairs:
            loss(model, step).backward()
            WRITES[way](model)
            opt.step()
            if step % 2:
                opt.zero_grad()
    return difference(pairs[1][0], pairs[0][0])


@contextlib.contextmanager
def hasty() -> Iterator[None]:
    """Meetings that are called off sooner, so that the tests are shorter."""
    real = together.ALONE, together.SLOW, lane.IDLE
    together.ALONE, together.SLOW, lane.IDLE = 2.0, 0.2, 0.2
    try:
        yield
    finally:
        together.ALONE, together.SLOW, lane.IDLE = real


ALONE: dict[str, Act] = {
    "state": lambda model, opt: opt.state_dict(),
    "full state": lambda model, opt: dovetail.full_state(opt),
    "gradient": lambda model, opt: next(model.parameters()).grad.sum(),
    "norm": lambda model, opt: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
}


def alone(then: str) -> dict[str, Any]:
    """The first rank does alone what needs all; the others wait in a barrier or train on. Then all train on."""
    pairs, found = both(OPTIMIZERS["adam"], kinds="s"), {}
    (_, _), (ours, sharded) = pairs
    turns = [[pair] for pair in pairs] if then == "train this model" else [pairs]
    with hasty():
        for turn, step in product(turns, range(len(ALONE))):
            what, act = list(ALONE.items())[step]
            for model, opt in turn:
                opt.zero_grad()
                loss(model, step).backward()
                if what in ("state", "full state"):
                    opt.step()
                if model is ours and dist.get_rank() == 0:
                    began = time.monotonic()
                    found[what] = (refusal(lambda act=act: act(ours, sharded)), time.monotonic() - began)  # type: ignore[misc]
                if then == "barrier":
                    dist.barrier()
                if what not in ("state", "full state"):
                    opt.step()
        if then == "barrier":  # all do it in the very iteration in which one has done it alone
            if dist.get_rank() == 0:
                found["state"] = (refusal(sharded.state_dict), 0.0)
            dist.barrier()
        stored = sharded.state_dict()["state"]
    expected = pairs[0][1].state_dict()["state"]
    return {
        "said": found,
        "difference": difference(ours, pairs[0][0]),
        "state": max(float((stored[i][k] - v).abs().max()) for i, s in expected.items() for k, v in s.items()),
    }


def late() -> dict[str, Any]:
    """A rank that computes for longer than the others' patience, and then does what they wait for."""
    model, opt = both(OPTIMIZERS["adam"], kinds="s")[1]
    loss(model, 0).backward()
    opt.step()
    began = time.monotonic()
    with hasty():
        if dist.get_rank() == 1:
            while time.monotonic() - began < 2.5 * together.ALONE:
                sum(range(1000))
        said = refusal(opt.state_dict)
    return {"said": said, "seconds": time.monotonic() - began, "patience": 2.0}


def kept() -> str:
    """A stand-in that is kept beyond its iteration does not show the next one's gradient."""
    model, opt = both(OPTIMIZERS["adam"], kinds="s")[1]
    loss(model, 0).backward()
    old = next(model.parameters()).grad
    opt.zero_grad()
    loss(model, 1).backward()
    return refusal(lambda: old.sum())


def at_odds() -> str:
    """Ranks that ask for different gradients at the same point."""
    model, _ = both(OPTIMIZERS["adam"], kinds="s")[1]
    loss(model, 0).backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return refusal(lambda: parameters[dist.get_rank()].grad.sum())


def full() -> dict[str, Any]:
    """The state that rank 0 gets against torch's, with an optimiser that is wrapped and one that is not."""
    pairs = both(OPTIMIZERS["adam"])
    for step in range(3):
        for model, opt in pairs:
            opt.zero_grad()
            loss(model, step).backward()
            opt.step()
    theirs, ours = (dovetail.full_state(opt) for _, opt in pairs)
    if dist.get_rank():
        return {"empty": theirs == ours == {}}
    again = OPTIMIZERS["adam"](copy.deepcopy(pairs[0][0].module).parameters())
    again.load_state_dict(ours)
    worst = max(float((ours["state"][i][k] - v).abs().max()) for i, s in theirs["state"].items() for k, v in s.items())
    return {"worst": worst, "groups": ours["param_groups"] == theirs["param_groups"]}


def outlives() -> None:
    """The first rank, which serves the store, ends; the second one computes on, with a lane that is idle."""
    dist.init_process_group("gloo")
    model = dovetail.DistributedDataParallel(nn.Linear(8, 8), plan=None)
    optimizer = dovetail.optimizer(torch.optim.AdamW(model.parameters()), model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 1:
        time.sleep(3 * lane.IDLE)


if __name__ == "__main__":
    outlives()

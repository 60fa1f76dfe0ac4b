"""What the tests of overlap run on every rank: torch's DistributedDataParallel and ours side by side, in float64."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterable
from itertools import accumulate, cycle, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dovetail
from dovetail.core.plan import Bucket, BucketKind
from dovetail.train.data_parallel.sharded.arriving import Arriving
from tests.devices import place

from .scenarios import QUICK, STEPS, batch, net, preferring

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
CAP = 0.002  # MiB: a dozen buckets in these small models

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, initial_accumulator_value=0.1),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
}


class Bag(nn.Module):
    """A bit of everything: tied, frozen and scalar parameters, buffers, attention, recurrence, channels last.

    No bias where its gradient is zero but for rounding: Adam makes steps of full length out of any rounding.
    """

    def __init__(self, *, idle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(16, 12), nn.Linear(12, 16, bias=False)
        self.out.weight = self.table.weight
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(12, 2, bias=False, batch_first=True)
        self.recurrent = nn.LSTM(12, 12, batch_first=True)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.idle = nn.Linear(5, 5) if idle else None
        place(self.double())

    def forward(self, tokens: torch.Tensor, *, use_idle: bool = False) -> torch.Tensor:
        x = self.table(tokens)
        image = x.reshape(-1, 2, 4, 12 * tokens.shape[1] // 8).contiguous(memory_format=torch.channels_last)
        x = x + self.norm(self.conv(image)).mean(dim=(1, 2, 3)).reshape(-1, 1, 1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.frozen(self.recurrent(x)[0]) * self.scale
        if use_idle and self.idle is not None:
            x = x + self.idle(x[..., :5]).mean()
        return self.out(x)  # type: ignore[no-any-return]


def tokens(step: int) -> torch.Tensor:
    return place(torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(100 * step + dist.get_rank())))


def loss(model: nn.Module, step: int, **given: Any) -> torch.Tensor:
    batch = tokens(step)
    return nn.functional.cross_entropy(model(batch, **given).flatten(0, 1), batch.roll(1).flatten())


def both(make: Make, *, idle: bool = False, kinds: str = "ws", **keywords: Any) -> list[tuple[Any, Any]]:
    """(model, optimiser) of torch's and of ours, equal at the start; ours with buckets of these kinds in turn."""
    theirs = TorchDDP(Bag(idle=idle), **keywords)
    ours = dovetail.DistributedDataParallel(Bag(idle=idle), bucket_cap_mb=CAP, **keywords)
    optimizer = dovetail.optimizer(make(ours.parameters()), ours)
    optimizer.move(*of_kinds(ours, kinds))
    return [(theirs, make(theirs.parameters())), (ours, optimizer)]


def of_kinds(model: Any, kinds: str, *, every: int | None = None) -> tuple[list[int], list[Bucket]]:
    """The order and buckets of a model, or buckets of `every` so many parameters, whole (w) and split (s) in turn."""
    now = model.exchange.buckets
    order = [i for bucket in now for i in bucket.members]
    cuts = list(accumulate(len(b.members) for b in now)) if every is None else [*range(every, len(order), every)]
    cuts = sorted({*cuts, len(order)})
    spelt: dict[str, BucketKind] = {"w": "whole", "s": "split"}
    buckets = [
        Bucket(start=a, stop=b, bytes=0, kind=spelt[kind])
        for (a, b), kind in zip(pairwise([0, *cuts]), cycle(kinds), strict=False)
    ]
    return order, buckets


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of any value in the two models' state_dicts, which must have the same names."""
    one, other = ours.state_dict(), theirs.state_dict()
    assert list(one) == list(other), (list(one), list(other))
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


def clip(model: nn.Module, optimizer: Any, most: float, kind: float = 2.0) -> float:
    if isinstance(model, dovetail.DistributedDataParallel):
        return float(optimizer.clip_grad_norm_(most, kind))
    return float(nn.utils.clip_grad_norm_(model.parameters(), most, kind))


def follows(optimizer: str, kinds: str = "ws") -> dict[str, Any]:
    """Plain steps; and what every rank keeps."""
    (theirs, their_optimizer), (ours, our_optimizer) = both(OPTIMIZERS[optimizer], kinds=kinds)
    for step in range(6):
        for model, opt in ((theirs, their_optimizer), (ours, our_optimizer)):
            opt.zero_grad()
            loss(model, step).backward()
            opt.step()
    held, whole = (_elements(o) for o in (our_optimizer, their_optimizer))
    return {
        "difference": difference(ours, theirs),
        "share": held / whole if whole else 0.0,
        "buckets": len(ours.exchange.buckets),
        "is torch's": isinstance(ours, TorchDDP) and isinstance(our_optimizer, torch.optim.Optimizer),
    }


def _elements(optimizer: torch.optim.Optimizer) -> int:
    """Elements of state, but for the few numbers that belong to whole parameters."""
    alone = ("step", "mu_product")
    return sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k not in alone)


def grouped_and_scheduled() -> float:
    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        ps = list(parameters)
        groups: list[dict[str, Any]] = [{"params": ps[::2]}, {"params": ps[1::2], "lr": 0.002, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.01)

    (theirs, a), (ours, b) = both(make)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.02, 0.005], total_steps=12) for o in (a, b)]
    for step in range(10):
        for (model, opt), scheduler in zip(((theirs, a), (ours, b)), schedulers, strict=True):
            loss(model, step).backward()
            opt.step()
            scheduler.step()
            opt.zero_grad()
    return difference(ours, theirs)


def accumulated() -> dict[str, float]:
    """Four ways of adding up gradients over passes."""
    found = {}
    for way in ("no_sync", "repeated", "set to zero", "never zeroed"):
        pairs = both(OPTIMIZERS["sgd"])
        for step in range(4):
            for model, opt in pairs:
                for part in range(3):
                    silent = way == "no_sync" and part < 2
                    with model.no_sync() if silent else contextlib.nullcontext():
                        loss(model, 3 * step + part).backward()
                opt.step()
                if way == "set to zero":
                    model.zero_grad(set_to_none=False) if step % 2 else opt.zero_grad(set_to_none=False)
                elif way != "never zeroed":
                    opt.zero_grad() if step % 2 else model.zero_grad()
        found[way] = difference(pairs[1][0], pairs[0][0])
    return found


def clipped() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in (2.0, 1.0, float("inf")):
        pairs, norms = both(OPTIMIZERS["adam"]), []
        for step in range(4):
            for model, opt in pairs:
                opt.zero_grad()
                loss(model, step).backward()
                norms.append(clip(model, opt, 0.05, kind))
                opt.step()
        found[str(kind)] = difference(pairs[1][0], pairs[0][0])
        found[f"norms {kind}"] = max(abs(a - b) for a, b in zip(norms[::2], norms[1::2], strict=True))
    model, opt = pairs[1]
    loss(model, 9).backward()
    found["inner"] = refusal(opt._inner.step)
    found["looks"] = repr(next(model.parameters()).grad)
    return found


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except dovetail.Error as e:
        return str(e)
    return "nothing was refused"


def unused(everywhere: bool) -> float:
    """A layer that is used in some steps, by all ranks or by one."""
    pairs = both(OPTIMIZERS["adamw"], idle=True, find_unused_parameters=True)
    for step in range(7):
        for model, opt in pairs:
            opt.zero_grad()
            uses = step % 3 == 1 and (everywhere or dist.get_rank() == 0)
            loss(model, step, use_idle=uses).backward()
            opt.step()
    return difference(pairs[1][0], pairs[0][0])


def read_between_steps() -> dict[str, Any]:
    """Every way of looking at parameters sees finished values, without a forward pass in between."""
    (theirs, a), (ours, b) = both(OPTIMIZERS["sgd"])
    kept = list(ours.parameters())
    looks: dict[str, Callable[[Any], list[torch.Tensor]]] = {
        "state_dict": lambda m: [v for k, v in m.state_dict().items() if "norm" not in k],
        "inner state_dict": lambda m: list(m.module.attention.state_dict().values()),
        "parameters": lambda m: [p + 0 for p in m.parameters()],
        "data": lambda m: [p.data for p in m.module.parameters()],
        "detach": lambda m: [p.detach().clone() for p in m.parameters()],
        "numpy": lambda m: [torch.from_numpy(p.detach().numpy().copy()) for p in m.parameters()],
        "kept": lambda m: [torch.abs(p) for p in (kept if m is ours else m.parameters())],
        "deepcopy": lambda m: list(copy.deepcopy(m.module).parameters()),
        "pickle": lambda m: _pickled(m.module),
        "stack": lambda m: [torch.cat([p.flatten() for p in m.parameters()]), torch.stack([m.module.scale] * 2)],
        "evaluation": lambda m: _evaluated(m),
        "item": lambda m: [torch.tensor(m.module.scale.item())],
    }
    found: dict[str, Any] = {"waited": True}
    for step, (name, look) in enumerate(looks.items()):
        for model, opt in ((theirs, a), (ours, b)):
            opt.zero_grad()
            loss(model, step).backward()
            opt.step()
        found["waited"] &= any(type(p) is Arriving for p in kept)
        shapes = [(p.shape, p.requires_grad, p.grad is None, p.numel()) for p in kept]
        found["waited"] &= any(type(p) is Arriving for p in kept) and len(shapes) > 0
        with torch.no_grad():
            pairs = zip(look(ours), look(theirs), strict=True)
            found[name] = max(float((p - q).abs().max()) for p, q in pairs)
    found["type"] = all(type(p) is nn.Parameter for p in copy.deepcopy(ours.module).parameters())
    return found


def _pickled(module: nn.Module) -> list[torch.Tensor]:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return list(torch.load(buffer, weights_only=False).parameters())


def _evaluated(model: Any) -> list[torch.Tensor]:
    """One rank alone evaluates, past the wrapper, in the middle of training."""
    if dist.get_rank() > 0:
        return [torch.zeros(1)]
    model.eval()
    out = model.module(tokens(77))
    model.train()
    return [out]


def planned() -> dict[str, Any]:
    """Through the whole of planning, on real steps, and beyond it; the third contestant is made to win."""
    theirs = TorchDDP(Bag())
    ours: Any = dovetail.DistributedDataParallel(Bag(), overlap="forward", bucket_cap_mb=CAP, tuning=QUICK)
    a, make = OPTIMIZERS["adam"](theirs.parameters()), OPTIMIZERS["adam"]
    before = ours.explain()
    b = dovetail.optimizer(make(ours.parameters()), ours)
    layouts = set()
    for step in range(STEPS):
        for model, opt in ((theirs, a), (ours, b)):
            opt.zero_grad()
            loss(model, step).backward()
            with preferring(2):
                opt.step()
        layouts.add((ours.exchange.active, tuple(bucket.members for bucket in ours.exchange.buckets)))
    report = ours.report
    kept = [report.plan.tensors[k.start : k.stop] for k in report.plan.buckets] if report.plan else []
    return {
        "difference": difference(ours, theirs),
        "before": before,
        "state": report.state,
        "reason": report.reason,
        "layouts": len(layouts),
        "reducers": len({active for active, _ in layouts}),
        "kept": [list(names) for names in kept],
        "used": [[ours.exchange.slots[i].name for i in bucket.members] for bucket in ours.exchange.buckets],
        "explained": ours.explain(),
        "watching": ours.exchange.watching,
    }


def _autocast(model: Any, opt: Any, step: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch(step)).square().mean().backward()
    opt.step()


def _checkpointed(model: Any, opt: Any, step: int) -> None:
    """Every layer is computed again in backward, in a pass of its own inside the pass."""
    whole, model.module.forward = model.module.forward, lambda x: _layers_again(model.module, x)
    model(batch(step).requires_grad_()).square().mean().backward()
    model.module.forward = whole
    opt.step()


def _layers_again(module: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in module:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def _takes_turns(model: Any, opt: Any, step: int) -> None:
    """A discriminator: frozen while the generator learns through it; the first rank looks in between."""
    model.requires_grad_(False)
    model(batch(step).requires_grad_()).sum().backward()
    model.requires_grad_(True)
    out = model(batch(step))
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(batch(step + 1))
    out.square().mean().backward()
    opt.step()


def _closes_over(model: Any, opt: Any, step: int) -> None:
    def closure() -> torch.Tensor:
        opt.zero_grad()
        found = model(batch(step)).square().mean()
        found.backward()
        return found  # type: ignore[no-any-return]

    assert float(opt.step(closure)) > 0


def _steps_twice(model: Any, opt: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()
    opt.step()
    opt.step()


def _changes_values(model: Any, opt: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()
    opt.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


WAYS = {
    way.__name__.removeprefix("_"): way
    for way in (_autocast, _checkpointed, _takes_turns, _closes_over, _steps_twice, _changes_values)
}


def trains(way: str) -> float:
    """What scripts do besides plain steps, in float32."""
    theirs = TorchDDP(net())
    ours = dovetail.DistributedDataParallel(net(), overlap="forward", bucket_cap_mb=CAP)
    a, b = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (theirs, ours))
    for opt, model in ((a, theirs), (dovetail.optimizer(b, ours), ours)):
        for step in range(5):
            WAYS[way](model, opt, step)
            opt.zero_grad()
    return difference(ours, theirs)


def hinted() -> str:
    """What the plain wrapper says of a second line."""
    model = dovetail.DistributedDataParallel(net(), tuning=QUICK)
    for step in range(8):
        model(batch(step)).sum().backward()
    return next(line for line in model.explain().splitlines() if "second line" in line)

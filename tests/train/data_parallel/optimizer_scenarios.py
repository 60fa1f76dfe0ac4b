"""What the tests of the second line run on every rank: optimisers as scripts have them, beside torch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail

from .overlap_scenarios import CAP, OPTIMIZERS, Bag, both, difference, loss, of_kinds, refusal
from .scenarios import QUICK, batch, net

ENOUGH = 2 * QUICK.most  # iterations in which QUICK ends


class Tuned(torch.optim.AdamW):
    """Other defaults and a method more: the arithmetic is torch's."""

    def __init__(self, parameters: Iterable[Any], **given: Any) -> None:
        super().__init__(parameters, lr=0.02, weight_decay=0.1, **given)

    def halve(self) -> None:
        for group in self.param_groups:
            group["lr"] /= 2


class Normalised(torch.optim.SGD):
    """Divides every gradient by its own norm: a share of it is not enough."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() + 1e-6)
        return super().step(closure)


def subclassed() -> dict[str, Any]:
    """A subclass that keeps torch's step, and one whose step needs whole gradients; whether they have owners."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch changes the class when its first one is made
    pairs, normalised = both(Tuned), both(lambda parameters: Normalised(parameters, lr=0.1))
    for step in range(4):
        for model, opt in [*pairs, *normalised]:
            opt.zero_grad()
            loss(model, step).backward()
            opt.step()
        for _, opt in pairs:
            opt.halve()
    return {
        "difference": difference(pairs[1][0], pairs[0][0]),
        "normalised": difference(normalised[1][0], normalised[0][0]),
        "owners": [len(model.exchange.owners) for model in (pairs[1][0], normalised[1][0])],
        "parameters": len(pairs[1][0].exchange.slots),
    }


def _two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Weights and the rest, in optimisers of two kinds."""
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in trained if p.dim() > 1]
    rest = [p for p in trained if p.dim() <= 1]
    return [torch.optim.AdamW(weights, lr=0.01), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


def several() -> dict[str, Any]:
    """Two optimisers of one model, of which the second steps less often; new buckets on the way; state of both."""
    theirs = TorchDDP(Bag())
    ours: Any = dovetail.DistributedDataParallel(Bag(), bucket_cap_mb=CAP, plan=None)
    a, made = _two(theirs), _two(ours)
    b: list[Any] = [dovetail.optimizer(opt, ours) for opt in made]
    overlapping = refusal(lambda: dovetail.optimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours))
    for step in range(8):
        for model, opts in ((theirs, a), (ours, b)):
            model.zero_grad()
            loss(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for opt in opts[: 1 + (step % 3 != 1)]:
                opt.step()
        if step in (2, 4):
            b[0].move(*of_kinds(ours, "sw" if step == 2 else "ws", every=3))
    worst = 0.0
    for opt, expected in zip(b, a, strict=True):
        stored, wanted = opt.state_dict(), expected.state_dict()
        assert list(stored["state"]) == list(wanted["state"]) and stored["param_groups"] == wanted["param_groups"]
        pairs = [(stored["state"][i][k], v) for i, s in wanted["state"].items() for k, v in s.items()]
        worst = max(worst, *(float((torch.as_tensor(x) - torch.as_tensor(y)).abs().max()) for x, y in pairs))
        opt.load_state_dict(wanted)
    for model, opts in ((theirs, a), (ours, b)):
        loss(model, 9).backward()
        for opt in opts:
            opt.step()
    return {"difference": difference(ours, theirs), "state": worst, "said": overlapping}


def several_planned() -> dict[str, Any]:
    """Two optimisers through the whole of planning."""
    theirs = TorchDDP(Bag())
    ours: Any = dovetail.DistributedDataParallel(Bag(), bucket_cap_mb=CAP, tuning=QUICK)
    a, b = _two(theirs), [dovetail.optimizer(opt, ours) for opt in _two(ours)]
    for step in range(ENOUGH):
        for model, opts in ((theirs, a), (ours, b)):
            model.zero_grad()
            loss(model, step).backward()
            for opt in opts:
                opt.step()
        if ours.report.state == "done":  # on all ranks at the same point
            break
    return {"difference": difference(ours, theirs), "state": ours.report.state, "reason": ours.report.reason}


def grown() -> dict[str, Any]:
    """Groups that are added later, with parameters that were frozen when the model was wrapped among them."""
    theirs = TorchDDP(Bag())
    ours: Any = dovetail.DistributedDataParallel(Bag(), bucket_cap_mb=CAP, plan=None)
    opts: list[Any] = []
    for model in (theirs, ours):
        trained = [p for p in model.parameters() if p.requires_grad]
        opts.append(torch.optim.Adam(trained[::2], lr=0.01))
    opts[1] = dovetail.optimizer(opts[1], ours)
    for step in range(8):
        for model, opt in zip((theirs, ours), opts, strict=True):
            if step == 2:
                trained = [p for p in model.parameters() if p.requires_grad]
                opt.add_param_group({"params": trained[1::2], "lr": 0.003})
            if step == 4:
                model.module.frozen.requires_grad_(True)
                opt.add_param_group({"params": list(model.module.frozen.parameters()), "lr": 0.002})
            model.zero_grad()
            loss(model, step).backward()
            opt.step()
        if step in (1, 5):
            opts[1].move(*of_kinds(ours, "ws" if step == 1 else "s", every=4))
    stored, wanted = (opt.state_dict() for opt in (opts[1], opts[0]))
    keys = [list(s) for s in (stored["state"], wanted["state"])]
    opts[1].load_state_dict(stored)
    for model, opt in zip((theirs, ours), opts, strict=True):
        loss(model, 9).backward()
        opt.step()
    return {"difference": difference(ours, theirs), "same form": keys[0] == keys[1]}


def strangers() -> float:
    """One optimiser over two models and a module that nobody wraps: the second line is for the first of them."""
    differences = []
    made = []
    for wrap in (TorchDDP, dovetail.DistributedDataParallel):
        torch.manual_seed(1)
        one, other, loose = wrap(Bag()), wrap(net()), nn.Linear(16, 1, bias=False).double()
        torch.manual_seed(2)
        parameters = [p for m in (one, other, loose) for p in m.parameters()]
        opt: Any = torch.optim.AdamW(parameters, lr=0.01)
        if wrap is not TorchDDP:
            opt = dovetail.optimizer(opt, one)
        made.append((one, other, loose, opt))
    for step in range(4):
        for one, other, loose, opt in made:
            opt.zero_grad()
            x = one(torch.arange(8).reshape(1, 8) % 16 + 0 * dist.get_rank())
            (loose(x).square().mean() + other(batch(step)).square().mean()).backward()
            opt.step()
    for theirs, ours in zip(made[0][:3], made[1][:3], strict=True):
        differences.append(difference(ours, theirs))
    return max(differences)


def looked_up() -> dict[str, bool]:
    """Code that looks into `optimizer.state` with a parameter in its hand."""
    (_, _), (ours, opt) = both(OPTIMIZERS["adam"], kinds="s")
    parameters = [p for p in ours.parameters() if p.requires_grad]
    before = any(p in opt.state for p in parameters)
    loss(ours, 0).backward()
    opt.step()
    held = [p for p in parameters if p in opt.state]
    return {
        "before": before,
        "some": 0 < len(held) <= len(parameters),
        "steps": all(float(opt.state[p]["step"]) == 1 for p in held),
        "parts": all(opt.state[p]["exp_avg"].numel() <= p.numel() for p in held),
        "got": all(opt.state.get(p) is opt.state[p] for p in held),
        "none else": all(s for s in opt.state.values()),
    }


class Mixed(nn.Module):
    """Layers of several dtypes, in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16).double(), nn.Linear(16, 16)
        self.d = nn.Linear(16, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c(self.b(self.a(x).relu().double()).relu().float()).relu()
        return self.d(x.double())  # type: ignore[no-any-return]


def several_dtypes(tuned: bool) -> dict[str, Any]:
    """A model of two dtypes, clipped, with new buckets on the way or through the whole of planning."""
    theirs = TorchDDP(Mixed())
    keywords: dict[str, Any] = {"tuning": QUICK} if tuned else {"plan": None}
    ours: Any = dovetail.DistributedDataParallel(Mixed(), overlap="forward", bucket_cap_mb=CAP, **keywords)
    a: Any = OPTIMIZERS["adam"](theirs.parameters())
    b: Any = dovetail.optimizer(OPTIMIZERS["adam"](ours.parameters()), ours)
    for step in range(ENOUGH if tuned else 8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for model, opt in ((theirs, a), (ours, b)):
            opt.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        if step in (2, 4) and not tuned:
            b.move(*of_kinds(ours, "sw" if step == 2 else "s", every=8 if step == 2 else 3))
        if ours.report.state == "done":
            break
    stored, wanted = b.state_dict()["state"], a.state_dict()["state"]
    return {
        "difference": difference(ours, theirs),
        "state": max(float((stored[i][k] - v).abs().max()) for i, s in wanted.items() for k, v in s.items()),
        "dtypes": all(stored[i][k].dtype == v.dtype for i, s in wanted.items() for k, v in s.items()),
        "planning": ours.report.state,
    }

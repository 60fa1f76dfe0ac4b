"""What the tests of a DDP's surface run on every rank: torch's own methods, and what training libraries do to it."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors

import dovetail
from dovetail.train.integrations import buckets

from .overlap_scenarios import OPTIMIZERS, Bag, difference, loss
from .reference_scenarios import WIDTH, Net, expected, held_up, step, worst, wrapped, x


def pairs(make: Any = OPTIMIZERS["adam"], **keywords: Any) -> list[tuple[Any, Any]]:
    """(model, optimiser) of torch's and of ours, all buckets split."""
    theirs = TorchDDP(Bag(idle=True), **keywords)
    ours = dovetail.DistributedDataParallel(Bag(idle=True), plan=None, bucket_cap_mb=0.002, **keywords)
    return [(theirs, make(theirs.parameters())), (ours, dovetail.optimizer(make(ours.parameters()), ours))]


def logging_data() -> dict[str, Any]:
    model, optimizer = wrapped(Net())
    torchs = wrapped(Net(), TorchDDP)[0]._get_ddp_logging_data()
    for number in range(3):
        step(model, optimizer, number)
    data = model._get_ddp_logging_data()
    model._check_reducer_finalized()
    model._set_ddp_runtime_logging_sample_rate(10)
    return {
        "missing": sorted(set(torchs) - set(data)),
        "iteration": data["iteration"],
        "buckets": buckets(model),
        "bytes": [bucket.bytes for bucket in model.exchange.buckets],
        "parameters": len(list(model._get_data_parallel_params(model.module))),
        "can be static": bool(data.get("can_set_static_graph")),
    }


def static_graph() -> dict[str, float]:
    """A layer that is never used: with a static graph torch finds that out by itself."""
    found = {}
    for way in ("argument", "method"):
        both = pairs(static_graph=True) if way == "argument" else pairs()
        for model, _ in both if way == "method" else ():
            model._set_static_graph()
        for number in range(4):
            for model, optimizer in both:
                optimizer.zero_grad()
                loss(model, number).backward()
                optimizer.step()
        found[way] = difference(both[1][0], both[0][0])
    return found


def prepared() -> dict[str, float]:
    """Backward passes that are told to synchronise after a forward pass that was not (as in manual optimisation)."""
    found = {}
    for way in ("lightning", "accelerate"):
        both = pairs(find_unused_parameters=way == "lightning")
        for number in range(4):
            for model, optimizer in both:
                optimizer.zero_grad()
                with model.no_sync():  # without find_unused_parameters torch waits for every parameter
                    out = loss(model, number, use_idle=way == "accelerate")
                if way == "lightning":
                    model.require_forward_param_sync = True
                    model.reducer._rebuild_buckets()
                    model.reducer.prepare_for_backward(list(_find_tensors(out)))
                else:
                    model.require_backward_grad_sync = model.require_forward_param_sync = True
                    model.reducer.prepare_for_backward([])
                out.backward()
                optimizer.step()
        found[way] = difference(both[1][0], both[0][0])
    return found


class InsideOut(nn.Module):
    """Backward passes and steps inside `forward`, as a training library with manual optimisation runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.wrapper: list[Any] = []

    def forward(self, number: int) -> None:
        model, optimizer = self.wrapper
        for part in range(2):
            optimizer.zero_grad()
            model.require_backward_grad_sync = False
            out = self.net(x(2 * number + part)).square().mean()
            model.require_backward_grad_sync = True
            model.require_forward_param_sync = True
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([])
            out.backward()
            optimizer.step()


def inside_out() -> float:
    results = []
    for wrapper in (TorchDDP, dovetail.DistributedDataParallel):
        module = InsideOut()
        model, optimizer = wrapped(module, wrapper)
        object.__setattr__(module, "wrapper", [model, optimizer])
        for number in range(3):
            model.require_backward_grad_sync = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(number)
        results.append([p.detach().clone() for p in model.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def copied() -> dict[str, Any]:
    """Copies of the wrapper and of the module, taken while new values are on their way."""
    model, optimizer = wrapped(Net())
    after = expected(3)
    step(model, optimizer, 0)
    whole = copy.deepcopy(model)
    step(model, optimizer, 1)
    inner = copy.deepcopy(model.module)
    step(model, optimizer, 2)
    pickled = pickle.loads(pickle.dumps(model.module))
    trained = torch.optim.SGD(whole.parameters(), lr=0.5)
    whole(x(9)).square().mean().backward()
    reduced = [p.grad.clone() for p in whole.parameters()]
    trained.step()
    for p in reduced:
        dist.all_reduce(p)
    same = all(torch.allclose(p / 2, q.grad) for p, q in zip(reduced, whole.parameters(), strict=True))
    return {
        "wrapper": type(whole).__qualname__,
        "trains": same and not torch.equal(next(whole.parameters()), after[0][0]),
        "inner": worst(list(inner.parameters()), after[1]),
        "pickled": worst(list(pickled.parameters()), after[2]),
        "plain": all(type(p) is nn.Parameter for p in [*inner.parameters(), *pickled.parameters()]),
    }


def checkpointed(folder: str) -> dict[str, Any]:
    """torch.distributed.checkpoint of model and optimiser: fresh, after steps, and into another pair."""
    (theirs, a), (ours, b) = pairs()
    get_state_dict(theirs, a)  # makes a step of an optimiser that has made none
    fresh = get_state_dict(ours, b)[1]["state"]
    for number in range(3):
        for model, optimizer in ((theirs, a), (ours, b)):
            optimizer.zero_grad()
            loss(model, number, use_idle=True).backward()
            optimizer.step()
    held_up(ours)
    model_state, optimizer_state = get_state_dict(ours, b)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=Path(folder, "dcp"))
    (_, _), (other, c) = pairs()
    model_state, optimizer_state = get_state_dict(other, c)
    stored: Any = {"model": model_state, "optimizer": optimizer_state}
    load(stored, checkpoint_id=Path(folder, "dcp"))
    set_state_dict(other, c, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"])
    for model, optimizer in ((theirs, a), (other, c)):
        optimizer.zero_grad()
        loss(model, 7, use_idle=True).backward()
        optimizer.step()
    return {"fresh": len(fresh), "difference": difference(other, theirs)}


def exported() -> dict[str, float]:
    """torch.export of the module, right after a step."""
    model, optimizer = wrapped(Net())
    step(model, optimizer, 0)
    eye = torch.eye(WIDTH, dtype=torch.float64)
    program = torch.export.export(model.module, (eye,))
    return {"difference": worst([program.module()(eye)], expected(1)[0])}


def joined() -> dict[str, Any]:
    """Ranks with uneven inputs, and iterations before and after them."""
    found: dict[str, Any] = {}
    results = []
    for wrapper in (TorchDDP, dovetail.DistributedDataParallel):
        model, optimizer = wrapped(Net(), wrapper)
        for group in optimizer.param_groups:
            group["momentum"] = 0.0  # a rank that has run out of inputs does not update its momentum
        step(model, optimizer, 0)
        with model.join():
            for number in range(1, 3 + dist.get_rank()):
                optimizer.zero_grad()
                model(x(number)).square().mean().backward()
                optimizer.step()
        for number in range(5, 7):
            step(model, optimizer, number)
        results.append([p.detach().clone() for p in model.parameters()])
    found["difference"] = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    found["in charge"] = model.exchange.active
    with model.join(enable=False):
        step(model, optimizer, 8)
    return found


def hooked() -> dict[str, Any]:
    """Forward hooks of the wrapper, and gradients that a script has made itself."""
    seen: list[Any] = []
    results = []
    for wrapper in (TorchDDP, dovetail.DistributedDataParallel):
        model, optimizer = wrapped(Net(), wrapper)
        model.register_forward_pre_hook(lambda _, given: seen.append(len(given)))
        model.register_forward_hook(lambda *_: seen.append("after"))
        for number in range(3):
            step(model, optimizer, number)
            optimizer.zero_grad()
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01 * number)
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    return {
        "difference": max(float((a - b).abs().max()) for a, b in zip(*results, strict=True)),
        "seen": seen == [1, "after"] * 6,
    }

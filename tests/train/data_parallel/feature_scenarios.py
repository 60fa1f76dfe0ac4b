"""What the tests of features run on every rank: each script with torch's DDP, with one line and with two."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import Tuning

from . import feature_scripts as scripts
from .feature_scripts import Script, layers, sgd
from .optimizer_scenarios import Normalised, Tuned
from .overlap_scenarios import CAP, of_kinds, refusal
from .scenarios import batch, preferring

QUICK = Tuning(warmup=1, measure=2, candidates=3, steps=1, duel=5, duel_steps=1, network_seconds=0.05)
AFTER = 3
"""Iterations with the kept plan."""
CHANGE = 3
"""After this many iterations every other bucket of the second line is whole."""

BOTH: dict[str, Script] = {
    "require_backward_grad_sync": scripts.by_flag,
    "zero_grad": scripts.in_turns,
    "ignored parameters": scripts.given(scripts.ignored_parameters),
    "buffers": scripts.given(scripts.normalised),
    "own buffers": scripts.given(scripts.normalised, broadcast_buffers=False),
    "gradient views": scripts.given(gradient_as_bucket_view=True),
    "process group": scripts.in_subgroup,
    "bag": scripts.bag,
    "parametrised": scripts.given(scripts.parametrised),
    "checkpoint": scripts.recomputed(reentrant=False),
    "reentrant checkpoint": scripts.recomputed(reentrant=True),
    "penalty": scripts.penalised,
    "clipped": scripts.clipped,
    "GradScaler": scripts.scaled,
    "autocast": scripts.autocast,
    "gradients": scripts.gradients,
    "scheduled": scripts.scheduled,
    "several optimisers": scripts.several,
    "several models": scripts.one_of_two,
    "muon": scripts.muon,
    "adafactor": scripts.by(lambda ps: torch.optim.Adafactor(ps, lr=0.003)),
    "subclass": scripts.by(Tuned),
    "subclass with its own step": scripts.by(lambda ps: Normalised(ps, lr=0.01)),
    "closure": scripts.closed(lambda ps: torch.optim.SGD(ps, lr=0.05)),
    "resumed": scripts.resumed,
    "averaged": scripts.averaged,
    "scripted": scripts.given(scripts.scripted),
    "traced": scripts.given(scripts.traced),
    "exported": scripts.exported,
    "hooked": scripts.hooked,
    "referred": scripts.referred,
}
"""What works with one line and with two."""


def _own_hook(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """A hook of the user's own, which sends half of every gradient."""

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().mul_(0.5)
        return allreduce_hook(state, bucket)

    hook.__annotations__.clear()  # torch compares them with classes, and here they are strings
    model = wrap(layers())
    model.register_comm_hook(None, hook)
    yield from scripts.iterations(model, line(sgd(model), model))


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    # It ends by its own loss, which differs between ranks: without tolerances all make the same number of passes.
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, tolerance_change=0.0, tolerance_grad=0.0)


ONE: dict[str, Script] = {"own hook": _own_hook, "LBFGS": scripts.closed(_lbfgs)}
"""What works with one line only."""


def _lines(way: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two lines as a script has them."""
    if way == "torch":
        return TorchDDP, lambda optimizer, model: optimizer
    if way == "one line":
        return (
            lambda module, **given: dovetail.DistributedDataParallel(module, tuning=QUICK, **given),
            lambda optimizer, model: optimizer,
        )
    return (
        lambda module, **given: dovetail.DistributedDataParallel(module, plan=None, bucket_cap_mb=CAP, **given),
        dovetail.optimizer,
    )


def compared(name: str) -> dict[str, Any]:
    """A script in every way, iteration by iteration, through the whole of planning and a bit longer."""
    warnings.simplefilter("ignore")
    script = (BOTH | ONE)[name]
    ways = ["torch", "one line", *(["two lines"] if name in BOTH else [])]
    running = {way: script(*_lines(way)) for way in ways}
    different, worst, after = [], 0.0, 0
    for step in range(QUICK.most + AFTER):
        seen = {}
        for way, iterations in running.items():
            with preferring(1):
                seen[way] = next(iterations)
        expected = _values(seen["torch"])
        if not all(torch.equal(a, b) for a, b in zip(expected, _values(seen["one line"]), strict=True)):
            different.append(step)
        if "two lines" in seen:
            pairs = zip(expected, _values(seen["two lines"]), strict=True)
            worst = max(worst, *(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()))
            model = seen["two lines"][0]
            if step == CHANGE:
                model.optimizer.move(*of_kinds(model, "ws"))
        report = seen["one line"][0].report
        after += report.state in ("done", "off")
        if after == AFTER:
            break
    return {
        "different": different[:5],
        "worst": worst,
        "state": report.state,
        "reason": report.reason,
        "plan": report.plan is not None,
        "exchange": "two lines" not in seen or model.exchange.active,
    }


def _values(seen: list[Any]) -> list[torch.Tensor]:
    """All values of modules and tensors, as they are now."""
    return [
        value.detach()
        for one in seen
        for value in (one.state_dict().values() if isinstance(one, nn.Module) else [one])
        if isinstance(value, torch.Tensor)
    ]


def batch_norm_of_all_ranks() -> dict[str, str]:
    """What wrapping a model with SyncBatchNorm says on the CPU."""
    said = {}
    for way in ("torch", "one line", "two lines"):
        wrap = _lines(way)[0]
        try:
            wrap(nn.SyncBatchNorm.convert_sync_batchnorm(scripts.normalised()))
            said[way] = "nothing"
        except ValueError as e:
            said[way] = str(e)
    return said


def checkpointed(folder: str) -> float:
    """torch.distributed.checkpoint of a model with one line, loaded into another; the difference after a step more."""
    results = []
    for way in ("torch", "one line"):
        wrap, path = _lines(way)[0], Path(folder, way)
        model = wrap(layers())
        optimizer = scripts.adam(model)
        training = scripts.iterations(model, optimizer)
        for _ in range(6):
            next(training)
        states = get_state_dict(model, optimizer)
        save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
        other = wrap(layers())
        again = scripts.adam(other)
        states = get_state_dict(other, again)
        stored: Any = {"model": states[0], "optimizer": states[1]}
        load(stored, checkpoint_id=path)
        set_state_dict(other, again, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"])
        next(scripts.iterations(other, again))
        results.append(_values([other]))
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def meshed() -> dict[str, Any]:
    """A device mesh in place of a process group, with one line; what the second says."""
    mesh, results = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for way in ("torch", "one line"):
        model = _lines(way)[0](layers(), device_mesh=mesh)
        training = scripts.iterations(model, sgd(model))
        for _ in range(6):
            next(training)
        results.append(_values([model]))
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return {"same": same, "said": refusal(lambda: dovetail.optimizer(sgd(model), model))}


def refusals() -> dict[str, str]:
    """What the second line cannot work with, and says so."""

    def second(**given: Any) -> str:
        model = dovetail.DistributedDataParallel(layers(), **given)
        return refusal(lambda: dovetail.optimizer(sgd(model), model))

    module = layers()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    inside = dovetail.DistributedDataParallel(module)
    hooked = dovetail.DistributedDataParallel(layers())
    hooked.register_comm_hook(None, allreduce_hook)
    delayed = layers()
    named = list(delayed.named_parameters())
    late = dovetail.DistributedDataParallel(
        delayed, delay_all_reduce_named_params=named[-2:], param_to_hook_all_reduce=named[-3][1]
    )
    return {
        "inside backward": refusal(lambda: dovetail.optimizer(sgd(inside), inside)),
        "hook": refusal(lambda: dovetail.optimizer(sgd(hooked), hooked)),
        "delayed": refusal(lambda: dovetail.optimizer(sgd(late), late)),
        "caps": second(bucket_cap_mb_list=[0.01, 1.0]),
    }


def pickled() -> dict[str, bool]:
    """The wrapper with one line and the module inside it as pickles, in the middle of planning."""
    model = dovetail.DistributedDataParallel(layers(), tuning=QUICK)
    training = scripts.iterations(model, sgd(model))
    for _ in range(6):
        next(training)
    found = {}
    for name, one in (("wrapper", model), ("module", model.module)):
        again = pickle.loads(pickle.dumps(one))
        found[name] = torch.equal(again(batch(0).double()), model(batch(0).double()))
    return found

"""What the tests of features run on every rank: each script with torch's DDP, with one line and with two."""

from __future__ import annotations

import copy
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import dovetail
from dovetail import Tuning

from . import feature_scripts as scripts
from .feature_scripts import Script, layers, sgd, x
from .optimizer_scenarios import Normalised, Tuned
from .overlap_scenarios import CAP, of_kinds, refusal
from .scenarios import batch, preferring

QUICK = Tuning(warmup=1, measure=2, candidates=3, steps=1, duel=5, duel_steps=1, network_seconds=0.05)
AFTER = 3
"""Iterations with the kept plan."""
SECOND = 11
"""Iterations with two lines."""
CHANGE = 3
"""After this many iterations every other bucket of the second line is whole."""


def _written(wrap: Any, line: Any) -> Iterator[list[Any]]:
    """Parameters are written after every step."""
    model = wrap(layers())
    for trained in scripts.iterations(model, line(sgd(model), model)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
        yield trained


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
    "written": _written,
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


class Marked(nn.Parameter):
    """A class of the user's own."""


def _marked() -> Any:
    module: Any = layers()
    module[3].weight = Marked(module[3].weight.detach())
    return module


def _with_gaps() -> Any:
    """A parameter that has every other column of a matrix, and two that have the same memory."""
    module: Any = layers()
    wide = torch.stack([module[3].weight.detach(), torch.zeros(48, 48).double()], dim=2).flatten(1)
    module[3].weight = nn.Parameter(wide[:, ::2])
    shared = module[5].bias.detach()
    module[5].bias, module[7].bias = nn.Parameter(shared), nn.Parameter(shared.view(-1))
    return module


def _zero(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.003)


ONE: dict[str, Script] = {
    "own hook": _own_hook,
    "LBFGS": scripts.closed(_lbfgs),
    "ZeroRedundancyOptimizer": scripts.by(_zero),
    "subclass of Parameter": scripts.given(_marked),
    "gaps": scripts.given(_with_gaps),
}
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
    """A script in every way, iteration by iteration; with one line through the whole of planning and a bit longer."""
    warnings.simplefilter("ignore")
    script = (BOTH | ONE)[name]
    torchs, one = script(*_lines("torch")), script(*_lines("one line"))
    two = script(*_lines("two lines")) if name in BOTH else iter(())
    different, worst, exchanged, after = [], 0.0, 0, 0
    for step in range(QUICK.most + AFTER):
        expected = _values(next(torchs))
        with preferring(1):
            seen = next(one)
        if not all(torch.equal(a, b) for a, b in zip(expected, _values(seen), strict=True)):
            different.append(step)
        report = seen[0].report
        if step < SECOND and (trained := next(two, None)) is not None:
            pairs = zip(expected, _values(trained), strict=True)
            worst = max(worst, *(float((a.double() - b.double()).abs().max()) for a, b in pairs))
            exchanged += trained[0].exchange.active
            if step == CHANGE:
                trained[0].optimizer.move(*of_kinds(trained[0], "ws"))
        after += report.state in ("done", "off")
        if after == AFTER:
            break
    return {
        "different": different[:5],
        "worst": worst,
        "exchanged": exchanged,
        "state": report.state,
        "reason": report.reason,
        "plan": report.plan is not None,
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


def regrouped() -> dict[str, Any]:
    """Another process group in the middle of training, with one line; what the second says."""
    results = []
    for way in ("torch", "one line"):
        model = _lines(way)[0](layers())
        for step, _ in zip(range(8), scripts.iterations(model, sgd(model)), strict=False):
            if step == 4:
                model._update_process_group(dist.new_group())
        results.append(_values([model]))
    wrap, line = _lines("two lines")
    model = wrap(layers())
    line(sgd(model), model)
    return {
        "same": all(torch.equal(a, b) for a, b in zip(*results, strict=True)),
        "said": refusal(lambda: model._update_process_group(dist.group.WORLD)),
    }


def converted() -> dict[str, float]:
    """How far gradients are from the average of all ranks once a wrapped model has another dtype."""
    found = {}
    for way in ("torch", "one line"):
        model = _lines(way)[0](layers())
        next(scripts.iterations(model, sgd(model)))
        model.to(torch.float32)
        alone = copy.deepcopy(model.module)
        for one in (model, alone):
            one.zero_grad()
            one(x(1).float()).square().mean().backward()
        pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
        for _, own in pairs:
            dist.all_reduce(own)
        found[way] = max(float((gradient - own / dist.get_world_size()).abs().max()) for gradient, own in pairs)
    return found


def refusals() -> dict[str, str]:
    """What the second line cannot work with, and says so."""

    def second(module: nn.Module | None = None, make: Callable[[Any], Any] = sgd, **given: Any) -> str:
        model = dovetail.DistributedDataParallel(module or layers(), **given)
        return refusal(lambda: dovetail.optimizer(make(model), model))

    module = layers()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    hooked = dovetail.DistributedDataParallel(layers())
    hooked.register_comm_hook(None, allreduce_hook)
    delayed = layers()
    named = list(delayed.named_parameters())
    twice = dovetail.DistributedDataParallel(layers(), plan=None)
    own = dovetail.optimizer(sgd(twice), twice)
    loss = twice(x(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return {
        "twice": refusal(own.step),
        "inside backward": second(module),
        "hook": refusal(lambda: dovetail.optimizer(sgd(hooked), hooked)),
        "delayed": second(delayed, delay_all_reduce_named_params=named[-2:], param_to_hook_all_reduce=named[-3][1]),
        "caps": second(bucket_cap_mb_list=[0.01, 1.0]),
        "subclass of Parameter": second(_marked()),
        "ZeroRedundancyOptimizer": second(make=lambda model: _zero(model.parameters())),
        "mixed_precision": refusal(
            lambda: dovetail.DistributedDataParallel(
                layers(), overlap="forward", mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)
            )
        ),
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

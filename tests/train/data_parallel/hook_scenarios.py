"""What the tests of communication hooks under planned buckets run on every rank."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.train.data_parallel.module import DistributedDataParallel
from dovetail.train.integrations import buckets

from .scenarios import batch, net, preferring
from .tuner_scenarios import QUICK

AFTER = 4
"""Iterations with the kept plan."""


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    with preferring(1):
        loss = model(batch(step)).square().mean()
        loss.backward()
    optimizer.step()
    return float(loss)


def through_planning(ours: Any, *others: Any, after: int = AFTER) -> dict[str, Any]:
    """Trains all models side by side until planning has ended and a bit longer."""
    trained = [(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (ours, *others)]
    different, losses, done = [], [], 0
    for step in range(QUICK.most + AFTER):
        losses.append([train(model, optimizer, step) for model, optimizer in trained])
        parameters = [list(m.parameters()) for m, _ in trained]
        if not all(torch.equal(p, q) for p, q in zip(parameters[0], parameters[-1], strict=True)):
            different.append(step)
        done += ours.report.state in ("done", "off")
        if done == after:
            break
    return {
        "different": different,
        "losses": [losses[0][0], losses[-1][0]],
        "state": ours.report.state,
        "reason": ours.report.reason,
        "plan": ours.report.plan is not None and buckets(ours) == [b.bytes for b in ours.report.plan.buckets],
        "explained": ours.explain(),
    }


def same_as_torch(builtin: bool) -> dict[str, Any]:
    """Both wrappers with the same 16-bit hook."""
    models: list[Any] = [DistributedDataParallel(net(), tuning=QUICK), TorchDDP(net())]
    for model in models:
        if builtin:
            model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
        else:
            model.register_comm_hook(None, fp16_compress_hook)
    return through_planning(*models)


def while_trying() -> dict[str, Any]:
    """A hook that comes in the middle of planning: planning begins anew."""
    ours, theirs = DistributedDataParallel(net(), tuning=QUICK), TorchDDP(net())
    trained = [(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (ours, theirs)]
    for step in range(9):
        for model, optimizer in trained:
            train(model, optimizer, step)
    state = ours.report.state
    for model in (ours, theirs):
        model.register_comm_hook(None, fp16_compress_hook)
    return {"then": state, "now": ours.report.state, **through_planning(ours, theirs)}


def power_sgd(start: int) -> dict[str, Any]:
    """PowerSGD, which on gloo works with one bucket only."""
    warnings.simplefilter("ignore")
    models: list[Any] = [DistributedDataParallel(net(), tuning=QUICK), TorchDDP(net())]
    for model in models:
        state = PowerSGDState(process_group=None, start_powerSGD_iter=start, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook)
    return through_planning(*models, after=3 * start)


def fails(step_of_failure: int) -> dict[str, Any]:
    """A hook of the user's that raises ends with its own error."""

    class Mine(Exception):
        pass

    calls = 0

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += bucket.is_last()
        if calls == step_of_failure:
            raise Mine("no more gradients today")
        return fp16_compress_hook(state, bucket)

    hook.__annotations__.clear()  # torch compares them with classes, and here they are strings
    model = DistributedDataParallel(net(), tuning=QUICK)
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(QUICK.most):
        try:
            train(model, optimizer, step)
        except Mine as e:
            return {"said": str(e), "step": step}
    return {"said": "nothing"}


class Remembering:
    """A state of the user's own that keeps a tensor for every bucket."""

    def __init__(self) -> None:
        self.last: dict[int, torch.Tensor] = {}
        self.sizes: set[int] = set()


def remembering_hook(state: Remembering, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    state.sizes.add(buffer.numel() * buffer.element_size())
    state.last[bucket.index()] = buffer.clone()
    return fp16_compress_hook(None, bucket)  # type: ignore[arg-type]


remembering_hook.__annotations__.clear()  # torch compares them with classes, and here they are strings


def remembers() -> dict[str, Any]:
    """A hook whose memory may belong to buckets: these never change."""
    ours = DistributedDataParallel(net(), tuning=QUICK)
    state = Remembering()
    ours.register_comm_hook(state, remembering_hook)
    return {**through_planning(ours), "sizes": sorted(state.sizes), "bytes": ours.report.bytes}


def dropped_with_a_hook() -> list[bool]:
    """Whether a module with a hook is freed when nobody holds it any more, at every stage of planning."""
    freed = []
    for steps in (0, 2, 9, 16):
        model = DistributedDataParallel(net(), tuning=QUICK)
        model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(steps):
            train(model, optimizer, step)
        inner = weakref.ref(model.module)
        del model, optimizer
        gc.collect()
        freed.append(inner() is None)
    return freed

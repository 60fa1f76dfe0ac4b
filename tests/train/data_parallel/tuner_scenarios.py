"""What training scripts do besides plain iterations: legal with torch's DDP, so legal while planning."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import Tuning
from dovetail.train import agree
from dovetail.train.data_parallel.module import DistributedDataParallel
from dovetail.train.data_parallel.tuning import tuner as tuner_module

from .scenarios import batch, net, preferring, same_gradients

QUICK = Tuning(warmup=1, measure=3, candidates=3, steps=2, duel=5, duel_steps=1, network_seconds=0.2)
AFTER = 4
"""Iterations with the kept plan."""

Habit = Callable[[TorchDDP, int], None]


def step(model: TorchDDP, number: int) -> None:
    model.zero_grad()
    with preferring(1):
        model(batch(number)).sum().backward()


def _module_alone(model: TorchDDP, number: int) -> None:
    """The first rank looks at gradients of its own, past the wrapper."""
    step(model, number)
    if dist.get_rank() == 0:
        model.module(batch(number)).sum().backward()


def _second_backward(model: TorchDDP, number: int) -> None:
    """torch reduces the first backward pass of a forward pass only; here the first rank alone makes another."""
    model.zero_grad()
    with preferring(1):
        loss = model(batch(number)).square().sum()
        loss.backward(retain_graph=True)
    if dist.get_rank() == 0:
        loss.backward()


def _evaluates_between(model: TorchDDP, number: int) -> None:
    """The first rank evaluates between forward and backward."""
    model.zero_grad()
    with preferring(1):
        output = model(batch(number))
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(batch(number + 1))
        output.sum().backward()


def _infers(model: TorchDDP, number: int) -> None:
    step(model, number)
    with torch.inference_mode():
        model(batch(number))


def _takes_turns(model: TorchDDP, number: int) -> None:
    """A discriminator: frozen while the generator learns through it."""
    model.requires_grad_(False)
    model(batch(number).requires_grad_()).sum().backward()
    model.requires_grad_(True)
    step(model, number)


def _thaws(model: TorchDDP, number: int) -> None:
    """A layer frozen when the model was wrapped is none of the reducer's business later on."""
    model.module[0].weight.requires_grad_(number >= 9)
    step(model, number)


def _fails_and_goes_on(model: TorchDDP, number: int) -> None:
    if number % 4 == 1:
        with contextlib.suppress(RuntimeError):
            model(torch.zeros(3))
    step(model, number)


HABITS: dict[str, Habit] = {
    h.__name__.removeprefix("_"): h
    for h in (
        _module_alone,
        _second_backward,
        _evaluates_between,
        _infers,
        _takes_turns,
        _thaws,
        _fails_and_goes_on,
    )
}


def keeps(habit: str) -> dict[str, Any]:
    """Trains with both wrappers through the whole of planning and says where their gradients differed."""

    def build() -> nn.Module:
        model: Any = net()
        if habit == "thaws":
            model[0].weight.requires_grad_(False)
        return model  # type: ignore[no-any-return]

    theirs, ours = TorchDDP(build()), DistributedDataParallel(build(), tuning=QUICK)
    different, after = [], 0
    for number in range(QUICK.most + AFTER):
        for model in (theirs, ours):
            HABITS[habit](model, number)
        if not same_gradients(ours, theirs):
            different.append(number)
        after += ours.report.state == "done"
        if after == AFTER:
            break
    return {"different": different, "state": ours.report.state, "kept": ours.report.plan is not None}


def nothing_to_join() -> dict[str, Any]:
    """In the middle of a trial ranks enter `join`, and the first has no inputs at all."""
    theirs, ours = TorchDDP(net()), DistributedDataParallel(net(), tuning=QUICK)
    for model in (theirs, ours):
        for number in range(9):
            step(model, number)
        with model.join():
            for number in range(3 * dist.get_rank()):
                step(model, number)
        for number in range(AFTER):
            step(model, number)
    return {"same": same_gradients(ours, theirs), "reason": ours.report.reason}


def interrupted() -> dict[str, Any]:
    """Ctrl-C in the middle of an agreement, and the user trains on."""
    theirs, ours = TorchDDP(net()), DistributedDataParallel(net(), tuning=QUICK)
    real, caught = agree.smallest, 0

    def interrupt(*_: Any) -> list[float]:
        raise KeyboardInterrupt

    agree.smallest = interrupt  # type: ignore[assignment]
    try:
        for number in range(12):
            step(theirs, number)
            try:
                step(ours, number)
            except KeyboardInterrupt:
                caught += 1
    finally:
        agree.smallest = real
    return {
        "caught": caught,
        "same": same_gradients(ours, theirs),
        "state": ours.report.state,
        "reason": ours.report.reason,
    }


def different_arguments() -> list[str]:
    """Errors and reasons of ranks with different arguments or environments."""
    rank, said = dist.get_rank(), []
    said.append(DistributedDataParallel(net(), plan=None if rank else "auto").report.reason)
    if rank == 0:
        os.environ["DDP_SET_LAST_BUCKET_CAP"] = "1"
    said.append(DistributedDataParallel(net()).report.reason)
    os.environ.pop("DDP_SET_LAST_BUCKET_CAP", None)
    try:
        DistributedDataParallel(net(), tuning=Tuning(warmup=3 + rank))
    except dovetail.Error as e:
        said.append(str(e))
    said.append(DistributedDataParallel(net(), bucket_cap_mb_list=[0.01, 0.02]).report.reason)
    return said


def dropped_while_planning() -> list[bool]:
    """Whether a module is freed when nobody holds it any more, at every stage of planning."""
    freed = []
    for steps in (0, 2, 7, 12):
        model = DistributedDataParallel(net(), tuning=QUICK)
        for number in range(steps):
            step(model, number)
        inner = weakref.ref(model.module)
        del model
        gc.collect()
        freed.append(inner() is None)
    return freed


def attached(position: int, **keywords: Any) -> dict[str, Any]:
    """Trains with an attached optimiser through all of planning, in which one contender looks fastest."""
    theirs, ours = TorchDDP(net(width=192)), DistributedDataParallel(net(width=192), tuning=QUICK, **keywords)
    optimizers: list[Any] = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (theirs, ours)]
    optimizers[1] = dovetail.optimizer(optimizers[1], ours)
    tuner: Any = tuner_module
    real, after = tuner.compete, 0

    def fake(plans: Any, *given: Any, use: Callable[[int], None], **more: Any) -> Any:
        now = 0

        def using(which: int) -> None:
            nonlocal now
            now = which
            use(which)

        more["seconds"] = lambda _: 0.5 if now == position % len(plans) else 1.0
        return real(plans, *given, use=using, **more)

    tuner.compete = fake
    try:
        for number in range(QUICK.most + AFTER):
            for model, optimizer in zip((theirs, ours), optimizers, strict=True):
                optimizer.zero_grad()
                model(batch(number)).square().mean().backward()
                optimizer.step()
            after += ours.report.state == "done"
            if after == AFTER:
                break
    finally:
        tuner.compete = real
    report = ours.report
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return {
        "state": report.state + report.reason,
        "kept": report.kept.label if report.kept else None,
        "overlaps": [t.plan.overlap for t in report.trials],
        "kinds": [sorted({b.kind for b in t.plan.buckets}) for t in report.trials],
        "plan": report.plan.overlap if report.plan else None,
        "exchange": ours.exchange is not None and ours.exchange.active,
        "apart": max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs),
    }

"""What training scripts do besides plain iterations: legal with torch's DDP, so legal while planning."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import Tuning
from dovetail.train import agree
from dovetail.train.data_parallel.module import DistributedDataParallel

from .scenarios import QUICK, STEPS, batch, net, preferring, same_gradients

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
    different = []
    for number in range(STEPS):
        for model in (theirs, ours):
            HABITS[habit](model, number)
        if not same_gradients(ours, theirs):
            different.append(number)
    return {"different": different, "state": ours.report.state, "kept": ours.report.plan is not None}


def hook_while_trying() -> dict[str, Any]:
    """A communication hook that comes in the middle of a trial is in charge from then on, with torch's buckets."""
    theirs, ours = TorchDDP(net()), DistributedDataParallel(net(), tuning=QUICK)
    different = []
    for number in range(14):
        for model in (theirs, ours):
            if number == 9:
                model.register_comm_hook(None, fp16_compress_hook)
            step(model, number)
        if not same_gradients(ours, theirs):
            different.append(number)
    sizes = [m._get_ddp_logging_data()["rebuilt_bucket_sizes"] for m in (ours, theirs)]
    return {"different": different, "reason": ours.report.reason, "same buckets": sizes[0] == sizes[1]}


def nothing_to_join() -> dict[str, Any]:
    """In the middle of a trial ranks enter `join`, and the first has no inputs at all."""
    theirs, ours = TorchDDP(net()), DistributedDataParallel(net(), tuning=QUICK)
    for model in (theirs, ours):
        for number in range(9):
            step(model, number)
        with model.join():
            for number in range(3 * dist.get_rank()):
                step(model, number)
        for number in range(STEPS):
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
        for number in range(STEPS):
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


class Idle(nn.Module):
    """Its first parameter never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.net = nn.Linear(2, 2), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def idle_in_a_static_graph() -> str:
    warnings.simplefilter("ignore")
    model = DistributedDataParallel(Idle(), static_graph=True, tuning=QUICK)
    for number in range(8):
        step(model, number)
    return model.report.reason


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
    for steps in (0, 2, 7, STEPS):
        model = DistributedDataParallel(net(), tuning=QUICK)
        for number in range(steps):
            step(model, number)
        inner = weakref.ref(model.module)
        del model
        gc.collect()
        freed.append(inner() is None)
    return freed

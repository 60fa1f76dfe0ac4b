"""Real training with one rank that is slow at a known place, and with none."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module

import dovetail
from dovetail import Tuning
from dovetail.train.data_parallel import rank_watch
from dovetail.train.data_parallel.module import DistributedDataParallel

WATCH = Tuning(warmup=2, measure=8, candidates=2, steps=1, duel=5, duel_steps=1, network_seconds=0.2)
BASE = 0.01
"""Seconds that every rank sleeps in forward and in backward of some layers: what a model that computes would take."""
DELAY = 0.03
"""Seconds that the slow rank sleeps in addition."""


class SleepingBackward(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingLayer(nn.Module):
    """A linear layer that takes at least so many seconds in forward and in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_seconds = self.backward_seconds = BASE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_seconds)
        output: torch.Tensor = SleepingBackward.apply(self.linear(x), self.backward_seconds)  # type: ignore[no-untyped-call]
        return output.relu()


class SleepingNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)  # with buffers, which the first rank sends to the others before forward
        self.blocks = nn.Sequential(*(SleepingLayer(width) for _ in range(3)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(self.norm(self.stem(x))))
        return result


def slow_at(phase: str, *, rank: int, overlap: bool = False, width: int = 64) -> dict[str, Any]:
    """What the report says of a run in which `rank` is slow in `phase`; an empty phase is nobody's."""
    net, mine = SleepingNet(width), rank == dist.get_rank() and phase
    if mine:
        make_slow(net, phase)
    model = DistributedDataParallel(net, tuning=WATCH)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if overlap:
        optimizer = dovetail.optimizer(optimizer, model)
    if phase == "network":
        model.register_comm_hook(None, late_hook if mine else plain_hook)
    for _ in range(2 * WATCH.most):
        iterate(model, optimizer, DELAY if phase == "input" and mine else 0.0)
        if model.report.ranks is not None:
            break
    found = model.report.ranks
    assert found is not None, model.explain()
    return {
        "slow": [[f.rank, f.phase, f.layer, f.seconds, f.share] for f in found.slow],
        "explained": [line for line in model.explain().splitlines() if line.startswith("  ranks")],
        "iteration": found.iteration,
        "waiting": [r.waiting for r in found.ranks],
        "hooks": hooks_left(net),
    }


def make_slow(net: SleepingNet, phase: str) -> None:
    layer: Any = net.blocks[1]
    if phase == "forward":
        layer.forward_seconds += DELAY
    elif phase == "backward":
        layer.backward_seconds += DELAY


def iterate(model: nn.Module, optimizer: Any, late: float = 0.0) -> None:
    time.sleep(late)
    optimizer.zero_grad()
    model(torch.ones(8, 16) + torch.arange(8.0)[:, None]).square().mean().backward()
    optimizer.step()


def plain_hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer().div_(dist.get_world_size())
    work: Any = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def late_hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    time.sleep(DELAY)
    return plain_hook(_, bucket)


for _hook in (plain_hook, late_hook):
    _hook.__annotations__.clear()  # torch compares them with classes, and here they are strings


def hooks_left(net: nn.Module) -> int:
    """Hooks for all modules of the process, and on gradients' way to the parameters of one."""
    return len(torch_module._global_forward_hooks) + len(torch_module._global_forward_pre_hooks)


def dropped_while_watched() -> int:
    """Hooks that are left after the model was dropped in the middle of the watched iterations."""
    model = DistributedDataParallel(SleepingNet(), tuning=WATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WATCH.warmup + 2):
        iterate(model, optimizer)
    assert hooks_left(model.module) == 2
    del model, optimizer
    gc.collect()
    return hooks_left(nn.Identity())


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def becomes_slow(*, rank: int, overlap: bool) -> dict[str, Any]:
    """A rank that is as fast as the others while planning goes on, and slow later; `rank` -1 is nobody."""
    every, read = rank_watch.EVERY, rank_watch.READ
    rank_watch.EVERY, rank_watch.READ = 20, 2
    lines = _Lines()
    logging.getLogger("dovetail").addHandler(lines)
    try:
        net = SleepingNet()
        model = DistributedDataParallel(net, tuning=WATCH)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        if overlap:
            optimizer = dovetail.optimizer(optimizer, model)
        for _ in range(WATCH.most + 2):
            iterate(model, optimizer)
            if model.report.state == "done":
                break
        before = list(lines.lines)
        if rank == dist.get_rank():
            make_slow(net, "forward")
        for _ in range(3 * 20):
            iterate(model, optimizer)
        newest = model.report.ranks
        return {
            "state": model.report.state,
            "before": before,
            "lines": lines.lines[len(before) :],
            "slow": [[f.rank, f.phase, f.layer] for f in newest.slow] if newest else [],
            "hooks": hooks_left(net),
        }
    finally:
        rank_watch.EVERY, rank_watch.READ = every, read
        logging.getLogger("dovetail").removeHandler(lines)


def looks_apart() -> float:
    """The sum of the parameters after looks at other iterations on each rank: the first one has evaluated alone."""
    every = rank_watch.EVERY
    rank_watch.EVERY = 20
    try:
        net = SleepingNet()
        model = DistributedDataParallel(net, tuning=WATCH, find_unused_parameters=True, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(WATCH.most + 2):
            iterate(model, optimizer)
            if model.report.state != "trying":
                break
        if dist.get_rank() == 0:
            with torch.no_grad():
                for _ in range(7):
                    model(torch.ones(8, 16))
        for _ in range(3 * 20):
            iterate(model, optimizer)
        return float(sum(p.double().sum() for p in net.parameters()))
    finally:
        rank_watch.EVERY = every

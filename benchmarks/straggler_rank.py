"""One rank of benchmarks/stragglers.py: trains a small network again and again, each time with another delay."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dovetail
from dovetail import DistributedDataParallel, Tuning
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report

TUNING = Tuning(warmup=3, measure=10, candidates=2, steps=1, duel=5, duel_steps=1, network_seconds=0.1)
CALIBRATE = 3
"""Runs without a delay at the start, whose iterations tell how long one is."""
CHANNELS, SIDE, BATCH = 24, 24, 8


class SleepInBackward(torch.autograd.Function):
    """The identity, which sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.seconds:
            time.sleep(ctx.seconds)
        return gradients[0], None


class DelayedConv(nn.Module):
    """A convolution with a normalisation, which can be made to sleep."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.forward_delay = self.backward_delay = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_delay:
            time.sleep(self.forward_delay)
        output: Tensor = SleepInBackward.apply(self.norm(self.conv(x)), self.backward_delay)  # type: ignore[no-untyped-call]
        return output.relu()


class SmallConvNet(nn.Module):
    def __init__(self, stages: int = 2, blocks: int = 3) -> None:
        super().__init__()
        self.stem = DelayedConv(3, CHANNELS)
        self.stages = nn.ModuleList(
            nn.Sequential(*(DelayedConv(CHANNELS, CHANNELS) for _ in range(blocks))) for _ in range(stages)
        )
        self.head = nn.Linear(CHANNELS, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for stage in self.stages:
            h = stage(h)
        return self.head(h.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def main(runs: str) -> None:
    """`runs` has, for each run, [rank, phase, layer, share of an iteration, whether the optimiser is dovetail's]."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    lengths = [one(-1, "", "", 0.0, False)["iteration"] for _ in range(CALIBRATE)]
    box = [sorted(lengths)[CALIBRATE // 2]]
    dist.broadcast_object_list(box)
    rows = [one(rank, phase, layer, share * box[0], overlap) for rank, phase, layer, share, overlap in json.loads(runs)]
    report({"iteration": box[0], "runs": rows})
    leave()


def one(rank: int, phase: str, layer: str, delay: float, overlap: bool) -> dict[str, Any]:
    """What the report says after the watched iterations."""
    torch.manual_seed(0)
    net, mine = SmallConvNet(), rank == dist.get_rank()
    if mine and layer:
        setattr(net.get_submodule(layer), f"{phase}_delay", delay)
    model = DistributedDataParallel(net, tuning=TUNING)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if overlap:
        optimizer = dovetail.optimizer(optimizer, model)
    if phase == "network":
        model.register_comm_hook([mine and delay], reduced_late)
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(10, (BATCH,))
    for _ in range(TUNING.most):
        if mine and phase == "input":
            time.sleep(delay)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if model.report.ranks is not None:
            break
    found = model.report.ranks
    assert found is not None, model.explain()
    dist.barrier()
    return {
        "iteration": found.iteration,
        "slow": [[f.rank, f.phase, f.layer, f.seconds, f.share, f.confidence] for f in found.slow],
    }


def reduced_late(state: list[float], bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook that does as torch does without one; the last bucket is late."""
    if state[0] and bucket.is_last():
        time.sleep(state[0])
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


reduced_late.__annotations__.clear()  # torch compares them with classes, and here they are strings

if __name__ == "__main__":
    main(*sys.argv[1:])

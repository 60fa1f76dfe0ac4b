"""Ranks that end right after their last step, while the first still needs what that step sent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.emulate.channel import register

STEPS = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 16, generator=generator, dtype=torch.float64)


def alone(ranks: int) -> nn.Sequential:
    """The same training in one process, with all ranks' batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(ranks)])).square().mean().backward()
        optimizer.step()
    return model


def train(way: str, folder: Path) -> None:
    """Trains, and ends `way`; the first rank sends its last values when the others are ending, and stores the model."""
    torch.set_num_threads(1)
    dist.init_process_group(
        register(latency=0.01) if way == "destroys an emulated channel" else "gloo", timeout=timedelta(seconds=60)
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = dovetail.DistributedDataParallel(net(), overlap="forward", plan=None, bucket_cap_mb=0.002)
    optimizer = dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        if step == STEPS - 1 and rank == 0:
            model.exchange.lane.submit("a pause", lambda: _pause([folder / str(r) for r in range(1, ranks)]))
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), folder / "kept.pt")
    else:
        (folder / str(rank)).touch()
    if way.startswith("destroys"):
        dist.destroy_process_group()


def _pause(paths: list[Path]) -> Iterator[None]:
    yield
    _wait_for(paths)


def _wait_for(files: list[Path]) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    time.sleep(0.5)  # a rank that wrongly did not wait for its lane would have ended by then


def main(way: str, folder: Path) -> None:
    if way != "is a fork":
        return train(way, folder)
    child = multiprocessing.get_context("fork").Process(target=train, args=(way, folder))
    child.start()
    child.join()
    os._exit(child.exitcode or 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

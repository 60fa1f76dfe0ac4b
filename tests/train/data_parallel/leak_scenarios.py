"""Ranks that wrap one model after the other, and that join one process group after the other: what is left of them."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.emulate.launch import report

CYCLES = 4


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, list[tuple[int, int]]] = {}
    for way, cycle in (("dropped", _drops), ("destroyed", _destroys), ("torch's", _torchs)):
        found[way] = []
        if way == "dropped":
            _join(folder, way)
        for number in range(CYCLES):
            cycle(folder, number)
            found[way].append(_settled())
        if way == "dropped":
            dist.destroy_process_group()
    report(found)


def _join(folder: Path, name: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=rank, world_size=ranks)


def _trained(second_line: bool = True) -> tuple[Any, Any]:
    model: Any = dovetail.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), plan=None)
    optimizer: Any = torch.optim.Adam(model.parameters())
    if second_line:
        optimizer = dovetail.optimizer(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


def _drops(folder: Path, number: int) -> None:
    model, optimizer = _trained()
    del model, optimizer
    gc.collect()


def _destroys(folder: Path, number: int) -> None:
    """The model outlives its group, and its parameters are whole."""
    _join(folder, f"destroyed{number}")
    model, optimizer = _trained()
    dist.destroy_process_group()
    lanes = [thread.name for thread in threading.enumerate() if thread.name == "dovetail-lane"]
    assert not lanes and float(sum(p.sum() for p in model.parameters())) != 0, lanes
    del model, optimizer


def _torchs(folder: Path, number: int) -> None:
    """The same without a second line, to tell whose a leak is."""
    _join(folder, f"torchs{number}")
    _trained(second_line=False)
    dist.destroy_process_group()


def _settled() -> tuple[int, int]:
    """(threads, descriptors) of this process; threads that are ending get a second to do so."""
    gc.collect()
    least, until = _counted(), time.monotonic() + 1.0
    while time.monotonic() < until:
        time.sleep(0.02)
        least = min(least, _counted())
    return least


def _counted() -> tuple[int, int]:
    threads, descriptors = (len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd"))
    return threads, descriptors


if __name__ == "__main__":
    main(Path(sys.argv[1]))

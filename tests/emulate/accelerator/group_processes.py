"""Ranks that begin their process group themselves: `python -m tests.emulate.accelerator.group_processes NAME`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, PrefixStore, TCPStore, set_debug_level

from dovetail.emulate import accelerator
from dovetail.emulate.launch import report

from .group_scenarios import HANGS, device, failure, line, synchronize


def ways_to_begin() -> dict[str, Any]:
    """What each way of `init_process_group` gives, one after the other; then, what splitting gives."""
    accelerator.load()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = torch.device("emu", rank)
    torch.accelerator.set_device_index(rank)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    ways: dict[str, dict[str, Any]] = {
        "by name": {"backend": "eccl"},
        "by device": {"backend": "cpu:gloo,emu:eccl"},
        "bare": {},
        "bound": {"backend": "eccl", "device_id": here},
        "device only": {"device_id": here},
        "checked by torch too": {"backend": "eccl"},
    }
    found: dict[str, Any] = {}
    for way, given in ways.items():
        set_debug_level(DebugLevel.DETAIL if "checked" in way else DebugLevel.OFF)
        dist.init_process_group(store=PrefixStore(way, store), rank=rank, world_size=size, **given)
        x = torch.full((2,), float(rank + 1), device=here)
        dist.all_reduce(x)
        backend = dist.distributed_c10d._get_default_group()._get_backend(here)
        found[way] = [x[0].item(), backend.name()]
        if way == "by device":
            y = torch.ones(2)
            dist.all_reduce(y)
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, {"rank": rank})
            found["with the CPU"] = [y[0].item(), objects]
        if way == "bound":
            found |= bound_to_a_device(here)
        dist.destroy_process_group()
    return found


def bound_to_a_device(here: torch.device) -> dict[str, Any]:
    """What only a group that is bound to a device can do, and may not."""
    rank = dist.get_rank()
    other = torch.device("emu", 1 - rank)
    found: dict[str, Any] = {"other device": line(lambda: dist.all_reduce(torch.ones(2, device=other)))}
    alone = dist.split_group(split_ranks=[[0], [1]])
    together = dist.split_group(split_ranks=[[0, 1]])
    sums = []
    for group in (alone, together):
        x = torch.full((2,), float(rank + 1), device=here)
        dist.all_reduce(x, group=group)
        sums.append(x[0].item())
    found["split"] = sums
    some = dist.new_group([1])
    x = torch.ones(2, device=here)
    if rank == 1:
        dist.all_reduce(x, group=some)
    found["some"] = x[0].item()
    # Bound to a device, NCCL puts messages onto the stream of collectives, one behind the other.
    y = torch.full((2,), float(rank), device=here)
    work = dist.isend(y, 1) if rank == 0 else dist.irecv(y, 0)
    assert work is not None
    work.wait()
    found["message"] = y[0].item()
    return found


def survives_the_other_rank() -> dict[str, Any]:
    """Kills the other rank while a collective waits for it, and while none does."""
    accelerator.load()
    os.environ["WORLD_SIZE"] = "2"
    victim = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "victim"], env=os.environ | {"RANK": "1", "LOCAL_RANK": "1"}
    )
    try:
        dist.init_process_group("cpu:gloo,emu:eccl", timeout=timedelta(seconds=HANGS))
        here = device()
        x = torch.ones(3, device=here)
        dist.all_reduce(x)
        synchronize()
        work = dist.all_reduce(x, async_op=True)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        begin = time.monotonic()
        said = {"device": failure(lambda: None), "wait": line(lambda: work.wait())}
        said["next call"] = line(lambda: dist.broadcast(x, 0))
        dist.destroy_process_group()
        return said | {"seconds": time.monotonic() - begin, "kernels": (x * 0 + 1).sum().item()}
    finally:
        victim.kill()
        victim.wait()


def victim() -> None:
    accelerator.load()
    dist.init_process_group("cpu:gloo,emu:eccl", timeout=timedelta(seconds=HANGS))
    dist.all_reduce(torch.ones(3, device=device()))
    synchronize()
    time.sleep(HANGS)


if __name__ == "__main__":
    named: dict[str, Callable[[], Any]] = {f.__name__: f for f in (ways_to_begin, survives_the_other_rank, victim)}
    report(named[sys.argv[1]]())

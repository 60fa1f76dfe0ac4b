"""One rank on a host of the fabric: `python -m dovetail.fabric.disturbed.worker …`, started by `disturbed_run.py`.

It joins a gloo process group over the host's own device and prints one JSON line per iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

DEVICE = "eth0"


def _join(arguments: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.master}:{arguments.port}",
        rank=arguments.rank,
        world_size=arguments.world,
        timeout=timedelta(seconds=120),
    )


def report(iteration: int, loss: float, seconds: float) -> None:
    print(json.dumps({"iteration": iteration, "loss": loss, "seconds": seconds}), flush=True)


def train(arguments: argparse.Namespace) -> None:
    """A small classifier on data made from a seed, with torch's own DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(7)
    width = arguments.width
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + arguments.rank)
    rule = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    for iteration in range(arguments.iterations):
        begin = time.perf_counter()
        x = torch.randn(16, 64, generator=data)
        loss = torch.nn.functional.cross_entropy(parallel(x), (x @ rule).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(iteration, loss.item(), time.perf_counter() - begin)


def main(body: Callable[[argparse.Namespace], None] = train) -> None:
    """Joins the process group and runs `body`, which reports every iteration."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--rank", "--world", "--port", "--iterations", "--width"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master", required=True)
    arguments = parser.parse_args()
    _join(arguments)
    import torch.distributed as dist

    body(arguments)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()

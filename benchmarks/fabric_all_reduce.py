"""One rank of an all-reduce over a fabric, started by benchmarks/fabric.py on a host: times all-reduces of one size."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from dovetail.fabric.disturbed import worker


def all_reduce(arguments: argparse.Namespace) -> None:
    """All-reduces of `--width` floats."""
    tensor = torch.ones(arguments.width)
    for iteration in range(arguments.iterations):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        worker.report(iteration, 0.0, time.perf_counter() - begin)
        tensor.fill_(1.0)


if __name__ == "__main__":
    worker.main(all_reduce)

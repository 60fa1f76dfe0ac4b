"""The far end of a tensor channel, in a process of its own: test_tensor_channel.py starts it."""

from __future__ import annotations

import os
import sys
import time

import torch

from dovetail.cluster.job.tensor_channel import join

SIZES = (1000, 0, 37)
LIMIT = 300.0
"""Seconds after which a test counts as hanging."""


def tensors(fill: float) -> list[torch.Tensor]:
    """Tensors as in an arena: parameters, no elements for one dtype, and something that is not float32."""
    made = [torch.arange(n, dtype=torch.float32) + fill for n in SIZES]
    return [*made, torch.full((3,), int(fill), dtype=torch.int64)]


def executor(port: str, name: str, tasks: str, end: str) -> None:
    """Receives parameters and sends back ten times their values, `tasks` times; then ends as told."""
    torch.set_num_threads(1)
    channel = join(("127.0.0.1", int(port)), name, local="127.0.0.1", timeout=LIMIT)
    for _ in range(int(tasks)):
        got = tensors(-1.0)
        channel.receive(got)
        channel.send([10 * t for t in got])
    if end == "hang":
        print("hanging", flush=True)
        time.sleep(2 * LIMIT)
    if end == "die":
        os._exit(9)
    channel.close()


if __name__ == "__main__":
    executor(*sys.argv[1:])

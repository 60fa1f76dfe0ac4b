"""Checks that go wrong in every way in which a machine can, for the tests of the doctor. Ranks import them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dovetail.doctor import checks
from dovetail.doctor.checks import Finding
from dovetail.doctor.trainings import LEARNING_RATE, Place


def fine(place: Place) -> Finding:
    dist.barrier()
    return Finding("nothing to complain about", difference=0.0)


def hangs(place: Place) -> Finding:
    if place.rank == 0:
        never = threading.Event()
        never.wait()
    dist.barrier()
    return Finding("not reached")


def dies(place: Place) -> Finding:
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return Finding("not reached")


def is_no_number(place: Place) -> Finding:
    return Finding("compared", difference=float("inf"))


def races(place: Place) -> Finding:
    """A stream reads what another one writes, and nothing orders the two."""
    written = torch.ones(4, device=place.device) * 2
    with torch.Stream(place.device):
        written.sum()
    return Finding("not reached")


def _too_fast(check: Callable[[Place], Finding]) -> Callable[[Place], Finding]:
    """The check with a learning rate that is 1 % too large in what it checks, and right in its reference."""

    def run(place: Place) -> Finding:
        swapped: Any = checks
        real, made = swapped.sgd, 0

        def sgd(parameters: Iterable[nn.Parameter]) -> Any:
            nonlocal made
            optimizer = real(parameters)
            if not made:
                optimizer.param_groups[0]["lr"] = 1.01 * LEARNING_RATE
            made += 1
            return optimizer

        swapped.sgd = sgd
        try:
            return check(place)
        finally:
            swapped.sgd = real

    return run


torch_ddp = _too_fast(checks.torch_ddp)
one_line = _too_fast(checks.one_line)
two_lines = _too_fast(checks.two_lines)
bucket_kinds = _too_fast(checks.bucket_kinds)
partial_backprop = _too_fast(checks.partial_backprop)
burst = _too_fast(checks.burst)

"""The device that a test's scenarios run on: the CPU, or the emulated accelerator in this rank's process.

Scenarios put their models and batches there with `place`. On the accelerator every scenario ends with a look at what
its race detector and its kernels have found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

from dovetail.emulate import accelerator

T = TypeVar("T", bound=torch.Tensor | torch.nn.Module)

_where = torch.device("cpu")


def begin(device: str) -> None:
    """Makes `device` that of all scenarios in this process: "cpu", "emu", or "emu:1" which is not the current one."""
    global _where
    if device != "cpu":
        accelerator.load()
        accelerator.set_detector("collect")
    _where = torch.device(device)


def device() -> torch.device:
    return _where


def on_accelerator() -> bool:
    return _where.type != "cpu"


def place(thing: T) -> T:
    """A tensor on the device, or a module whose parameters and buffers are moved there."""
    return thing.to(_where)  # type: ignore[return-value]  # a module returns itself


def check() -> None:
    """Fails if a scenario has raced, or if one of its kernels has failed."""
    if on_accelerator():
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        races = accelerator.races(clear=True)
        assert not races, "\n".join(races)


@contextmanager
def side_stream() -> Iterator[None]:
    """Work inside is queued in a stream of the device beside its current one; on the CPU nothing changes."""
    if not on_accelerator():
        yield
        return
    current, side = torch.accelerator.current_stream(_where), torch.Stream(_where)
    side.wait_stream(current)
    with side:
        yield
    current.wait_stream(side)


def reuse_memory() -> None:
    """Lets the device's first stream take memory, which shows whether what was freed there may still be in use."""
    with torch.get_device_module(_where).default_stream(_where):
        torch.empty(1, device=_where)


def kernels_vary(most: float) -> AbstractContextManager[None]:
    """A context in which every kernel of the accelerator takes up to `most` seconds longer."""
    return accelerator.durations(jitter=most) if on_accelerator() and most else nullcontext()

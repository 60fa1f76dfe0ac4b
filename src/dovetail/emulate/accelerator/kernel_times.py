"""How long kernels take: durations on the devices' own clock.

A stream is busy with a kernel for as long as the CPU computes it, or for the duration given here if that is longer.
Sleeps that last too long do not add up: the next kernel begins when the one before it should have ended, and events
carry these times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch

from dovetail.core.errors import Error

from . import torch_module


def set_durations(
    seconds: float = 0.0, *, jitter: float = 0.0, seed: int = 0, kernels: Mapping[str, float] | None = None
) -> None:
    """Every kernel launched from now on takes `seconds`, and up to `jitter` seconds more.

    `kernels` has durations by name: "aten::addmm", for all its overloads, or "aten::add.Tensor"; "copy H2D",
    "copy D2H", "copy D2D", and the process group's operations. The jitter is random, and the same for the same `seed`
    as long as launches come in the same order on each stream.
    """
    table = dict(kernels or {})
    for name, value in {"seconds": seconds, "jitter": jitter, **table}.items():
        if not (math.isfinite(value) and value >= 0):
            raise Error(f"durations: {name}: expected seconds, got {value!r}")
    torch_module.loaded().set_durations(seconds, jitter, seed, table)


@contextlib.contextmanager
def durations(
    seconds: float = 0.0, *, jitter: float = 0.0, seed: int = 0, kernels: Mapping[str, float] | None = None
) -> Iterator[None]:
    """As `set_durations`, for what is launched inside a `with` block."""
    before = torch_module.loaded().durations()
    set_durations(seconds, jitter=jitter, seed=seed, kernels=kernels)
    try:
        yield
    finally:
        torch_module.loaded().set_durations(*before)


def occupy(seconds: float, *, since: torch.Event | None = None, device: torch_module.DeviceLike = None) -> None:
    """Keeps the current stream busy for `seconds`; with `since`, until that long after the stream reached this event.

    Time in which the stream has waited for other streams since then does not count.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise Error(f"occupy: expected seconds, got {seconds!r}")
    torch_module.loaded().occupy(seconds, torch_module.index_of(device), 0 if since is None else since.event_id)


@contextlib.contextmanager
def taking(seconds: float, *, device: torch_module.DeviceLike = None) -> Iterator[None]:
    """What is launched on the current stream inside a `with` block takes `seconds` there, all together."""
    where = torch.device("emu", torch_module.index_of(device))
    begin = torch.Event(where, enable_timing=True)
    begin.record(torch.accelerator.current_stream(where.index))
    yield
    occupy(seconds, since=begin, device=where)

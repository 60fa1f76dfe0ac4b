"""What a device tells about a training: how often the host waited for it, and whether streams raced.

The emulated accelerator counts both. CUDA tells of waits by a warning each (torch.cuda.set_sync_debug_mode), which was
not tried on the hardware at hand. Others tell nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from .diagnosis import EMULATED


def emulator() -> ModuleType:
    """The emulated accelerator; the first call in a process loads it, the first on a machine builds it."""
    from dovetail.emulate import accelerator

    accelerator.load()
    return accelerator


def prepare(device: str) -> None:
    """Makes devices of this type known to torch."""
    if device == EMULATED:
        emulator()


@dataclass
class HostSyncs:
    """Host syncs inside a block, once it has ended."""

    total: int | None = None
    """None where the device does not count them."""
    places: tuple[str, ...] = ()
    """Lines of Python at which the host waited, each once."""


@contextlib.contextmanager
def host_syncs(device: torch.device) -> Iterator[HostSyncs]:
    """Counts how often the host waits for the device inside the block."""
    found = HostSyncs()
    if device.type == EMULATED:
        with emulator().count_syncs() as counted:
            yield found
        found.total = counted.total
        found.places = tuple(f"{sync.what} at {sync.where}" for sync in counted.records)
    elif device.type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [warning for warning in said if "synchroniz" in str(warning.message)]
        found.total = len(waits)
        found.places = tuple({f"{'/'.join(w.filename.split('/')[-2:])}:{w.lineno}": None for w in waits})
    else:
        yield found


def races(device: torch.device) -> list[str]:
    """Races that the device has seen since the last call, a line each."""
    return list(emulator().races(clear=True)) if device.type == EMULATED else []

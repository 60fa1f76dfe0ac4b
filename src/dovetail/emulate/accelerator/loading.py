"""Makes the emulated accelerator a device of torch, once per process."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from dovetail.core.errors import Error

from . import extension, handovers, process_group, torch_module

DEVICE = "emu"
"""The name of the device type: torch.device("emu", 0)."""
DEFAULT_DEVICES = 2
DEFAULT_BYTES = 16 << 30
MOST_DEVICES = 64
PASSING_ON = ("emulate/accelerator/", "emulate/training/", "train/data_parallel/module.py")
"""Code of dovetail's between a caller and torch: races and waits are told with the caller's line."""
LAST_SECONDS = 10.0
"""Seconds that a process waits, at its end, for what still runs on its streams."""

_guard = threading.Lock()


class Race(RuntimeError):
    """Two kernels touch the same memory, one of them writes, and nothing orders them: raised at the later launch."""


def is_loaded() -> bool:
    """Whether `load` has been called in this process."""
    return torch_module.native is not None


def load(*, devices: int | None = None, memory: int | None = None, detector: str | None = None) -> None:
    """Makes torch.device("emu") available; the first call on a machine compiles the extension, in about a minute.

    `devices` is how many there are, `memory` the bytes of each, `detector` what a race does: "raise" (Race, at the
    launch), "collect" (`races` lists it) or "off". What is not given is taken from the environment variables
    DOVETAIL_EMULATED_DEVICES, DOVETAIL_EMULATED_MEMORY and DOVETAIL_EMULATED_DETECTOR, or is 2, 16 GiB and "raise".
    Another call does no harm; it can change the memory and the detector, but not the number of devices.
    """
    count = _whole(devices, "DOVETAIL_EMULATED_DEVICES", DEFAULT_DEVICES, 1, MOST_DEVICES)
    room = _whole(memory, "DOVETAIL_EMULATED_MEMORY", DEFAULT_BYTES, 1, 1 << 46)
    mode = detector or os.environ.get("DOVETAIL_EMULATED_DETECTOR") or "raise"
    if mode not in handovers.MODES:
        raise Error(f"DOVETAIL_EMULATED_DETECTOR: expected raise, collect or off, got {mode!r}")
    with _guard:
        if is_loaded():
            _again(devices, memory, detector)
            return
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise Error(
                f"the emulated accelerator cannot be loaded: the device {taken!r} has its place in torch already"
            )
        native: Any = extension.load_extension()
        backend_registration.rename_privateuse1_backend(DEVICE)
        native.start(count, room)
        native.set_library_folders(
            [
                f"{Path(torch.__file__).parent}{os.sep}",
                *(f"{Path(__file__).parents[2]}/{code}" for code in PASSING_ON),
            ]
        )
        native.set_race_type(Race)
        torch_module.open_with(native)
        torch._register_device_module(DEVICE, torch_module)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        handovers.set_mode(native, mode)
        process_group.register(native)
        atexit.register(native.close, LAST_SECONDS)


def _again(devices: int | None, memory: int | None, detector: str | None) -> None:
    native = torch_module.native
    if devices is not None and devices != native.device_count():
        raise Error(
            f"the emulated accelerator is loaded with {native.device_count()} devices: it cannot have {devices} now"
        )
    for device in range(native.device_count() if memory is not None else 0):
        native.set_memory_limit(device, memory)
    if detector is not None:
        handovers.set_mode(native, detector)


def _whole(given: int | None, variable: str, default: int, least: int, most: int) -> int:
    text = str(given) if given is not None else os.environ.get(variable) or str(default)
    if not text.isdecimal() or not least <= int(text) <= most:
        raise Error(f"{variable}: expected a whole number from {least} to {most}, got {text!r}")
    return int(text)

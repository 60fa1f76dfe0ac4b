"""An emulated accelerator: a device of torch with a GPU's rules, for machines without one."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import Any

import torch

from dovetail.core.errors import Error

from . import torch_module

DEVICE = "emu"
_guard = threading.Lock()


class Race(RuntimeError):
    """Two accesses to memory that nothing orders, one of them a write."""


def is_loaded() -> bool:
    return torch_module.native is not None


def load(*, devices: int | None = None, memory: int | None = None) -> None:
    """Makes the device available."""
    with _guard:
        if is_loaded():
            return
        from . import extension

        if torch._C._get_privateuse1_backend_name() != "privateuseone":
            raise Error("another device has taken torch's place for private backends")
        count = devices or int(os.environ.get("DOVETAIL_EMULATED_DEVICES", "2"))
        torch.utils.rename_privateuse1_backend(DEVICE)
        native: Any = extension.load_extension()
        native.start(count, memory or (16 << 30))
        native.set_library_folders([str(Path(torch.__file__).parent) + os.sep])
        native.set_race_type(Race)
        native.introduce()
        torch_module.native = native
        torch_module.default_generators = tuple(native.default_generator(i) for i in range(count))
        torch._register_device_module(DEVICE, torch_module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        atexit.register(native.close, 10.0)
        if hasattr(native, "Group"):
            from . import process_group

            process_group.register(native)

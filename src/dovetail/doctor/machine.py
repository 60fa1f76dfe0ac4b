"""What is here: versions, devices, and the process group that torch would choose. `python -m dovetail.doctor.machine`.

It runs in a process of its own, since a driver that hangs or crashes must not take the doctor with it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import dovetail
from dovetail.core.errors import Error
from dovetail.emulate.launch import report

from .diagnosis import Machine
from .instruments import prepare

SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "HIP_", "ROCR_", "OMP_NUM_THREADS", "DOVETAIL_PLAN", "DDP_")
"""How the names of environment variables begin that change how ranks compute or communicate."""
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
PATIENCE = 10.0  # seconds for another program to answer


def machine(wanted: str | None) -> Machine:
    """This machine, with devices of the `wanted` type; by default torch's accelerator, or else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    device = wanted or (found.type if found is not None else "cpu")
    prepare(device)
    count = _count(device)
    return Machine(
        dovetail=dovetail.__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        device=device,
        devices=tuple(_described(device, index) for index in range(count)),
        backend=str(dist.get_default_backend_for_device(device)),
        runtime=_runtime(device),
        settings={name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS)},
    )


def _count(device: str) -> int:
    """Number of devices; an Error where torch has none of this type."""
    if device == "cpu":
        return 0
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type != device:
        have = f"cpu and {there.type}" if there is not None else "cpu"
        raise Error(f"device: expected one that torch {torch.__version__} has here ({have}), got {device!r}")
    return torch.accelerator.device_count()


def _described(device: str, index: int) -> str:
    """A device's name, with its memory where torch tells it."""
    module: Any = torch.get_device_module(device)
    name = module.get_device_name(index) if hasattr(module, "get_device_name") else device
    memory = 0
    with contextlib.suppress(Exception):  # a detail that is nice to have, and that every device spells differently
        memory = int(module.get_device_properties(index).total_memory)
    return f"{name}, {memory / 2**30:.0f} GiB" if memory else str(name)


def _runtime(device: str) -> dict[str, str]:
    """Versions of what lies between torch and the device. What does not answer is left out."""
    if device != "cuda":
        return {}
    asked: dict[str, Callable[[], Any]] = {
        "driver": _driver,
        "CUDA": lambda: torch.version.cuda,
        "HIP": lambda: torch.version.hip,
        "cuDNN": torch.backends.cudnn.version,
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
    }
    found: dict[str, str] = {}
    for name, ask in asked.items():
        with contextlib.suppress(Exception):
            if answer := ask():
                found[name] = str(answer)
    return found


def _driver() -> str:
    said = subprocess.run(DRIVER, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.split()
    return said[0] if said else ""


if __name__ == "__main__":
    try:
        report(msgspec.to_builtins(machine(sys.argv[1] if len(sys.argv) > 1 else None)))
    except Error as e:
        print(e, file=sys.stderr)
        sys.exit(1)

"""Accelerators by name, as torch names them: "cuda:0", "xpu:1", or "emu:0" for the emulated one.

`dovetail cluster up` reads names without torch (`parse`) and has another process look whether they exist (`probe`), so
that no device is opened in a process that forks or stays. The executor of a device opens it (`open_device`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dovetail.core.errors import Error, first_line

if TYPE_CHECKING:
    import torch

EMULATED = "emu"
"""Device type of the emulated accelerator (`dovetail.emulate.accelerator`)."""
SHARE = 0.9
"""Share of a device's memory that jobs may use by default: libraries and contexts need the rest."""
BUILD_SECONDS = 600.0
"""Seconds for finding the devices: the emulated accelerator is compiled when it is used for the first time."""
_NAME = re.compile(r"[a-z][a-z0-9_]*:(0|[1-9][0-9]{0,3})")


def parse(text: str) -> tuple[str, ...]:
    """Names of a list as "cuda:0,cuda:1". An Error if one is no name, appears twice, or is of another type."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if not _NAME.fullmatch(name):
            raise Error(f"--accelerators: expected names like cuda:0,cuda:1 or emu:0, got {name!r}")
        if names.count(name) > 1:
            raise Error(f"--accelerators: expected each device once, got {name} {names.count(name)} times")
    types = dict.fromkeys(name.partition(":")[0] for name in names)
    if len(types) > 1:
        raise Error(f"--accelerators: expected devices of one type, got {' and '.join(types)}")
    if names[0].startswith("cpu:"):
        raise Error("--accelerators: a CPU's cores are the devices that --devices counts")
    return names


def is_emulated(name: str) -> bool:
    """Whether the name is one of the emulated accelerator; empty for a device that is no accelerator."""
    return name.partition(":")[0] == EMULATED


def load(names: Sequence[str], memory: int | None = None) -> None:
    """Loads what these devices need in this process; real ones need nothing. `memory`: bytes of each emulated one."""
    if is_emulated(names[0]):
        from dovetail.emulate import accelerator

        accelerator.load(devices=1 + max(int(name.partition(":")[2]) for name in names), memory=memory)


def open_device(name: str) -> torch.device:
    """Makes a device that has been loaded this process's current one. An Error if there is no such device."""
    import torch

    kind, _, index = name.partition(":")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        there = f"this machine has {found.type}" if found is not None else "torch finds no accelerator here"
        raise Error(f"accelerator {name}: expected one of this type, {there}")
    count = torch.accelerator.device_count()
    if int(index) >= count:
        raise Error(f"accelerator {name}: expected a number below {count}: so many devices of this type are here")
    device = torch.device(kind, int(index))
    torch.accelerator.set_device_index(device)
    return device


def probe(names: Sequence[str], environment: Mapping[str, str], *, timeout: float = BUILD_SECONDS) -> int:
    """Bytes that jobs may use of each of these devices, as a process with this environment finds them.

    An Error of one line if one of them cannot be opened.
    """
    command = [sys.executable, "-m", "dovetail.cluster.accelerators", *names]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Error(f"accelerators {', '.join(names)}: not found within {timeout:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        complaint = done.stderr.strip().splitlines() or [f"the search ended with code {done.returncode}"]
        raise Error(complaint[-1])
    return int(json.loads(lines[-1]))


def _main(names: Sequence[str]) -> int:
    import torch

    sizes: list[int] = []
    try:
        load(names)
        for name in names:
            _, total = torch.accelerator.get_memory_info(open_device(name))
            sizes.append(int(total * SHARE))
    except Error as e:
        print(e, file=sys.stderr)
        return 1
    except Exception as e:  # whatever a driver or a compiler says
        print(f"accelerator {names[len(sizes)]}: {first_line(e)}", file=sys.stderr)
        return 1
    print(json.dumps(min(sizes)))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))

"""Runs functions of test modules in real processes, one per rank, joined by a gloo process group on loopback."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from dovetail.emulate.launch import launch, report
from dovetail.emulate.shaped_network import ShapedNetwork
from tests.paths import ROOT

CPU = "cpu"
BACKENDS = {CPU: "gloo", "emu": "eccl"}
"""Each device's own backend."""


def run_ranks(
    function: Callable[..., Any],
    *,
    ranks: int = 2,
    timeout: float = 900,
    device: str = CPU,
    backend: str = "",
    **given: Any,
) -> list[Any]:
    """What `function(**given)` returned on each rank, as JSON carries it."""
    return [
        reports[0]
        for reports in run_all([(function, given)], ranks=ranks, timeout=timeout, device=device, backend=backend)
    ]


def run_all(
    calls: Sequence[tuple[Callable[..., Any], dict[str, Any]]],
    *,
    ranks: int = 2,
    timeout: float = 900,
    network: ShapedNetwork | None = None,
    device: str = CPU,
    backend: str = "",
) -> list[list[Any]]:
    """Several calls, one after the other, in the same processes: starting those takes longer than most calls do.

    They run on `device` (see `devices.place`) and with its own backend, or with `backend`: "default" is none given.
    """
    named = [(f"{function.__module__}:{function.__name__}", given) for function, given in calls]
    results = launch(
        ["-m", "tests.ranks", json.dumps(named), device, backend or BACKENDS[device.partition(":")[0]]],
        ranks=ranks,
        network=network,
        timeout=timeout,
        env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    return [r.report for r in results]


def _main(calls: str, device: str, backend: str) -> None:
    import torch
    import torch.distributed as dist

    from dovetail.emulate.channel import leave
    from tests import devices

    torch.set_num_threads(1)
    devices.begin(device)
    dist.init_process_group(None if backend == "default" else backend, timeout=timedelta(seconds=300))
    reports = []
    for what, given in json.loads(calls):
        module, name = what.split(":")
        reports.append(getattr(importlib.import_module(module), name)(**given))
        devices.check()
    report(reports)
    leave()


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""Adopts a rank and the Python processes that it starts: scripts that spawn their ranks themselves are planned too.

A process is adopted before its own code runs, by hooks that wait for torch to be imported. Forked children have them
already. For others the environment puts the folder `site` first on Python's path: its sitecustomize adopts them.
"""

from __future__ import annotations

import os
from pathlib import Path

from dovetail.core.import_hooks import when_imported
from dovetail.train.integrations.substitute import substitute

from . import closing_line

ADOPT = "DOVETAIL_TRAIN_ADOPT"
"""Environment variable: Python processes that have it adopt themselves."""


def adopt() -> None:
    """From now on, constructing torch's DistributedDataParallel makes dovetail's, in this process."""
    when_imported(
        "torch.nn.parallel.distributed",
        lambda module: substitute(module.DistributedDataParallel, left_alone=closing_line.left_alone),
    )
    when_imported(
        "dovetail.train.data_parallel.module", lambda module: closing_line.observe(module.DistributedDataParallel)
    )


def hand_down() -> None:
    """Lets the Python processes that this one starts adopt themselves."""
    folder = str(Path(__file__).parent / "site")
    before = os.environ.get("PYTHONPATH", "")
    if before.partition(os.pathsep)[0] != folder:
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else folder
    os.environ[ADOPT] = "1"

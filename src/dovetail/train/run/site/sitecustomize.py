"""Python imports this at its start, before the program: see `dovetail.train.run.descendants`.

Python takes the first sitecustomize on its path only. So the one that is hidden by this one is run here.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _run_hidden() -> None:
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p).resolve() != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    _run_hidden()
    if os.environ.get("DOVETAIL_TRAIN_ADOPT"):
        from dovetail.train.run.descendants import adopt

        adopt()

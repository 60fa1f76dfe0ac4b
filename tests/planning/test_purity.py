"""core and planning are plain: importing every module of theirs loads neither torch nor ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WALK = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
print(*sorted({"torch", "ray"} & set(sys.modules)))
"""


@pytest.mark.parametrize("packages", [["dovetail.core"], ["dovetail.planning"], ["dovetail.core", "dovetail.planning"]])
def test_core_and_planning_import_neither_torch_nor_ray(packages: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WALK, *packages], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""

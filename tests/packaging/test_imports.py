"""`import dovetail` is light: no package that takes long to load comes with it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    *("torch", "numpy", "matplotlib", "fastapi", "uvicorn", "networkx", "yaml", "ray", "transformers", "accelerate"),
    *("lightning", "sklearn", "rich", "typer"),
}


def test_importing_dovetail_loads_no_other_package() -> None:
    code = "import sys, dovetail; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "dovetail" in loaded and not loaded & HEAVY

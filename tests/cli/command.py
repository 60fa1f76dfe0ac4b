"""The command line as tests call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from dovetail.cli.app import app

COMMAND = [sys.executable, "-m", "dovetail"]


def run(*arguments: str | Path) -> Result:
    """In this process: fast."""
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="dovetail")


def shell(*arguments: str | Path, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """As a user runs it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, **options)

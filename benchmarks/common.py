"""What every benchmark here shares: its arguments, the shape of its JSON, and how checks are printed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.core.files import write_text

console = Console(width=int(os.environ.get("COLUMNS", "118")))


@dataclass(frozen=True)
class Check:
    """One promise, in its own words, with what was measured."""

    name: str
    value: str
    target: str
    holds: bool


def arguments(about: str) -> argparse.Namespace:
    return parser(about).parse_args()


def parser(about: str) -> argparse.ArgumentParser:
    """For a benchmark that takes more than every benchmark does."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="within about two minutes: fewer cells, fewer rounds")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    return made


def machine() -> dict[str, Any]:
    import torch

    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def finish(
    name: str,
    args: argparse.Namespace,
    cells: list[dict[str, Any]],
    checks: list[Check],
    *,
    tables: dict[str, list[str]] | None = None,
) -> None:
    """Prints the checks, failing ones too, and writes the JSON. A failed check is a result, not an error.

    `tables` are lines of Markdown that `markdown.py --into` puts between the markers of their names.
    """
    table = Table(title="checks", title_justify="left")
    for column in ("promise", "measured", "target", "holds"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, check.value, check.target, "yes" if check.holds else "[bold red]NO[/]")
    console.print(table)
    if args.json is not None:
        result = {
            "benchmark": name,
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "cells": cells,
            "checks": [asdict(c) for c in checks],
            "tables": tables or {},
        }
        write_text(args.json, json.dumps(result, indent=1) + "\n")
        console.print(f"written to {args.json}")


def quantiles(values: list[float] | tuple[float, ...]) -> dict[str, float]:
    low, first, median, third, high = (float(q) for q in np.quantile(values, [0.1, 0.25, 0.5, 0.75, 0.9]))
    return {"low": low, "first": first, "median": median, "third": third, "high": high}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds one JSON line to a study's file, on the disk when this returns. One write: two processes may share it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())

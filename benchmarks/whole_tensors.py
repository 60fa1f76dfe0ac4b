"""Optimisers that need whole tensors: what a rank computes and keeps, against every rank doing everything.

A small GPT on real ranks on loopback: Muon updates its matrices and AdamW the rest, on every rank under torch's DDP
("replicated") and shared out by dovetail.optimizer ("shared"). Every parameter that Muon updates has an owner. A rank's
time is the processor time of its thread in `step()`, which other ranks on the same cores do not change.
Run: python benchmarks/whole_tensors.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from common import Check, arguments, console, finish
from dovetail.core.errors import Error
from dovetail.emulate.launch import launch

RANK = str(Path(__file__).with_name("whole_tensors_rank.py"))
CONTESTANTS = ("replicated", "shared")
MOST = 1.2
"""Time and state of a rank, in n-ths of what every rank has without sharing."""

Row = dict[str, Any]


def main() -> None:
    args = arguments(__doc__ or "")
    counts, steps = ([2], 3) if args.quick else ([2, 4], 8)
    rows = [measured(name, ranks, steps) for ranks in counts for name in CONTESTANTS]
    show(rows)
    finish("whole_tensors", args, rows, checks(rows), tables={"whole_tensors": markdown(rows)})


def measured(name: str, ranks: int, steps: int) -> Row:
    """The largest figures of any rank: seconds a step and bytes."""
    found = [r.report for r in launch([RANK, name, str(steps)], ranks=ranks, timeout=600)]
    return {
        "contestant": name,
        "ranks": ranks,
        "seconds": max(statistics.median(r["seconds"]) for r in found),
        "state": max(r["state"] for r in found),
        "muon": max(r["muon"] for r in found),
        "losses": found[0]["losses"],
    }


HEADINGS = ["ranks", "", "optimiser, ms a step", "of replicated", "state of Muon, MB", "of replicated", "loss"]


def columns(rows: list[Row], row: Row) -> list[str]:
    alone = next(r for r in rows if r["ranks"] == row["ranks"])
    return [
        str(row["ranks"]),
        row["contestant"],
        f"{row['seconds'] * 1e3:.0f}",
        f"{row['seconds'] / alone['seconds']:.3f}",
        f"{row['muon'] / 1e6:.1f}",
        f"{row['muon'] / alone['muon']:.3f}",
        " → ".join(f"{row['losses'][k]:.4f}" for k in (0, -1)),
    ]


def show(rows: list[Row]) -> None:
    table = Table(title="Muon and AdamW on a small GPT: the largest figures of any rank", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*columns(rows, row))
    console.print(table)


def markdown(rows: list[Row]) -> list[str]:
    lines = [f"| {' | '.join(HEADINGS)} |", "|--:|---" + "|--:" * (len(HEADINGS) - 2) + "|"]
    return [*lines, *(f"| {' | '.join(columns(rows, row))} |" for row in rows)]


def checks(rows: list[Row]) -> list[Check]:
    made = []
    for ranks in sorted({r["ranks"] for r in rows}):
        alone, shared = (r for r in rows if r["ranks"] == ranks)
        for what, key in (("optimiser time", "seconds"), ("state of Muon", "muon")):
            ratio = shared[key] / alone[key]
            made.append(
                Check(
                    name=f"{what} of a rank of {ranks} against replicated",
                    value=f"{ratio:.3f}, {ratio * ranks:.2f} / {ranks}",
                    target=f"≤ {MOST} / {ranks}",
                    holds=ratio <= MOST / ranks,
                )
            )
        apart = float(np.max(np.abs(np.array(shared["losses"]) / np.array(alone["losses"]) - 1)))
        made.append(
            Check(
                name=f"losses of {len(alone['losses'])} steps on {ranks} ranks equal to replicated",
                value=f"largest difference {apart:.1e} of the loss",
                target="differences of rounding (≤ 1e-3: Muon rounds to bfloat16)",
                holds=apart <= 1e-3,
            )
        )
    return made


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/whole_tensors.py: {e}", markup=False)
        sys.exit(1)

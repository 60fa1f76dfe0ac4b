"""Memory of one rank: DDP, ZeroRedundancyOptimizer, FSDP2 and dovetail train the same small GPT with AdamW.

Four ranks on loopback, nothing emulated; every contestant gets processes of its own, and a rank reads its own resident
memory from the kernel. dovetail follows handmade plans (all buckets split; every other bucket whole), so that no figure
depends on timing. The losses are compared, since a contestant that trains something else proves nothing.
Run: python benchmarks/memory.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from common import Check, arguments, console, finish
from dovetail.core.errors import Error
from dovetail.emulate.launch import launch

RANKS, STEPS, QUICK_STEPS = 4, 6, 2
RANK = str(Path(__file__).with_name("memory_rank.py"))
CONTESTANTS = {
    "ddp": "DDP + AdamW",
    "ddp-views": "DDP, gradient_as_bucket_view=True, + AdamW",
    "zero": "the same with ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2, fully_shard per block",
    "both": 'dovetail, memory="time", every other bucket whole',
    "shard": 'dovetail, memory="shard", all buckets split',
}
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024), "MALLOC_TRIM_THRESHOLD_": "0"}
"""Freed memory goes back to the kernel at once, with every contestant: what the allocator holds back is no need."""
MB = 1e6

Row = dict[str, Any]


def main() -> None:
    args = arguments(__doc__ or "")
    rows = [measured(name, QUICK_STEPS if args.quick else STEPS) for name in CONTESTANTS]
    show(rows)
    finish("memory", args, rows, checks(rows), tables={"memory": markdown(rows)})


def measured(name: str, steps: int) -> Row:
    """The largest figures of any rank, in bytes."""
    ranks = [r.report for r in launch([RANK, name, str(steps)], ranks=RANKS, timeout=600, env=ENVIRONMENT)]
    console.print(f"{CONTESTANTS[name]}: {max(r['training'] for r in ranks) / MB:.0f} MB", highlight=False)
    largest = {key: max(r[key] for r in ranks) for key in ("training", "highest", "state", "parameters")}
    # Shares of the state need not be equal: what all ranks hold together says how often each element is kept.
    return {
        "contestant": name,
        "ranks": RANKS,
        **largest,
        "state_of_all": sum(r["state"] for r in ranks),
        "losses": ranks[0]["losses"],
    }


def columns(rows: list[Row], row: Row) -> list[str]:
    ddp = rows[0]
    return [
        CONTESTANTS[row["contestant"]],
        f"{row['training'] / MB:.0f} MB",
        f"{row['training'] / ddp['training']:.2f}",
        f"{row['highest'] / MB:.0f} MB",
        f"{row['state'] / MB:.0f} MB",
        f"{row['state'] / ddp['state']:.2f}",
        " → ".join(f"{loss:.4f}" for loss in (row["losses"][0], row["losses"][-1])),
    ]


HEADINGS = ["", "peak while training", "of DDP", "peak, start included", "optimiser state", "of DDP", "loss"]


def show(rows: list[Row]) -> None:
    table = Table(title=title(rows), title_justify="left")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*columns(rows, row))
    console.print(table)


def title(rows: list[Row]) -> str:
    parameters = rows[0]["parameters"]
    return (
        f"memory of a rank beyond that of the process with a tiny one: GPT, {parameters / 4e6:.0f} million parameters "
        f"({parameters / MB:.0f} MB), AdamW, {RANKS} ranks"
    )


def markdown(rows: list[Row]) -> list[str]:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" + "|--:" * (len(HEADINGS) - 1) + "|"]
    return [*lines, *(f"| {' | '.join(columns(rows, row))} |" for row in rows)]


def checks(rows: list[Row]) -> list[Check]:
    by_name = {r["contestant"]: r for r in rows}
    ddp, shard, both = by_name["ddp"], by_name["shard"], by_name["both"]
    losses = np.array([r["losses"] for r in rows])
    apart = float(np.max(np.abs(losses - losses[0]) / losses[0]))
    others = {n: by_name[n] for n in ("ddp-views", "zero", "fsdp2")}
    return [
        Check(
            name='optimiser state of a rank with memory="shard" against DDP\'s',
            value=f"{shard['state'] / ddp['state']:.3f}",
            target=f"≤ 1/{RANKS} and 2 %",
            holds=shard["state"] <= ddp["state"] / RANKS * 1.02,
        ),
        Check(
            name="optimiser state of a rank with every other bucket whole against DDP's",
            value=f"{both['state'] / ddp['state']:.3f}",
            target="below DDP's, above that of all split",
            holds=shard["state"] < both["state"] < ddp["state"],
        ),
        Check(
            name='peak while training with memory="shard" against DDP\'s',
            value=f"{shard['training'] / ddp['training']:.3f}; "
            + ", ".join(f"{shard['training'] / r['training']:.3f} of {CONTESTANTS[n]}" for n, r in others.items()),
            target="< 1 of DDP's, both ways",
            holds=all(shard["training"] < r["training"] for r in (ddp, others["ddp-views"])),
        ),
        Check(
            name=f"losses of {losses.shape[1]} steps equal to DDP's, every contestant",
            value=f"largest difference {apart:.1e} of the loss",
            target="differences of rounding (≤ 1e-4)",
            holds=apart <= 1e-4,
        ),
    ]


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/memory.py: {e}", markup=False)
        sys.exit(1)

"""False gains: contests of buckets that are all the same, live, between two ranks on loopback.

Every run wraps a small model anew and plans, with torch's own buckets under four names as the candidates. Whoever wins
has won by noise. Every iteration is a real one, with a real reducer for each change of names.
Run: python benchmarks/false_gains.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from common import Check, arguments, console, finish
from dovetail.core.errors import Error
from dovetail.emulate.launch import launch

RANKS, RUNS, QUICK_RUNS = 2, 40, 8
MOST = 0.05
"""Share of the runs, at most, in which noise may win."""
RANK = str(Path(__file__).with_name("false_gains_rank.py"))

Row = dict[str, Any]


def main() -> None:
    args = arguments(__doc__ or "")
    runs = QUICK_RUNS if args.quick else RUNS
    first, *others = (r.report for r in launch([RANK, str(runs)], ranks=RANKS, timeout=60 + 60 * runs))
    rows: list[Row] = first
    for number, row in enumerate(rows, 1):
        console.print(f"{number:3}: {row['result']}", highlight=False)
    finish("false_gains", args, rows, checks(rows, others))


def checks(rows: list[Row], others: list[list[Row]]) -> list[Check]:
    false = [row for row in rows if row["kept"]]
    spread = float(np.median([row["spread"] for row in rows]))
    steps = [row["steps"] for row in rows]
    return [
        Check(
            name=f"a gain is claimed for the same buckets under another name, {len(rows)} runs",
            value=f"{len(false)} of {len(rows)}; steps vary by {spread:.1%}",
            target=f"≤ {MOST:.0%}",
            holds=len(false) <= MOST * len(rows),
        ),
        Check(
            name="iterations until planning is over",
            value=f"{np.median(steps):.0f} (up to {max(steps)})",
            target=f"≤ {rows[0]['most']}",
            holds=max(steps) <= rows[0]["most"],
        ),
        Check(
            name="all ranks come to the same verdict",
            value="yes" if all(mine == rows for mine in others) else "no",
            target="yes",
            holds=all(mine == rows for mine in others),
        ),
    ]


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/false_gains.py: {e}", markup=False)
        sys.exit(1)

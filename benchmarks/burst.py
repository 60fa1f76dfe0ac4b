"""Burst parallelism: (a) plans on published A100 layer times, predicted; (b) plans run by real processes.

(b) has two parts. Exactness: random models, plans, rank sets and batches on 4 and 8 gloo processes against one process.
Time: 8 emulated devices exchange real tensors over rate-limited links (benchmarks/burst_run.py; root is needed).
Run: python benchmarks/burst.py [--quick] [--json FILE] [--into docs/burst.md]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import burst_run
from burst_model import model_study, paper_table
from common import Check, console, finish
from dovetail.core.errors import Error
from pages import arguments, put


def main() -> None:
    args = arguments(__doc__ or "")
    cells, checks = model_study(args.quick)
    checks += exactness(8 if args.quick else 60)
    rows, found = burst_run.emulated_runs(args.quick)
    checks += found
    tables = {"paper": paper_table(cells), "run": burst_run.tables(rows)}
    finish("burst", args, cells + rows, checks, tables=tables)
    put(args)


def exactness(count: int) -> list[Check]:
    """The scenarios of the tests, with other seeds."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.ranks import run_all
    from tests.train.burst import burst_scenarios as scenarios

    found: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    for ranks in (4, 8):
        each = count if ranks == 4 else count // 2
        calls = [(f, {"first": 10_000 * ranks, "count": each}) for f in (scenarios.matches, scenarios.integers)]
        reports = run_all(calls, ranks=ranks, timeout=60 + 5 * each)
        found += reports[0][0]
        whole += reports[0][1]
    worst = max(found, key=lambda f: f["errors"]["grad"])
    moved = [f for f in found if f["moved"] != f["predicted"]]
    different = [w for w in whole if w["error"] != 0.0]
    return [
        Check(
            "execution: gradients equal one process, random plans, rank sets and batches, 4 and 8 gloo processes",
            f"{worst['errors']['grad']:.1e} relative at worst in {len(found)} scenarios ({worst['scenario']})",
            "≤ 1e-12 in fp64",
            worst["errors"]["grad"] <= 1e-12,
        ),
        Check(
            "execution: gradients equal one process bitwise on integer data",
            f"{len(whole) - len(different)} of {len(whole)} scenarios",
            "all",
            not different,
        ),
        Check(
            "execution: bytes moved equal the prediction",
            f"{len(found) - len(moved)} of {len(found)} scenarios, {sum(f['moved'] for f in found)} bytes",
            "all",
            not moved,
        ),
    ]


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/burst.py: {e}", markup=False)
        sys.exit(1)

"""Fewer bytes on the wire: the speed of bf16 and int8 against full precision, against DDP and its 16-bit hook.

Devices are emulated, gradients and links (1 Gbit/s) are real, as in benchmarks/overlap.py; contestants take turns in
the same processes and run their real optimisers:

  ddp        torch's DistributedDataParallel as it is, fp32
  ddp-fp16   the same with torch's fp16_compress_hook (the bf16 hook refuses processors)
  both       dovetail's two lines in full precision
  bf16       the same with precision="bf16": every bucket in bf16 or in full, as planned by measured cost
  int8       the same with precision="int8"

"codec" is the processor time that conversions take per iteration on the rank that needs most. What fewer bits do to
losses is the subject of benchmarks/precision_quality.py.
Run: python benchmarks/precision.py [--quick] [--json FILE] [--cells N,N] [--keep FILE --most N]
"""

from __future__ import annotations

import subprocess
import sys

from common import Check, console, finish, parser
from dovetail.core.errors import Error
from dovetail.emulate.shaped_network import available
from overlap_cells import Cell, Row, chosen, fewest_bytes, groups, median, of, options, ratio, run, spread, table
from overlap_records import Outcome

CONTESTANTS = ("ddp", "ddp-fp16", "both", "bf16", "int8")
REDUCED = ("bf16", "int8")
CELLS = [Cell("ResNet-50", 4.0), Cell("ResNet-50", 0.4)]
QUICK = [CELLS[0]]
TARGETS = (("int8", "ddp", 0.32), ("int8", "ddp-fp16", 0.58), ("bf16", "ddp", 0.54))
"""(contestant, rival, the most that it may take of the rival's time where communication is 4 × compute)"""
NAMES = {
    "ddp": "DDP, fp32",
    "ddp-fp16": "DDP, fp16_compress_hook",
    "both": "two lines, full",
    "bf16": 'two lines, precision="bf16"',
    "int8": 'two lines, precision="int8"',
}


def main() -> None:
    arguments = parser(__doc__ or "")
    options(arguments, CELLS)
    args = arguments.parse_args()
    if reason := available():
        console.print(f"benchmarks/precision.py: {reason}")
        sys.exit(1)
    rows, complete = run(args, chosen(args, CELLS, QUICK), CONTESTANTS, show)
    if complete:
        finish("precision", args, rows, checks(rows), tables={"speed": speed(rows)})


def show(cell: Cell, outcome: Outcome, rows: list[Row]) -> None:
    table(cell, rows, REDUCED, codec=True)
    for entry in outcome.entries:
        if entry.kinds:
            console.print(f"{entry.name}: {', '.join(f'{n} {kind}' for kind, n in entry.kinds.items())}")
    console.print()


def speed(rows: list[Row]) -> list[str]:
    """Every contestant as Markdown."""
    lines = [
        "| communication / compute | contestant | iteration, s (10–90 %) | of DDP | bytes sent, of fp32 | codec |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for cell, members in groups(rows).items():
        for r in sorted(members, key=median):
            q, codec = r["iteration"], f"{r['codec'] * 1e3:.0f} ms" if r["policy"] in REDUCED else ""
            lines.append(
                f"| {cell.ratio:g} | {NAMES[r['policy']]} | {q['median']:.3f} ({q['low']:.3f}–{q['high']:.3f}) "
                f"| {ratio(members, r['policy'], 'ddp'):.3f} "
                f"| {r['sent_bytes'] / fewest_bytes(r['parameter_bytes']):.2f} | {codec} |"
            )
    return lines


def checks(rows: list[Row]) -> list[Check]:
    found = []
    for cell, members in groups(rows).items():
        if cell.ratio >= 1:
            found += gain_checks(cell, members)
        else:
            found += [harmless_check(cell, members, name) for name in REDUCED]
    return found


def gain_checks(cell: Cell, rows: list[Row]) -> list[Check]:
    return [
        Check(
            name=f"{cell.model}, {cell.regime}: {NAMES[name]} against {NAMES[rival]}",
            value=f"{ratio(rows, name, rival):.3f}; the codec takes {of(rows, name)['codec'] * 1e3:.0f} ms of "
            f"processor time in an iteration, {median(of(rows, rival)) - median(of(rows, name)):.3f} s are saved",
            target=f"≤ {target}",
            holds=ratio(rows, name, rival) <= target,
        )
        for name, rival, target in TARGETS
    ]


def harmless_check(cell: Cell, rows: list[Row], name: str) -> Check:
    """Where communication hides behind computing anyway, fewer bytes must cost nothing."""
    reduced, full = of(rows, name), of(rows, "both")
    noise = spread(reduced, full)
    kinds = ", ".join(f"{n} {kind}" for kind, n in reduced["kinds"].items())
    return Check(
        name=f"{cell.model}, {cell.regime}: {NAMES[name]} against full precision",
        value=f"{median(reduced) / median(full):.3f}, spread ±{noise / median(full):.1%}; {kinds or 'torch reduces'}",
        target="not slower by more than the spread",
        holds=median(reduced) - median(full) <= noise,
    )


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/precision.py: {e}", markup=False)
        sys.exit(1)

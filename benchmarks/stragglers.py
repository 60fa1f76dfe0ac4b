"""Which rank is slow: delays of 5 to 50 % of an iteration in a known rank, phase and layer, and runs without any.

  live        real ranks on this machine train a small convolutional network; one of them sleeps in its input, in the
              forward or the backward pass of a layer, or before it hands gradients over; also with dovetail's optimiser
  simulated   stamps as the wrapper takes them, of drawn models on 2 to 8 ranks, with noise in four parts
              (benchmarks/straggler_study.py)

A run counts as right if the first line of the report names the rank, the phase and the layer. Sleeping does not use the
processor, so the rank that sleeps disturbs nobody; the machine has other noise enough.
Run: python benchmarks/stragglers.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from common import Check, arguments, console, finish
from dovetail.core.errors import Error
from dovetail.emulate.launch import launch
from straggler_study import DELAYED, StudyNoise, drawn_delay, drawn_model, named_right, simulated

RANK = str(Path(__file__).with_name("straggler_rank.py"))
SHARES = (0.05, 0.5)
LAYERS = ("stem", *(f"stages.{s}.{b}" for s in range(2) for b in range(3)))
NOISES = {"usual": StudyNoise(), "twice as much": StudyNoise(layer=0.1, rank=0.03, lasting=0.01, burst=0.1)}
Row = dict[str, Any]


def main() -> None:
    args = arguments(__doc__ or "")
    rows = [*(live(2, 20 if args.quick else 80, 8 if args.quick else 40))]
    if not args.quick:
        rows += live(3, 20, 10)
    for name, noise in NOISES.items():
        rows += study(name, noise, 100 if args.quick else 1000)
    show(rows)
    finish("stragglers", args, rows, checks(rows), tables={"stragglers": markdown(rows)})


def live(ranks: int, delayed: int, equal: int) -> list[Row]:
    """Real runs: so many with a delay, so many without."""
    rng = np.random.default_rng(ranks)
    plan: list[list[Any]] = []
    for n in range(delayed):
        phase = DELAYED[n % len(DELAYED)]
        layer = str(rng.choice(LAYERS)) if phase in ("forward", "backward") else ""
        overlap = phase != "network" and n // len(DELAYED) % 2 == 1
        plan.append([int(rng.integers(ranks)), phase, layer, float(rng.uniform(*SHARES)), overlap])
    plan += [[-1, "", "", 0.0, n % 2 == 1] for n in range(equal)]
    order = rng.permutation(len(plan))
    told = launch([RANK, json.dumps([plan[n] for n in order])], ranks=ranks, timeout=3600)[0].report
    console.print(
        f"{ranks} ranks: an iteration without a delay takes {told['iteration'] * 1e3:.1f} ms", highlight=False
    )
    rows = []
    for n, result in zip(order, told["runs"], strict=True):
        rank, phase, layer, share, overlap = plan[n]
        first = result["slow"][0][:3] if result["slow"] else None
        rows.append(
            {
                "study": f"live, {ranks} ranks",
                "phase": phase,
                "layer": layer,
                "share": share,
                "overlap": overlap,
                "right": first == [rank, phase, layer] if phase else first is None,
                "found": result["slow"],
            }
        )
    return rows


def study(name: str, noise: StudyNoise, runs: int) -> list[Row]:
    rows = []
    for seed in range(2 * runs):
        rng = np.random.default_rng(10_000 + seed)
        model, ranks = drawn_model(rng), int(rng.integers(2, 9))
        phase = DELAYED[seed % len(DELAYED)]
        delay = drawn_delay(rng, model, ranks, phase, float(rng.uniform(*SHARES))) if seed < runs else None
        found = simulated(rng, model, ranks, noise, delay)
        rows.append(
            {
                "study": f"simulated, {name} noise",
                "phase": delay.phase if delay else "",
                "layer": delay.layer if delay else "",
                "share": delay.share if delay else 0.0,
                "overlap": False,
                "right": named_right(found, delay) if delay else not found.slow,
                "found": [[f.rank, f.phase, f.layer, f.seconds, f.share, f.confidence] for f in found.slow],
            }
        )
    return rows


def rates(rows: list[Row]) -> dict[tuple[str, str], tuple[int, int]]:
    """(runs that were right, runs) by study and phase; the phase of runs without a delay is "none"."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        key = row["study"], row["phase"] or "none"
        right, runs = found.get(key, (0, 0))
        found[key] = right + row["right"], runs + 1
    return found


def show(rows: list[Row]) -> None:
    table = Table(title="runs in which the report was right", title_justify="left")
    for column in ("study", "delay in", "right", "runs"):
        table.add_column(column)
    for (name, phase), (right, runs) in sorted(rates(rows).items()):
        table.add_row(name, phase, str(right), str(runs))
    console.print(table)


def markdown(rows: list[Row]) -> list[str]:
    studies = list(dict.fromkeys(row["study"] for row in rows))
    found = rates(rows)
    lines = [f"| delay in | {' | '.join(studies)} |", "|---|" + "--:|" * len(studies)]
    for phase in (*DELAYED, "none"):
        cells = [f"{right} of {runs}" for right, runs in (found.get((s, phase), (0, 0)) for s in studies)]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    return lines


def checks(rows: list[Row]) -> list[Check]:
    found = []
    for name in dict.fromkeys(row["study"] for row in rows):
        delayed = [row for row in rows if row["study"] == name and row["phase"]]
        equal = [row for row in rows if row["study"] == name and not row["phase"]]
        right, alarms = sum(r["right"] for r in delayed), sum(not r["right"] for r in equal)
        found += [
            Check(
                name=f"{name}: delays of {SHARES[0]:.0%} to {SHARES[1]:.0%}: rank, phase and layer are named right",
                value=f"{right} of {len(delayed)} runs",
                target="≥ 95 %",
                holds=right >= 0.95 * len(delayed),
            ),
            Check(
                name=f"{name}: equal ranks: one is named",
                value=f"{alarms} of {len(equal)} runs",
                target="≤ 5 %",
                holds=alarms <= 0.05 * len(equal),
            ),
        ]
    return found


if __name__ == "__main__":
    try:
        main()
    except Error as e:
        console.print(f"benchmarks/stragglers.py: {e}", markup=False)
        sys.exit(1)

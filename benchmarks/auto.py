"""What `dovetail plan --auto` chooses, against every single technique on paper and against DDP in runs.

On paper: ResNet-50, and VGG16 and WideResNet-101-2 by published A100 layer times where those are at hand, on preset
networks: never worse than any single technique, and how long planning takes. In runs: on four emulated devices with
rate-limited links (network namespaces, so root is needed) the network is measured, the planner chooses, and the plan
runs beside torch's DistributedDataParallel, turn by turn.
Run: python benchmarks/auto.py [--quick] [--json FILE] [--cell N] [--paper]
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

import burst_run
from auto_rank import AUTO, DDP, AutoOutcome, AutoSpec
from burst_model import DATA
from common import Check, console, finish, parser, quantiles
from dovetail import measure
from dovetail.core.errors import Error
from dovetail.core.profile import Profile
from dovetail.core.scratch import scratch
from dovetail.emulate.launch import launch
from dovetail.emulate.layered import in_layer_order
from dovetail.emulate.shaped_network import available, bits_per_second, shaped
from dovetail.measure.layer_table import read_layer_table
from dovetail.measure.presets import preset
from dovetail.planning import compare
from dovetail.planning.auto.options import TECHNIQUES
from dovetail.simulate import choose

RANKS = 4
RANK = str(Path(__file__).with_name("auto_rank.py"))
FABRICS = ("10gbe", "25gbe", "100gbe", "infiniband", "nvlink")
LOCAL = 4
"""The local batch of the study on paper."""
A100 = 0.110
"""Seconds of forward and backward of ResNet-50 at a local batch of 32 that the study on paper assumes."""


@dataclass(frozen=True)
class Cell:
    """One model on one emulated network."""

    model: str
    regime: str
    rate: str
    ratio: float | None = None
    """All gradients in one ideal all-reduce over computing; None for the times that the profile has."""


CELLS = [
    Cell("ResNet-50", "communication 1 × compute", "1gbit", 1.0),
    Cell("VGG16-like reversed", "large layers first", "100mbit"),
    Cell("ResNet-50", "communication 0.4 × compute", "1gbit", 0.4),
]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--cell", type=int, metavar="N", help=f"only this cell, 0 to {len(CELLS) - 1}, to look again")
    options.add_argument("--paper", action="store_true", help="only what needs no runs")
    args = options.parse_args()
    resnet = in_layer_order(profile())
    cells, checks = paper(resnet, quick=args.quick)
    if not args.paper:
        if reason := available():
            console.print(f"benchmarks/auto.py: {reason}")
            sys.exit(1)
        chosen = [CELLS[args.cell]] if args.cell is not None else CELLS[:1] if args.quick else CELLS
        rows = [row for cell in chosen for row in run(cell, resnet, quick=args.quick)]
        cells += rows
        checks += run_checks(rows)
    finish("auto", args, cells, checks)


def profile() -> Profile:
    """Layer proportions as this machine's processor has them; only those are used."""
    workload = measure.load("resnet50")
    return measure.profile(workload.model, workload.make_batch(LOCAL), batches=[1, 2, LOCAL], steps=8, name="ResNet-50")


def paper(resnet: Profile, *, quick: bool) -> tuple[list[dict[str, Any]], list[Check]]:
    """Every fabric, several sizes: the chosen plan, every single technique, and the planner's time."""
    small = resnet.scaled(forward=A100 / 3 / 8, backward=A100 * 2 / 3 / 8)  # at a local batch of 4
    cells: list[dict[str, Any]] = []
    slowest = 0.0
    for name, job in [("ResNet-50", small), *published()]:
        for fabric in FABRICS[:1] if quick else FABRICS:
            for devices in (64,) if quick else (8, 64):
                net = preset(f"{fabric}-{devices}")
                began = time.perf_counter()
                found = choose(job, net, devices=devices, batch=LOCAL * devices)
                taken = time.perf_counter() - began
                if (name, devices) == ("ResNet-50", 64):
                    slowest = max(slowest, taken)
                singles = {t: c.score.iteration for t in TECHNIQUES if (c := found.search.of(t, devices)) is not None}
                singles |= {p.policy: p.prediction.iteration for p in compare(job, net, workers=devices, batch=LOCAL)}
                best = min(singles, key=lambda n: singles[n])
                cells.append(
                    {
                        "study": "paper",
                        "model": name,
                        "network": net.name,
                        "devices": devices,
                        "technique": found.chosen.technique,
                        "used": found.chosen.devices,
                        "value": found.value,
                        "best_single": best,
                        "best_single_value": singles[best],
                        "ddp": found.baseline.score.iteration,
                        "gap": found.gap,
                        "considered": found.considered,
                        "dropped": len(found.dropped),
                        "planning": taken,
                    }
                )
    show_paper(cells)
    worse = [c for c in cells if c["value"] > c["best_single_value"] * (1 + 1e-9)]
    return cells, [
        Check(
            "plan --auto never worse than the best single technique, in simulation",
            f"{len(worse)} of {len(cells)} cells worse",
            "none",
            not worse,
        ),
        Check(
            "planning ResNet-50 on 64 devices, burst considered, the slowest network",
            f"{slowest:.2f} s",
            "< 2 s",
            slowest < 2,
        ),
    ]


def published() -> list[tuple[str, Profile]]:
    if not DATA.exists():
        console.print("benchmarks/auto.py: the published layer times are not at hand: ResNet-50 only")
        return []
    return [("VGG16", read_layer_table(DATA, "vgg")), ("WideResNet-101-2", read_layer_table(DATA, "wrn"))]


def show_paper(cells: list[dict[str, Any]]) -> None:
    table = Table(title=f"predicted: what is chosen on preset networks, a local batch of {LOCAL}", title_justify="left")
    for column in ("model", "network", "chosen", "iteration", "of DDP", "best single", "may be left", "planned in"):
        table.add_column(column, justify="left" if column in ("model", "network", "chosen") else "right")
    for c in cells:
        table.add_row(
            c["model"],
            c["network"],
            f"{c['technique']} on {c['used']}",
            f"{c['value'] * 1e3:.1f} ms",
            f"{c['value'] / c['ddp']:.3f}",
            f"{c['best_single']} {c['best_single_value'] * 1e3:.1f}",
            f"{c['gap']:.1%}",
            f"{c['planning']:.2f} s",
        )
    console.print(table)


def run(cell: Cell, resnet: Profile, *, quick: bool) -> list[dict[str, Any]]:
    base = resnet if cell.ratio is not None else burst_run.profile(burst_run.CELLS[1])
    batch = base.batch * RANKS if cell.ratio is not None else burst_run.BATCH
    if cell.ratio is not None:
        wire = 2 * (RANKS - 1) / RANKS * base.parameter_bytes * 8 / bits_per_second(cell.rate)
        base = base.scaled(forward=wire / cell.ratio / 3, backward=wire / cell.ratio * 2 / 3)
    rounds, settle, steps = (2, 2, 2) if quick else (3, 2, 4)
    spec = AutoSpec(profile=base, batch=batch, rounds=rounds, settle=settle, steps=steps, budget=8.0 if quick else 16.0)
    # Small messages, as burst plans have them: a link must not let many of them pass for nothing.
    small: dict[str, Any] = {} if cell.ratio is not None else {"burst": "8kb", "in_flight": 256 * 1024}
    with scratch("auto") as folder, shaped(RANKS, rate=cell.rate, **small) as network:
        path = Path(folder, "spec.json")
        path.write_bytes(msgspec.json.encode(spec))
        results = launch(
            [RANK, str(path)],
            ranks=RANKS,
            network=network,
            timeout=600,
            on_line=lambda rank, line: console.print(f"  {line}", style="dim", highlight=False) if rank == 0 else None,
        )
    outcome = msgspec.convert(results[0].report, AutoOutcome)
    rows = [
        {
            "study": "run",
            "model": cell.model,
            "regime": cell.regime,
            "emulated": True,
            "ranks": RANKS,
            "rate": cell.rate,
            "batch": batch,
            "contestant": e.name,
            "technique": e.technique,
            "devices": e.devices,
            "pieces": e.pieces,
            "prediction": e.predicted,
            "iteration": quantiles(e.seconds),
            "steps": len(e.seconds),
            "optimizer": outcome.optimizer,
            "planning": outcome.planning,
            "explained": list(outcome.explained),
        }
        for e in outcome.entries
    ]
    show(cell, rows)
    return rows


def show(cell: Cell, rows: list[dict[str, Any]]) -> None:
    title = f"{cell.model}, {cell.regime}: {RANKS} emulated devices, {cell.rate} links"
    table = Table(title=title, title_justify="left")
    for column in ("contestant", "what it is", "pieces", "iteration", "10–90 %", "of DDP", "predicted", "error"):
        table.add_column(column, justify="left" if column in ("contestant", "what it is") else "right")
    default = rows[0]["iteration"]["median"]
    for r in rows:
        q = r["iteration"]
        table.add_row(
            r["contestant"],
            f"{r['technique']} on {r['devices']}",
            str(r["pieces"]),
            f"{q['median']:.3f} s",
            f"{q['low']:.3f}–{q['high']:.3f}",
            f"{q['median'] / default:.3f}",
            f"{r['prediction']:.3f} s",
            f"{error(r):+.1%}",
        )
    console.print(table)


def error(row: dict[str, Any]) -> float:
    return float(row["prediction"] / row["iteration"]["median"] - 1)


def run_checks(rows: list[dict[str, Any]]) -> list[Check]:
    ours = [r for r in rows if r["contestant"] == AUTO]
    theirs = {(r["model"], r["regime"]): r["iteration"]["median"] for r in rows if r["contestant"] == DDP}
    against = [r["iteration"]["median"] / theirs[r["model"], r["regime"]] for r in ours]
    told = [f"{r['model']}, {r['regime']}: {r['technique']} on {r['devices']}" for r in ours]
    return [
        Check(
            "the chosen plan on emulated devices: predicted against measured iteration",
            "; ".join(f"{t} {error(r):+.1%}" for t, r in zip(told, ours, strict=True)),
            "within 10 %, each",
            all(abs(error(r)) <= 0.10 for r in ours),
        ),
        Check(
            "the chosen plan on emulated devices against torch's DDP on all of them, in time",
            "; ".join(f"{t} {a:.3f}" for t, a in zip(told, against, strict=True)),
            "≤ 1.02, each",
            all(a <= 1.02 for a in against),
        ),
    ]


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/auto.py: {e}", markup=False)
        sys.exit(1)

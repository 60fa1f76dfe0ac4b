"""Communication behind forward too: dovetail's overlap against DDP's default, dovetail's merging, and FSDP2.

Devices are emulated (they wait for layer times whose proportions were measured on this machine), gradients and
parameters are real and cross real links limited to a rate (network namespaces, so root is needed). All contestants take
turns in the same processes. A real transformer is trained with DDP and with overlap, and the losses are compared.
Run: python benchmarks/overlap.py [--quick] [--json FILE] [--keep FILE --most N]
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from common import Check, console, finish, parser, quantiles
from dovetail import measure
from dovetail.core.errors import Error
from dovetail.core.profile import Profile
from dovetail.core.scratch import scratch
from dovetail.emulate.launch import launch
from dovetail.emulate.layered import in_layer_order
from dovetail.emulate.shaped_network import available, bits_per_second, shaped
from overlap_rank import Entry, Outcome, Spec

RANKS, RATE = 4, "1gbit"
RANK = str(Path(__file__).with_name("overlap_rank.py"))
OURS = "overlap"


@dataclass(frozen=True)
class Cell:
    """One model, and how long its communication is against its computation: all gradients in one ideal all-reduce."""

    model: str
    ratio: float

    @property
    def regime(self) -> str:
        return f"communication {self.ratio:g} × compute"

    @property
    def bound(self) -> bool:
        """Whether communication decides."""
        return self.ratio >= 1


MODELS = {"ResNet-50": "resnet50", "ViT-like": "hf:vit-base?layers=12&hidden=384&heads=6"}
CELLS = [
    Cell("ResNet-50", 1.0),
    Cell("ResNet-50", 1.4),
    Cell("ResNet-50", 1.8),
    Cell("ViT-like", 1.0),
    Cell("ViT-like", 1.4),
    Cell("ResNet-50", 0.4),
]
QUICK = [CELLS[1]]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--cell", type=int, metavar="N", help=f"only this cell, 0 to {len(CELLS) - 1}, to look again")
    options.add_argument("--keep", type=Path, metavar="FILE.jsonl", help="finished cells; a later run goes on")
    options.add_argument("--most", type=int, metavar="N", help="with --keep: end after so many cells")
    args = options.parse_args()
    if reason := available():
        console.print(f"benchmarks/overlap.py: {reason}")
        sys.exit(1)
    chosen = QUICK if args.quick else CELLS if args.cell is None else [CELLS[args.cell]]
    cells = finished(args.keep) if args.keep else []
    have = {(r["model"], r["regime"]) for r in cells}
    todo = [c for c in chosen if (c.model, c.regime) not in have]
    profiles: dict[str, Profile] = {}
    for cell in todo[: args.most]:
        if cell.model not in profiles:
            profiles[cell.model] = profile(cell.model)
        scaled = scale(profiles[cell.model], cell)
        outcomes = contest(scaled, quick=args.quick)
        rows = [row(cell, scaled, outcomes, i) for i in range(len(outcomes[0].entries))]
        show(cell, scaled, outcomes[0], rows)
        cells += rows
        if args.keep:
            with args.keep.open("ab") as file:
                file.write(msgspec.json.encode(rows) + b"\n")
    if args.keep and args.most is not None and len(todo) > args.most:
        return
    cells.sort(key=lambda r: [(c.model, c.regime) for c in CELLS].index((r["model"], r["regime"])))
    finish("overlap", args, cells, [*contest_checks(cells), training_check(120 if args.quick else 300)])


def finished(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [r for line in lines for r in msgspec.json.decode(line)]


def profile(name: str) -> Profile:
    """Layer proportions as this machine's processor has them; only those are used."""
    workload = measure.load(MODELS[name])
    found = measure.profile(workload.model, workload.make_batch(2), batches=[2], steps=20, name=name)
    console.print(f"{name}: {len(found.tensors)} tensors, {found.parameter_bytes / 2**20:.1f} MiB")
    return in_layer_order(found)


def scale(base: Profile, cell: Cell) -> Profile:
    """Forward is a third of computing, backward two thirds."""
    compute = all_reduce_seconds(base) / cell.ratio
    return base.scaled(forward=compute / 3, backward=compute * 2 / 3)


def all_reduce_seconds(base: Profile) -> float:
    """What the links need at least to all-reduce all gradients: 2(n−1)/n of the bytes."""
    return fewest_bytes(base.parameter_bytes) * 8 / bits_per_second(RATE)


def fewest_bytes(parameter_bytes: int) -> float:
    return 2 * (RANKS - 1) / RANKS * parameter_bytes


def contest(scaled: Profile, *, quick: bool) -> list[Outcome]:
    """The outcome of the contest on every rank."""
    rounds, settle, steps = (2, 2, 3) if quick else (4, 2, 5)
    # Three collectives are measured where plain merging measures one.
    tuning: dict[str, int | float] = {"network_seconds": 9.0}
    if quick:
        tuning |= {"measure": 5, "steps": 2, "candidates": 2, "network_seconds": 6.0}
    budget = 6.0 if quick else 20.0
    spec = Spec(profile=scaled, rounds=rounds, settle=settle, steps=steps, budget=budget, tuning=tuning)
    with scratch("overlap") as folder, shaped(RANKS, rate=RATE) as network:
        path = Path(folder, "spec.json")
        path.write_bytes(msgspec.json.encode(spec))
        results = launch(
            [RANK, "contest", str(path)],
            ranks=RANKS,
            network=network,
            timeout=3600,
            on_line=lambda rank, line: console.print(f"  {line}", style="dim", highlight=False) if rank == 0 else None,
        )
    return [msgspec.convert(r.report, Outcome) for r in results]


def row(cell: Cell, scaled: Profile, outcomes: list[Outcome], i: int) -> dict[str, Any]:
    entry: Entry = outcomes[0].entries[i]
    fits = {name: c.fit for name, c in outcomes[0].network.collectives.items()}
    return {
        "model": cell.model,
        "regime": cell.regime,
        "policy": entry.name,
        "emulated": True,
        "ranks": RANKS,
        "rate": RATE,
        "communication_bound": cell.bound,
        "added_latency": None,
        "forward": scaled.forward_time(),
        "backward": scaled.backward_time(),
        "parameter_bytes": scaled.parameter_bytes,
        "optimizer": outcomes[0].optimizer,
        **{
            name: {"latency": fit.latency, "seconds_per_byte": fit.seconds_per_byte, "error": fit.error}
            for name, fit in fits.items()
        },
        "iteration": quantiles(entry.seconds),
        "steps": len(entry.seconds),
        "prediction": entry.predicted,
        "lower_bound": entry.lower_bound,
        "buckets": entry.buckets,
        "sent_bytes": max(o.entries[i].sent for o in outcomes),
    }


def show(cell: Cell, scaled: Profile, outcome: Outcome, rows: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"{cell.model}, {cell.regime}: {RANKS} emulated devices, {RATE} links, "
        f"forward {scaled.forward_time():.2f} s, backward {scaled.backward_time():.2f} s",
        title_justify="left",
    )
    for column in ("contestant", "buckets", "iteration", "10–90 %", "of DDP", "predicted", "error", "sent, of fewest"):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    default = of(rows, "ddp")["iteration"]["median"]
    for r in sorted(rows, key=lambda r: r["iteration"]["median"]):
        q, predicted = r["iteration"], r["prediction"]
        table.add_row(
            f"[bold]{r['policy']}[/]" if r["policy"] == OURS else r["policy"],
            str(r["buckets"]),
            f"{q['median']:.3f} s",
            f"{q['low']:.3f}–{q['high']:.3f}",
            f"{q['median'] / default:.3f}",
            f"{predicted:.3f} s" if predicted else "",
            f"{predicted / q['median'] - 1:+.0%}" if predicted else "",
            f"{r['sent_bytes'] / fewest_bytes(scaled.parameter_bytes):.3f}",
        )
    console.print(table)
    for name, c in outcome.network.collectives.items():
        console.print(f"{name}: {c.fit.latency * 1e3:.1f} ms + {c.fit.seconds_per_byte * 1e9:.2f} ns/B")
    console.print(f"optimiser on a rank's shards: {outcome.optimizer * 1e3:.1f} ms (overlap only)\n")


def of(rows: list[dict[str, Any]], policy: str) -> dict[str, Any]:
    return next(r for r in rows if r["policy"] == policy)


def contest_checks(cells: list[dict[str, Any]]) -> list[Check]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in cells:
        groups.setdefault((r["model"], r["regime"]), []).append(r)
    against_ddp = {k: against(rows, "ddp") for k, rows in groups.items()}
    bound = {k: rows for k, rows in groups.items() if rows[0]["communication_bound"]}
    gains = [against_ddp[k] for k in bound]
    ours = [of(rows, OURS) for rows in groups.values()]
    moved = [r["sent_bytes"] / fewest_bytes(r["parameter_bytes"]) - 1 for r in ours]
    errors = [abs(r["prediction"] / r["iteration"]["median"] - 1) for r in ours]
    everyone = [abs(r["prediction"] / r["iteration"]["median"] - 1) for r in cells if r["prediction"]]
    fsdp = [against(rows, "fsdp2") for rows in bound.values()]
    return [
        Check(
            name="communication 1.0–2.0 × compute: overlap against DDP default, cells at or below 0.85",
            value=f"{sum(g <= 0.85 for g in gains)} of {len(gains)} ({', '.join(f'{g:.3f}' for g in gains)})",
            target="≥ 2 cells",
            holds=sum(g <= 0.85 for g in gains) >= 2,
        ),
        Check(
            name="overlap against DDP default, the worst of all cells",
            value=f"{max(against_ddp.values()):.3f}",
            target="≤ 1.02",
            holds=max(against_ddp.values()) <= 1.02,
        ),
        Check(
            name="bytes sent per rank against 2(n−1)/n × parameter bytes, the worst cell",
            value=f"{max(moved, key=abs):+.2%}",
            target="within 3 %",
            holds=max(map(abs, moved)) <= 0.03,
        ),
        Check(
            name="overlap against FSDP2 (reshard_after_forward=False) in every communication-bound cell",
            value=", ".join(f"{f:.3f}" for f in fsdp),
            target="< 1 in every cell",
            holds=bool(fsdp) and max(fsdp) < 1,
        ),
        Check(
            name="predicted against measured iteration time, median",
            value=f"{np.median(errors):.1%} for overlap; {np.median(everyone):.1%} over all that are predicted",
            target="≤ 10 %",
            holds=bool(np.median(errors) <= 0.10),
        ),
    ]


def against(rows: list[dict[str, Any]], rival: str) -> float:
    return float(of(rows, OURS)["iteration"]["median"] / of(rows, rival)["iteration"]["median"])


def training_check(steps: int) -> Check:
    """A transformer on the sources of Python's library, four ranks on loopback, the same data for both."""
    curves = launch([RANK, "training", str(steps)], ranks=RANKS, timeout=900)[0].report
    ddp, ours = np.array(curves["ddp"]), np.array(curves["overlap"])
    apart = float(np.max(np.abs(ours - ddp) / ddp))
    return Check(
        name=f"a transformer trained for {steps} steps (AdamW, {RANKS} ranks): loss curve equal to DDP's",
        value=f"{ddp[0]:.3f} → {ddp[-20:].mean():.3f} with DDP, {ours[-20:].mean():.3f} with overlap; "
        f"largest difference at any step {apart:.1e} of the loss",
        target="≥ 300 steps, differences of rounding (≤ 1e-3)",
        holds=steps >= 300 and apart <= 1e-3,
    )


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/overlap.py: {e}", markup=False)
        sys.exit(1)

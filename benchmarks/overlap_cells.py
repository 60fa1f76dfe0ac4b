"""Cells of contests on emulated devices: one model, one ratio of communication to compute, one rate of the links.

benchmarks/overlap.py and benchmarks/precision.py share this: profiles, scaling, how much effort a cell gets, running
it, its figures as a JSON row for each contestant, and files of finished cells that a later run goes on from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from common import console, quantiles
from dovetail import measure
from dovetail.core.errors import Error
from dovetail.core.profile import Profile
from dovetail.core.scratch import scratch
from dovetail.emulate.launch import launch
from dovetail.emulate.layered import in_layer_order
from dovetail.emulate.shaped_network import bits_per_second, shaped
from markdown import buckets
from overlap_records import Outcome, Spec

RANKS = 4
RANK = str(Path(__file__).with_name("overlap_rank.py"))
MODELS = {
    "ResNet-50": "resnet50",
    "ViT-like": "hf:vit-base?layers=12&hidden=384&heads=6",
    "BERT-like": "hf:bert-base?layers=12&hidden=256&heads=4&length=32",
    "GPT-2-like": "hf:gpt2?layers=8&hidden=384&heads=6&length=32",
}
CONTEST_SECONDS = 110.0
"""What the turns of a cell may take; those of slow cells have fewer iterations."""
TRIAL_SECONDS = 5.0
"""What one turn of dovetail's own trials may take."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One model, and how long its communication is against its computation: all gradients in one ideal all-reduce."""

    model: str
    ratio: float
    rate: str = "1gbit"

    @property
    def regime(self) -> str:
        rate = "" if self.rate == "1gbit" else f" at {self.rate.removesuffix('gbit')} Gbit/s"
        return f"communication {self.ratio:g} × compute{rate}"

    def all_reduce_seconds(self, base: Profile) -> float:
        """What the links need at least to all-reduce all gradients: 2(n−1)/n of the bytes."""
        return fewest_bytes(base.parameter_bytes) * 8 / bits_per_second(self.rate)

    def scale(self, base: Profile) -> Profile:
        """Forward is a third of computing, backward two thirds."""
        compute = self.all_reduce_seconds(base) / self.ratio
        return base.scaled(forward=compute / 3, backward=compute * 2 / 3)


def fewest_bytes(parameter_bytes: int) -> float:
    return 2 * (RANKS - 1) / RANKS * parameter_bytes


def options(parser: argparse.ArgumentParser, cells: Sequence[Cell]) -> None:
    """Arguments of a benchmark that runs cells."""
    listed = "; ".join(f"{i}: {c.model}, {c.regime}" for i, c in enumerate(cells))
    parser.add_argument("--cells", metavar="N,N,…", help=f"only these cells. {listed}")
    parser.add_argument("--keep", type=Path, metavar="FILE.jsonl", help="finished cells; a later run goes on")
    parser.add_argument("--most", type=int, metavar="N", help="with --keep: end after so many cells")


def chosen(args: argparse.Namespace, cells: Sequence[Cell], quick: Sequence[Cell]) -> list[Cell]:
    if args.cells is None:
        return list(quick if args.quick else cells)
    try:
        return [cells[int(number)] for number in args.cells.split(",")]
    except (ValueError, IndexError):
        raise Error(f"--cells: expected numbers from 0 to {len(cells) - 1}, as in 0,3,5, got {args.cells!r}") from None


def run(
    args: argparse.Namespace,
    todo: Sequence[Cell],
    contestants: tuple[str, ...],
    show: Callable[[Cell, Outcome, list[Row]], None],
) -> tuple[list[Row], bool]:
    """(rows of the cells, those of the file --keep too; whether none is left to do)."""
    rows = _finished(args.keep) if args.keep else []
    # Cells of other runs in the same file stay out of this one's tables.
    wanted = [(c.model, c.regime) for c in todo]
    rows = [r for r in rows if (r["model"], r["regime"]) in wanted]
    have = {(r["model"], r["regime"]) for r in rows}
    left = [c for c in todo if (c.model, c.regime) not in have]
    profiles: dict[str, Profile] = {}
    for cell in left[: args.most]:
        if cell.model not in profiles:
            profiles[cell.model] = profile(cell.model)
        scaled = cell.scale(profiles[cell.model])
        outcomes = contest(cell, spec(cell, scaled, contestants, quick=args.quick))
        made = rows_of(cell, scaled, outcomes)
        show(cell, outcomes[0], made)
        rows += made
        if args.keep:
            with args.keep.open("ab") as file:
                file.write(msgspec.json.encode(made) + b"\n")
    rows.sort(key=lambda r: wanted.index((r["model"], r["regime"])))
    return rows, args.most is None or len(left) <= args.most


def _finished(path: Path) -> list[Row]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [r for line in lines for r in msgspec.json.decode(line)]


def profile(name: str) -> Profile:
    """Layer proportions as this machine's processor has them; only those are used."""
    workload = measure.load(MODELS[name])
    found = measure.profile(workload.model, workload.make_batch(2), batches=[2], steps=20, name=name)
    console.print(f"{name}: {len(found.tensors)} tensors, {found.parameter_bytes / 2**20:.1f} MiB")
    return in_layer_order(found)


def spec(cell: Cell, scaled: Profile, contestants: tuple[str, ...], *, quick: bool) -> Spec:
    """As much effort as fits into about five minutes, and with `quick` into three.

    Trials that dovetail makes are few, but each with its full duel: that decides, and needs five pairs at least.
    """
    iteration = max(scaled.forward_time() + scaled.backward_time(), cell.all_reduce_seconds(scaled)) * 1.3
    rounds, settle = (2, 1) if quick else (3, 1)
    fitting = int(CONTEST_SECONDS / (iteration * len(contestants) * rounds)) - settle
    trial = 1 if quick else min(3, max(1, int(TRIAL_SECONDS / iteration)))
    tuning: dict[str, int | float] = {"warmup": 1, "measure": 4, "steps": trial, "duel": 5, "duel_steps": trial}
    # Two lines measure four collectives, and three more in fewer bytes: large messages take seconds at these rates.
    measured = 7 if {"bf16", "int8"} & set(contestants) else 4
    tuning["network_seconds"] = (2.0 if quick else 3.0) * measured
    return Spec(
        profile=scaled,
        contestants=contestants,
        rounds=rounds,
        settle=settle,
        steps=2 if quick else min(3, max(2, fitting)),
        trial=1,
        caps=(4, 25) if quick else (1, 4, 10, 25),
        splits=1,
        recorded=0 if quick else 2,
        tuning=tuning,
    )


def contest(cell: Cell, spec: Spec) -> list[Outcome]:
    """The outcome of the contest on every rank."""
    with scratch("overlap") as folder, shaped(RANKS, rate=cell.rate) as network:
        path = Path(folder, "spec.json")
        path.write_bytes(msgspec.json.encode(spec))
        results = launch(
            [RANK, str(path)],
            ranks=RANKS,
            network=network,
            timeout=3600,
            on_line=_show_line,
        )
    return [msgspec.convert(r.report, Outcome) for r in results]


def _show_line(rank: int, line: str) -> None:
    if rank == 0:
        console.print(f"  {line}", style="dim", highlight=False, markup=False, emoji=False)


def rows_of(cell: Cell, scaled: Profile, outcomes: list[Outcome]) -> list[Row]:
    """Figures of every contestant, in seconds and bytes."""
    first = outcomes[0]
    compute, communication = scaled.forward_time() + scaled.backward_time(), min(first.all_reduce.values())
    fits: Row = {name: msgspec.to_builtins(c.fit) for name, c in first.network.collectives.items()}
    rows = []
    for i, entry in enumerate(first.entries):
        sent, iteration = max(o.entries[i].sent for o in outcomes), quantiles(entry.seconds)
        rows.append(
            {
                "model": cell.model,
                "regime": cell.regime,
                "ratio": cell.ratio,
                "rate": cell.rate,
                "policy": entry.name,
                "what": entry.what,
                "emulated": True,
                "ranks": RANKS,
                "added_latency": None,
                "forward": scaled.forward_time(),
                "backward": scaled.backward_time(),
                "parameter_bytes": scaled.parameter_bytes,
                "update": first.update,
                **fits,
                "contention": msgspec.to_builtins(first.network.contention),
                "all_reduce_of_everything": first.all_reduce,
                "limit": max(compute, communication),
                "iteration": iteration,
                "steps": len(entry.seconds),
                "prediction": entry.predicted,
                "promised": entry.promised,
                "buckets": entry.buckets,
                "kinds": entry.kinds,
                "sent_bytes": sent,
                "link_idle": 1 - sent * 8 / bits_per_second(cell.rate) / iteration["median"],
                "recorded_idle": entry.idle,
                "codec": max(o.entries[i].codec for o in outcomes),
            }
        )
    return rows


def groups(rows: list[Row]) -> dict[Cell, list[Row]]:
    """The rows of each cell."""
    found: dict[Cell, list[Row]] = {}
    for r in rows:
        found.setdefault(Cell(r["model"], r["ratio"], r["rate"]), []).append(r)
    return found


def of(rows: list[Row], policy: str) -> Row:
    return next(r for r in rows if r["policy"] == policy)


def median(row: Row) -> float:
    return float(row["iteration"]["median"])


def ratio(rows: list[Row], policy: str, rival: str) -> float:
    return median(of(rows, policy)) / median(of(rows, rival))


def spread(one: Row, other: Row) -> float:
    """Half the distance between the quartiles of the one that varies less, in seconds."""
    return float(min((r["iteration"]["third"] - r["iteration"]["first"]) / 2 for r in (one, other)))


def table(cell: Cell, rows: list[Row], ours: Sequence[str], *, codec: bool = False) -> None:
    """Prints one cell, the fastest first."""
    first = rows[0]
    made = Table(
        title=f"{cell.model}, {cell.regime}: {RANKS} emulated devices, forward {first['forward']:.2f} s, backward "
        f"{first['backward']:.2f} s, limit {first['limit']:.3f} s",
        title_justify="left",
    )
    columns = ["contestant", "buckets", "iteration", "10–90 %", "of DDP", "of limit", "predicted", "error", "sent"]
    for column in [*columns, "link idle", *(["codec"] if codec else [])]:
        made.add_column(column, justify="left" if column == "contestant" else "right")
    for r in sorted(rows, key=median):
        q, predicted = r["iteration"], r["prediction"]
        recorded = "" if r["recorded_idle"] is None else f" ({r['recorded_idle']:.0%})"
        cells = [
            f"[bold]{r['policy']}[/]" if r["policy"] in ours else r["policy"],
            buckets(r),
            f"{q['median']:.3f} s",
            f"{q['low']:.3f}–{q['high']:.3f}",
            f"{q['median'] / median(of(rows, 'ddp')):.3f}",
            f"{q['median'] / r['limit']:.3f}",
            f"{predicted:.3f} s" if predicted else "",
            f"{predicted / q['median'] - 1:+.1%}" if predicted else "",
            f"{r['sent_bytes'] / fewest_bytes(r['parameter_bytes']):.3f}",
            f"{r['link_idle']:.0%}{recorded}",
        ]
        made.add_row(*cells, *([f"{r['codec'] * 1e3:.0f} ms"] if codec else []))
    console.print(made)

"""Gradients and parameters in the time that computing leaves: dovetail with one line and with two, DDP and FSDP2.

Devices are emulated (they wait for layer times whose proportions were measured on this machine), gradients and
parameters are real and cross real links limited to a rate (network namespaces, so root is needed). All contestants take
turns in the same processes, and every one runs its real optimiser on the host:

  ddp        torch's DistributedDataParallel as it is
  ddp-tuned  the same with the best of five bucket caps, found before the contest
  merge      dovetail's wrapper, one line: buckets that it has planned and tried
  split      every bucket reduce-scattered behind backward and all-gathered behind the next forward
  both       dovetail's wrapper and its optimiser, two lines: every bucket all-reduced or split, as planned and tried
  fsdp2      fully_shard per block, reshard_after_forward=False, two blocks prefetched

The limit is max(compute, communication): what the devices compute, and one all-reduce of all gradients at once with
nothing beside it, by torch or by dovetail's ring, whichever is faster. The optimiser is not in it. A real transformer
is trained with DDP and with plans of both kinds that change on the way, and the losses are compared.
Run: python benchmarks/overlap.py [--quick] [--json FILE] [--cells N,N] [--keep FILE --most N]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common import Check, console, finish, parser
from dovetail.core.errors import Error
from dovetail.emulate.launch import launch
from dovetail.emulate.shaped_network import available
from overlap_cells import RANKS, Cell, Row, chosen, fewest_bytes, groups, median, of, options, ratio, run, spread, table
from overlap_records import Outcome

TRAINING = str(Path(__file__).with_name("overlap_training.py"))
CONTESTANTS = ("ddp", "ddp-tuned", "merge", "both", "split", "fsdp2")
OURS = "both"
UNSEEN = ("BERT-like", "GPT-2-like")
"""Models on which nothing was tried while the predictors were made: their predictions are checked apart too."""
CELLS = [
    *(Cell("ResNet-50", r) for r in (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.8, 2.5)),
    *(Cell("ViT-like", r) for r in (0.4, 0.8, 1.0, 1.2, 2.5)),
    Cell("ResNet-50", 0.86, "2gbit"),
    Cell("ViT-like", 0.86, "2gbit"),
    *(Cell(model, 1.0) for model in UNSEEN),
]
QUICK = [Cell("ResNet-50", 1.0)]
TARGETS = {(0.8, "1gbit"): 0.80, (1.0, "1gbit"): 0.76, (1.2, "1gbit"): 0.80, (0.86, "2gbit"): 0.77}
"""The most that two lines may take of DDP's time, by communication / compute and the links' rate."""
OF_LIMIT = 1.08


def main() -> None:
    arguments = parser(__doc__ or "")
    options(arguments, CELLS)
    arguments.add_argument("--training", action="store_true", help="only the comparison of losses")
    args = arguments.parse_args()
    steps = 120 if args.quick else 300
    if args.training:
        finish("overlap", args, [], [training_check(steps)])
        return
    if reason := available():
        console.print(f"benchmarks/overlap.py: {reason}")
        sys.exit(1)
    rows, complete = run(args, chosen(args, CELLS, QUICK), CONTESTANTS, show)
    if not complete:
        return
    finish("overlap", args, rows, [*contest_checks(rows), training_check(steps)], tables={"gains": gains(rows)})


def show(cell: Cell, outcome: Outcome, rows: list[Row]) -> None:
    table(cell, rows, [OURS])
    for name, c in outcome.network.collectives.items():
        console.print(f"{name}: {c.fit.latency * 1e3:.1f} ms + {c.fit.seconds_per_byte * 1e9:.2f} ns/B")
    if met := outcome.network.contention:
        console.print(
            f"contention: {met.gap * 1e3:.1f} ms between collectives, a collective {met.collective:+.1%} while "
            f"computing, computing {met.compute:+.1%} during one"
        )
    everything = ", ".join(f"{s:.3f} s by {name}" for name, s in outcome.all_reduce.items())
    console.print(f"all gradients in one all-reduce: {everything}; whole optimiser {outcome.update * 1e3:.1f} ms")
    for entry in outcome.entries:
        if entry.what:
            console.print(f"{entry.name}: {entry.what}")
    console.print()


def gains(rows: list[Row]) -> list[str]:
    """What a user of DDP gains, as Markdown: shares of the time of DDP's default."""
    lines = [
        "| model | communication / compute | DDP, s | best caps | one line | all split | **two lines** | limit |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell, members in groups(rows).items():
        ddp = median(of(members, "ddp"))
        shares = [f"{ratio(members, name, 'ddp'):.2f}" for name in ("ddp-tuned", "merge", "split")]
        rate = "" if cell.rate == "1gbit" else f" ({cell.rate.removesuffix('gbit')} Gbit/s)"
        lines.append(
            f"| {cell.model} | {cell.ratio:g}{rate} | {ddp:.3f} | {' | '.join(shares)} "
            f"| **{ratio(members, OURS, 'ddp'):.2f}** | {members[0]['limit'] / ddp:.2f} |"
        )
    return lines


def contest_checks(rows: list[Row]) -> list[Check]:
    cells = groups(rows)
    return [
        *target_checks(cells),
        limit_check(cells),
        rivals_check(cells),
        fsdp_check(cells),
        bytes_check(cells),
        *prediction_checks(rows),
    ]


def target_checks(cells: dict[Cell, list[Row]]) -> list[Check]:
    checks = []
    for (communication, rate), target in TARGETS.items():
        found = {
            c.model: ratio(r, OURS, "ddp")
            for c, r in cells.items()
            if (c.ratio, c.rate) == (communication, rate) and c.model not in UNSEEN
        }
        if found:
            where = f"communication {communication:g} × compute at {rate.removesuffix('gbit')} Gbit/s"
            checks.append(
                Check(
                    name=f"{where}: two lines against DDP's default",
                    value=listed(found.items()),
                    target=f"≤ {target:.2f}",
                    holds=max(found.values()) <= target,
                )
            )
    return checks


def limit_check(cells: dict[Cell, list[Row]]) -> Check:
    """Without the unseen models: nothing hides their embeddings, which come last in backward and first in forward."""
    found = {c: median(of(r, OURS)) / r[0]["limit"] for c, r in cells.items() if c.model not in UNSEEN}
    return Check(
        name="two lines against max(compute, communication as measured), every cell",
        value=listed((label(c), share) for c, share in found.items()),
        target=f"≤ {OF_LIMIT} in every cell",
        holds=max(found.values(), default=0.0) <= OF_LIMIT,
    )


def rivals_check(cells: dict[Cell, list[Row]]) -> Check:
    """Two lines against the best of all others; what lies within the spread of both is a tie."""
    found, worse = [], 0
    for c, rows in cells.items():
        ours = of(rows, OURS)
        best = min((r for r in rows if r is not ours), key=median)
        apart, noise = median(ours) - median(best), spread(ours, best)
        worse += apart > noise
        if apart > 0:
            found.append(
                f"{label(c)}: {apart / median(best):+.1%} of {best['policy']}, spread ±{noise / median(best):.1%}"
            )
    return Check(
        name="two lines against the best of the other contestants, every cell",
        value="; ".join(found) or f"faster in all {len(cells)}",
        target="never slower by more than the spread",
        holds=not worse,
    )


def fsdp_check(cells: dict[Cell, list[Row]]) -> Check:
    found = {label(c): ratio(r, OURS, "fsdp2") for c, r in cells.items()}
    return Check(
        name="two lines against FSDP2 (reshard_after_forward=False)",
        value=listed(found.items()),
        target="< 1 in every cell",
        holds=max(found.values()) < 1,
    )


def bytes_check(cells: dict[Cell, list[Row]]) -> Check:
    ours = [of(rows, OURS) for rows in cells.values()]
    moved = [r["sent_bytes"] / fewest_bytes(r["parameter_bytes"]) - 1 for r in ours]
    return Check(
        name="bytes sent per rank against 2(n−1)/n × parameter bytes, the worst cell",
        value=f"{max(moved, key=abs):+.2%}",
        target="within 3 %",
        holds=max(map(abs, moved)) <= 0.03,
    )


def prediction_checks(rows: list[Row]) -> list[Check]:
    """Predictions of every contestant that can be planned, and of them those of both lines."""
    errors = [r["prediction"] / median(r) - 1 for r in rows if r["prediction"]]
    promises = [r["promised"] / median(r) - 1 for r in rows if r["promised"]]
    ours = [r["prediction"] / median(r) - 1 for r in rows if r["prediction"] and r["policy"] == OURS]
    if not ours:
        return [Check("predicted against measured iteration time", "nothing was predicted", "median ≤ 3 %", False)]
    sizes, own = np.abs(errors), np.abs(promises or [np.nan])
    worst = max((r for r in rows if r["prediction"]), key=lambda r: abs(r["prediction"] / median(r) - 1))
    return [
        Check(
            name="predicted against measured iteration time, median error",
            value=f"{np.median(sizes):.1%} over {len(errors)} predictions; {np.median(np.abs(ours)):.1%} for two "
            f"lines, {np.median(own):.1%} for what dovetail promised while it trained",
            target="≤ 3 %",
            holds=bool(np.median(sizes) <= 0.03),
        ),
        Check(
            name="predicted against measured iteration time, worst error",
            value=f"{max(errors, key=abs):+.1%} ({worst['policy']}, {worst['model']}, {worst['regime']})",
            target="within 6 %",
            holds=bool(sizes.max() <= 0.06),
        ),
        Check(
            name="predicted against measured iteration time, mean signed error",
            value=f"{np.mean(errors):+.1%}; {np.mean(ours):+.1%} for two lines",
            target="within ± 2 %",
            holds=bool(abs(np.mean(errors)) <= 0.02),
        ),
        *unseen_check(rows),
    ]


def unseen_check(rows: list[Row]) -> list[Check]:
    """Predictions for the models that were not looked at while the predictors were made."""
    errors = [r["prediction"] / median(r) - 1 for r in rows if r["prediction"] and r["model"] in UNSEEN]
    if not errors:
        return []
    typical, worst, mean = float(np.median(np.abs(errors))), max(errors, key=abs), float(np.mean(errors))
    return [
        Check(
            name=f"predictions for {' and '.join(UNSEEN)}, which no predictor was chosen on",
            value=f"median {typical:.1%}, worst {worst:+.1%}, mean {mean:+.1%} over {len(errors)}",
            target="median ≤ 3 %, worst within 6 %, mean within ± 2 %",
            holds=typical <= 0.03 and abs(worst) <= 0.06 and abs(mean) <= 0.02,
        )
    ]


def label(cell: Cell) -> str:
    rate = "" if cell.rate == "1gbit" else f" at {cell.rate.removesuffix('gbit')} Gbit/s"
    return f"{cell.model} {cell.ratio:g}{rate}"


def listed(found: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in found)


def training_check(steps: int) -> Check:
    """A transformer on the sources of Python's library, four ranks on loopback, the same data for all."""
    told: dict[str, Any] = launch([TRAINING, str(steps)], ranks=RANKS, timeout=1800)[0].report
    ddp = np.array(told["losses"]["ddp"])
    apart = {n: float(np.max(np.abs(np.array(curve) - ddp) / ddp)) for n, curve in told["losses"].items() if n != "ddp"}
    worst = max(apart.values())
    return Check(
        name=f"a transformer trained for {steps} steps (AdamW, {RANKS} ranks): loss curve equal to DDP's with both "
        "kinds of buckets, other buckets from the middle on, and with dovetail's own planning on the way",
        value=f"{ddp[0]:.3f} → {ddp[-20:].mean():.3f} with DDP; largest difference at any step, of the loss: "
        + ", ".join(f"{value:.1e} {name} ({told['plans'][name]})" for name, value in apart.items()),
        target="≥ 300 steps, differences of rounding (≤ 1e-3)",
        holds=steps >= 300 and worst <= 1e-3,
    )


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/overlap.py: {e}", markup=False)
        sys.exit(1)

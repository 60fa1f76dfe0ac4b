"""What fewer bytes cost in quality: the tasks of the quality study in fp32, bf16 and int8, with and without feedback.

A run in fp32 that only adds the workers' gradients in another order ends elsewhere too: so much is rounding.
Four workers in one process, with the arithmetic of the real exchange (see precision_workers.py). Each finished run is
one line of the output, so the study can be stopped at any time: the same command goes on where the file ends. --report
trains nothing; it makes the tables, and measures codecs and errors of sums (precision_error.py, half a minute).
All of it takes one core for about an hour.
Run: python benchmarks/precision_quality.py --out runs.jsonl [--tasks digits,text,…] [--report --json FILE]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Check, append_line, console, finish, parser
from dovetail.core.errors import Error
from pages import PAGE, show
from partial_tasks import TASKS
from precision_error import RANKS, SumError, measure, speeds
from precision_workers import Variant, train

SEEDS = {"digits": 5, "text": 3, "fashion": 3}
ASIDE_SEEDS = 3
"""Seeds of the variants that only explain the others."""

EXACT = "fp32"
OTHER_ORDER = "fp32, added in reverse"
MAIN = (Variant(EXACT), Variant("bf16", "bf16"), Variant("int8", "int8"))
ASIDE = (
    Variant(OTHER_ORDER, reverse=True),
    Variant("bf16, no feedback", "bf16", feedback=False),
    Variant("int8, no feedback", "int8", feedback=False),
)
SHOWN_ASIDE = ("digits", "text")
"""Tasks that are run in these variants too; Fashion-MNIST takes most of the study's time and only does with --all."""

ABOUT = {
    "digits": "scikit-learn digits, SGD",
    "text": "characters of Python's standard library, AdamW, clipped",
    "fashion": "Fashion-MNIST, SGD",
}

Runs = list[dict[str, Any]]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--out", type=Path, default=Path("precision_quality.jsonl"), help="one line per finished run")
    options.add_argument("--tasks", default=",".join(SEEDS))
    options.add_argument("--seeds", default="", help="only these, such as 0,1")
    options.add_argument("--all", action="store_true", help="every task in reverse and without feedback too")
    options.add_argument("--most", type=int, metavar="N", help="end after so many runs")
    options.add_argument("--report", action="store_true", help="run nothing: tables from the output file")
    args = options.parse_args()
    torch.set_num_threads(1)
    if not args.report:
        run(args)
    runs = read(args.out)
    if not runs:
        raise Error(f"{args.out}: expected finished runs, got none")
    losses(runs)
    speeds()
    rows = measure(ranks=RANKS[:1] if args.quick else RANKS)
    finish("precision_quality", args, runs, [*checks(runs), *error_checks(rows)], tables=PAGE)


def read(path: Path) -> Runs:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def todo(args: Any) -> list[tuple[str, Variant, int]]:
    """What is to be run, what matters most first: a quick study is one seed of the digits."""
    names = ["digits"] if args.quick else args.tasks.split(",")
    for name in names:
        if name not in SEEDS:
            raise Error(f"--tasks: expected some of {', '.join(SEEDS)}, got {name!r}")
    try:
        only = [int(s) for s in args.seeds.split(",")] if args.seeds else None
    except ValueError:
        raise Error(f"--seeds: expected numbers such as 0,1, got {args.seeds!r}") from None
    cells = []
    for variants in (MAIN, ASIDE):
        for seed in only if only is not None else range(max(SEEDS.values())):
            for name in names:
                seeds = 1 if args.quick else SEEDS[name] if variants is MAIN else ASIDE_SEEDS
                if (only is not None or seed < seeds) and (variants is MAIN or args.all or name in SHOWN_ASIDE):
                    cells += [(name, variant, seed) for variant in variants]
    return cells


def run(args: Any) -> None:
    have = {(r["task"], r["variant"], r["seed"]) for r in read(args.out)}
    left = [cell for cell in todo(args) if (cell[0], cell[1].name, cell[2]) not in have][: args.most]
    began = time.monotonic()
    for i, (name, variant, seed) in enumerate(left):
        try:
            task = TASKS[name]()
        except Error as e:
            console.print(f"skipped {name}: {e}")
            continue
        result = train(task, variant, seed)
        append_line(args.out, result)
        console.print(
            f"{i + 1} of {len(left)}: {name}, {variant.name}, seed {seed}: loss {result['loss']:.4f}, "
            f"{result['accuracy']:.2%} right, gradients off by {result['error']:.1e}; {result['seconds']:.0f} s of a "
            f"core, {(time.monotonic() - began) / 60:.0f} min since the start"
        )


def by_variant(runs: Runs, task: str) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for r in runs:
        if r["task"] == task:
            found.setdefault(r["variant"], {})[r["seed"]] = r
    return found


def values(seeds: dict[int, dict[str, Any]], field: str = "loss") -> np.ndarray:
    return np.array([seeds[s][field] for s in sorted(seeds)], dtype=np.float64)


def spread(found: dict[str, dict[int, dict[str, Any]]]) -> float:
    """The largest difference between two runs in fp32: seeds, and the order in which workers' gradients are added."""
    losses = np.concatenate([values(found[name]) for name in (EXACT, OTHER_ORDER) if name in found])
    return float(losses.max() - losses.min())


def difference(seeds: dict[int, dict[str, Any]], exact: dict[int, dict[str, Any]]) -> np.ndarray:
    """Test loss above that of fp32, seed by seed: a seed begins with the same weights and sees the same samples."""
    shared = sorted(set(seeds) & set(exact))
    found: np.ndarray = values({s: seeds[s] for s in shared}) - values({s: exact[s] for s in shared})
    return found


def losses(runs: Runs) -> None:
    rows = []
    for task in SEEDS:
        found = by_variant(runs, task)
        if EXACT not in found:
            continue
        exact = found[EXACT]
        for variant in (*MAIN, *ASIDE):
            if variant.name not in found:
                continue
            seeds = found[variant.name]
            above = difference(seeds, exact)
            inside = "yes" if abs(above.mean()) <= spread(found) else "**no**"
            compared = variant.name != EXACT
            rows.append(
                {
                    "task": f"{task}: {ABOUT[task]}" if variant.name == EXACT else "",
                    "variant": variant.name,
                    "seeds": str(len(seeds)),
                    "loss": f"{values(seeds).mean():.4f}",
                    "spread": f"{values(seeds).min():.4f}–{values(seeds).max():.4f}",
                    "above": f"{above.mean():+.4f}{_standard_error(above)}" if compared else "",
                    "within": inside if compared and len(exact) > 1 else "",  # one seed shows no spread
                    "right": f"{values(seeds, 'accuracy').mean():.2%}",
                    "error": f"{values(seeds, 'error').mean():.1e}",
                    "plateau": f"{np.mean([r['curve'][-2][1] - r['curve'][-1][1] for r in seeds.values()]):+.4f}",
                }
            )
    columns = {
        "task": "task",
        "sent as": "variant",
        "seeds": "seeds",
        "test loss": "loss",
        "seeds' range": "spread",
        "above fp32 (± standard error)": "above",
        "within fp32's range": "within",
        "right": "right",
        "gradients off by": "error",
        "gained in the last eighth": "plateau",
    }
    show("losses", "final test loss, means over seeds", rows, {c: _column(field) for c, field in columns.items()})


def _column(field: str) -> Any:
    return lambda row: row[field]


def _standard_error(above: np.ndarray) -> str:
    return f" ± {above.std(ddof=1) / len(above) ** 0.5:.4f}" if len(above) > 1 else ""


def checks(runs: Runs) -> list[Check]:
    made = []
    for task in SEEDS:
        found = by_variant(runs, task)
        for name in ("bf16", "int8"):
            if not {EXACT, name} <= set(found) or len(found[EXACT]) < 2:
                continue  # one seed shows no spread
            above, allowed = float(difference(found[name], found[EXACT]).mean()), spread(found)
            made.append(
                Check(
                    name=f"{task}: {name} with error feedback ends at fp32's test loss",
                    value=f"{above:+.4f} over {len(found[name])} seeds",
                    target=f"within the range of runs in fp32, {allowed:.4f}",
                    holds=abs(above) <= allowed and len(found[name]) >= 3,
                )
            )
    return made


def error_checks(rows: list[SumError]) -> list[Check]:
    ratios = [r.ring / r.straight for r in rows]
    fed = [r.straight_unfed / r.straight_fed for r in rows]
    return [
        Check(
            name="contributions that are rounded once are summed more exactly than around a ring",
            value=f"the ring is off by {min(ratios):.1f} to {max(ratios):.1f} times as much",
            target="> 1 in every row",
            holds=min(ratios) > 1,
        ),
        Check(
            name="error feedback makes sums over steps more exact",
            value=f"{min(fed):.1f} to {max(fed):.1f} times",
            target="> 1 in every row",
            holds=min(fed) > 1,
        ),
    ]


if __name__ == "__main__":
    try:
        main()
    except Error as e:
        console.print(f"benchmarks/precision_quality.py: {e}", markup=False)
        sys.exit(1)

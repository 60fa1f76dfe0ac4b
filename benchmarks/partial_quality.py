"""What partial backpropagation costs in quality: full backpropagation, partial variants, and controls of equal work.

Four workers in one process, exact to rounding (see partial_oracle.py). Each finished run is one line of the output,
so the study can be stopped at any time and goes on with --resume; a run takes one core for less than five minutes.
Work is counted in floating-point operations (a backward pass is two forward passes) as a share of one full run.
Run: python benchmarks/partial_quality.py --out runs.jsonl [--resume] [--tasks digits,fashion,…] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from common import append_line, console, finish, parser
from dovetail.core.errors import Error
from dovetail.core.files import write_text
from partial_oracle import LADDER, Contestant, train
from partial_report import TWICE, checks, markdown, show
from partial_tasks import TASKS

SEEDS = {"digits": 5, "fashion": 3, "text": 3, "short": 3, "early": 3}

MAIN = (
    Contestant("full"),
    Contestant("ladder", counts=LADDER),
    Contestant("balanced", counts=LADDER, balanced=True),
    Contestant("guard", epsilon=0.2),
    Contestant("late ladder", counts=LADDER, begins=0.5),
    Contestant("3 of 4 workers", workers=((0.0, 3),)),
    Contestant("75 % of the steps", steps=0.75),
    Contestant("4 workers, then 2", workers=((0.0, 4), (0.5, 2))),
    Contestant("ladder, 4/3 of the steps", counts=LADDER, steps=4 / 3),
    Contestant("annealed guard ε=0.03", epsilon=0.03, rule="annealed"),
    Contestant("annealed guard ε=0.05", epsilon=0.05, rule="annealed"),
    Contestant("annealed guard ε=0.1", epsilon=0.1, rule="annealed"),
    Contestant("annealed guard ε=0.1, 8/7 of the steps", epsilon=0.1, rule="annealed", steps=8 / 7),
)
FRONTIER = (
    *(Contestant(f"guard ε={e}", epsilon=e) for e in (0.1, 0.3, 0.4)),
    Contestant("guard ε=0.2, plain metric", epsilon=0.2, metric="plain"),
    *(Contestant(f"annealed guard ε={e}", epsilon=e, rule="annealed") for e in (0.2, 0.3)),
    Contestant("late ladder, last quarter", counts=LADDER, begins=0.75),
    Contestant("late 2,2,3,4", counts=(2, 2, 3, 4), begins=0.5),
    Contestant("2,3,4,4", counts=(2, 3, 4, 4)),
    Contestant("late guard ε=0.4", epsilon=0.4, begins=0.4),
    Contestant("late balanced", counts=LADDER, begins=0.5, balanced=True),
    Contestant("4 workers, then 3", workers=((0.0, 4), (0.5, 3))),
    Contestant(TWICE, steps=2.0),
)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--out", type=Path, default=Path("partial_quality.jsonl"), help="one line per finished run")
    options.add_argument("--resume", action="store_true", help="go on where the output file ends")
    options.add_argument("--tasks", default=",".join(SEEDS))
    options.add_argument("--group", choices=("main", "frontier", "all"), default="main")
    options.add_argument("--only", default="", help="contestants by name, separated by ;")
    options.add_argument("--seeds", default="", help="only these, such as 0,1")
    options.add_argument("--most", type=int, metavar="N", help="end after so many runs")
    options.add_argument("--report", action="store_true", help="run nothing: tables from the output file")
    options.add_argument("--markdown", type=Path, metavar="FILE.md", help="the tables for docs/")
    options.add_argument("--plot", type=Path, metavar="FILE.png")
    args = options.parse_args()
    torch.set_num_threads(1)
    done = read(args.out)
    if done and not (args.resume or args.report):
        raise Error(f"{args.out}: holds {len(done)} runs already: go on with --resume, or name another file with --out")
    if not args.report:
        run(args, done)
    runs = read(args.out)
    if not runs:
        raise Error(f"{args.out}: expected finished runs, got none")
    if args.most is not None and not args.report:
        return
    show(runs)
    if args.markdown:
        write_text(args.markdown, markdown(runs))
    if args.plot:
        from partial_report import plot

        plot(runs, args.plot)
    finish("partial_quality", args, runs, checks(runs))


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def run(args: Any, done: list[dict[str, Any]]) -> None:
    have = {(r["task"], r["contestant"], r["seed"]) for r in done}
    chosen = {"main": MAIN, "frontier": FRONTIER, "all": (*MAIN, *FRONTIER)}[args.group]
    if args.only:
        names = args.only.split(";")
        chosen = tuple(c for c in (*MAIN, *FRONTIER) if c.name in names)
    todo = []
    for name in args.tasks.split(","):
        if name not in TASKS:
            raise Error(f"--tasks: expected some of {', '.join(TASKS)}, got {name!r}")
        seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else range(1 if args.quick else SEEDS[name])
        todo += [(name, c, s) for s in seeds for c in chosen if (name, c.name, s) not in have]
    todo = todo[: args.most]
    began = time.monotonic()
    for i, (name, contestant, seed) in enumerate(todo):
        try:
            task = TASKS[name]()
        except Error as e:
            console.print(f"skipped {name}: {e}")
            continue
        result = train(task, contestant, seed)
        append_line(args.out, result)
        left = (time.monotonic() - began) / (i + 1) * (len(todo) - i - 1)
        console.print(
            f"{name}, {contestant.name}, seed {seed}: loss {result['loss']:.4f}, {result['accuracy']:.2%} right, "
            f"work {result['work']:.3f}; {result['seconds']:.0f} s, about {left / 60:.0f} min left"
        )


if __name__ == "__main__":
    try:
        main()
    except Error as e:
        console.print(f"benchmarks/partial_quality.py: {e}", markup=False)
        sys.exit(1)

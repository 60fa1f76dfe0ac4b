"""A real cluster: executors, aggregators and a coordinator as processes, on eight emulated devices.

python benchmarks/cluster.py [--quick] [--json FILE]

An emulated device waits for the times of a profile; tensors, gradients, optimiser, messages and decisions are real. The
same jobs run under gang-fifo-backfill with full backpropagation and under jigsaw with the SPB ladder, on the same
executors one after the other, and the simulator replays each recorded run. Then come a foreground job beside background
jobs, kills of random processes, and a long queue. The full run takes about thirteen minutes on two idle cores.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cluster_load as load
import cluster_runs as runs
import cluster_trial as trial
from cluster_jobs import mix, profiles
from common import Check, arguments, console, finish
from dovetail.core.errors import Error
from pages import PAGE, show

Cells = list[dict[str, Any]]
BASE, MINE = "gang-fifo-backfill", "jigsaw"


def backlog(quick: bool, checks: list[Check]) -> Cells:
    count, seconds, seeds, limit = (12, (1.0, 4.0), (0,), 120.0) if quick else (24, (4.0, 16.0), (0, 1), 600.0)
    cells: Cells = []
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        paths = profiles(Path(folder))
        for seed in seeds:
            jobs = mix(count, seconds, seed, paths)
            for policy, spb in ((BASE, "off"), (MINE, "ladder")):
                cells.append({"seed": seed, **runs.backlog(policy, spb, jobs, limit=limit)})
                console.print(f"seed {seed}, {policy}: {cells[-1]['makespan']:.1f} s")
    pairs = list(zip(cells[::2], cells[1::2], strict=True))
    ratios = [b["throughput"] / a["throughput"] for a, b in pairs]
    spans = [b["makespan"] / a["makespan"] for a, b in pairs]
    what = f"{runs.DEVICES} emulated devices, {count} jobs from real profiles under backlog"
    said = f"{min(ratios):.2f}" if len(ratios) == 1 else f"{min(ratios):.2f} (least of {len(ratios)} mixes)"
    name = f"{what}: throughput relative to {BASE} on the same executors with SPB ladder"
    checks.append(Check(name, said, "≥ 1.28", min(ratios) >= 1.28))
    checks.append(Check("the same: makespan", ", ".join(f"{s:.2f}" for s in spans), "printed", True))
    worst = max((c["error"] for c in cells), key=abs)
    text = ", ".join(f"{c['error']:+.1%}" for c in cells)
    checks.append(Check("simulator's makespan against the real one", text, "within 10 %", abs(worst) <= 0.10))
    slow = max(c["overhead"] for c in cells)
    text = ", ".join(f"{c['overhead'] * 1e3:.2f} ms" for c in cells)
    checks.append(Check("dispatch overhead per task, median", text, "< 1 ms", slow < 1e-3))
    show("backlog", f"{count} jobs on {runs.DEVICES} emulated devices", cells, {
        "mix": lambda c: str(c["seed"]),
        "policy": lambda c: f"{c['policy']}, {'SPB ' + c['spb'] if c['spb'] != 'off' else 'full depth'}",
        "makespan, s": lambda c: f"{c['makespan']:.1f}",
        "predicted, s": lambda c: f"{c['predicted']:.1f}",
        "error": lambda c: f"{c['error']:+.1%}",
        "throughput": lambda c: f"{c['throughput']:.2f}",
        "busy": lambda c: f"{c['busy']:.0%}",
        "tasks": lambda c: f"{c['tasks']:,}",
        "overhead, ms": lambda c: f"{c['overhead'] * 1e3:.2f} (p90 {c['overhead_p90'] * 1e3:.2f})",
    })  # fmt: skip
    return cells


def promise(quick: bool, checks: list[Check]) -> Cells:
    cell = runs.promise(steps=40 if quick else 200, limit=120.0)
    text = f"{cell['slowdown']:+.1%}; {cell['filled']:.0%} of the idle time filled"
    name = "foreground slowdown with background work filling the idle time"
    holds = cell["slowdown"] <= 0.05 and cell["filled"] >= 0.60
    checks.append(Check(name, text, "≤ 5 % with ≥ 60 % filled", holds))
    same = "same" if cell["same_curve"] else "different"
    checks.append(Check("the foreground job's losses, alone and beside others", same, "same bits", cell["same_curve"]))
    show("promise", "a network-bound foreground job on all devices, and short background tasks", [cell], {
        "iteration alone, ms": lambda c: f"{c['alone'] * 1e3:.1f}",
        "beside others, ms": lambda c: f"{c['beside'] * 1e3:.1f}",
        "slower by": lambda c: f"{c['slowdown']:+.1%}",
        "idle time filled": lambda c: f"{c['filled']:.0%}",
    })  # fmt: skip
    return [cell]


def chaos(quick: bool, checks: list[Check]) -> Cells:
    count, steps, every = (4, 40, 1.0) if quick else (20, 120, 2.0)
    found = trial.chaos(
        count, steps=steps, devices=runs.DEVICES, every=every, seed=0, limit=90.0 if quick else 400.0, most=10**9
    )
    finished = sum(state == "finished" for state in found.states.values())
    killed = ", ".join(f"{n} {kind}s" for kind, n in found.killed.items())
    console.print(f"chaos: killed {killed} in {found.seconds:.0f} s, undisturbed {found.undisturbed_seconds:.0f} s")
    holds = finished == count and not found.differ and not found.leases and not found.left
    text = f"{finished} finished, {count - len(found.differ)} curves equal, left behind: {found.leases + found.left}"
    name = (
        f"chaos: {count} jobs, kill -9 of {killed}; all finish, every loss curve equals the undisturbed one, no orphan"
    )
    checks.append(Check(name, "; ".join([text, *found.reasons]), "all", holds))
    return [asdict(found)]


def many(quick: bool, checks: list[Check]) -> Cells:
    count, asked = (300, 1500) if quick else (1000, 10_000)
    with trial.cluster(devices=runs.DEVICES, emulated=True) as client:
        said = load.queued(client, count)
        codes = load.fuzz(client, asked, seed=0)
        after = trial.ask(client, "status", jobs=False)
    text = f"{said.status * 1e3:.0f} ms, worst {said.worst * 1e3:.0f} ms ({said.bytes / 1e3:.0f} kB)"
    checks.append(Check(f"load: {count:,} queued jobs, `status`", text, "< 200 ms", said.status < 0.2))
    errors = sum(n for code, n in codes.items() if code >= 500 or code < 0)
    text = ", ".join(f"{n:,} × {code}" for code, n in sorted(codes.items()))
    holds = errors == 0 and sum(codes.values()) == asked and bool(after["devices"])
    checks.append(Check(f"load: {asked:,} fuzzed API requests", text, "no 500", holds))
    return [{**asdict(said), "codes": {str(k): v for k, v in codes.items()}}]


def main() -> None:
    args = arguments(__doc__ or "")
    checks: list[Check] = []
    tables: dict[str, Cells] = {}
    for part in (backlog, promise, chaos, many):
        console.print(f"[dim]{part.__name__} at {time.strftime('%H:%M:%S')}[/]")
        try:
            tables[part.__name__] = part(args.quick, checks)
        except (trial.Unfinished, Error) as e:  # recorded as a failed check: the other parts still run
            tables[part.__name__] = []
            checks.append(Check(part.__name__, f"not made: {e}", "made", False))
    tables["channel"] = [runs.channel(size, 5 if args.quick else 20) for size in (1, 16, 128)]
    show("channel", "parameters to an executor: on the same machine nothing is copied; elsewhere (loopback here)",
         tables["channel"], {
        "MiB": lambda c: str(c["MiB"]),
        "shared memory, ms": lambda c: "0",
        "one copy in memory, ms": lambda c: f"{c['one copy'] * 1e3:.2f}",
        "tensor channel, ms": lambda c: f"{c['channel'] * 1e3:.2f}",
    })  # fmt: skip
    cells = [{"table": k, **row} for k, rows in tables.items() for row in rows]
    finish("cluster", args, cells, checks, tables=PAGE)


if __name__ == "__main__":
    main()

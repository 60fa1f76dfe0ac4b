"""Iteration-level scheduling against gangs, simulated: python benchmarks/schedule.py [--quick] [--json FILE]

Everything here is predicted by the simulator: no job runs. Each policy meets the same jobs, over several seeds. The
full run takes about seven minutes on two cores and draws the load curves into docs/schedule.png; its tables are put
into the page by --into docs/schedule.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import schedule_runs as runs
import schedule_studies as studies
from common import Check, finish
from pages import PAGE, arguments, put, show
from schedule_engines import engines
from schedule_studies import BASE

Cells = list[dict[str, Any]]
FULL = f"{BASE},jigsaw:ladder,{BASE}:ladder,jigsaw,jigsaw-srpt:ladder,jigsaw-las:ladder,jigsaw-cp:ladder,\
jigsaw-slo:ladder,jigsaw:late,gang-fifo,gang-easy-backfill,gang-srsf,tiresias-las,gandiva-timeslice,static-partition"
QUICK = f"{BASE},jigsaw:ladder,{BASE}:ladder,jigsaw,gang-easy-backfill,gang-srsf"
MIX = f"60 device-bound jobs on 32 devices under backlog, SPB ladder, against {BASE}"
PUBLISHED = (("muri/trace1.csv", 64), ("muri/trace1.csv", 128), ("muri/trace1.csv", 256), ("philly/philly.csv", 2048))


def spread(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda c: f"{c[name]['mean']:.2f} ({c[name]['low']:.2f}–{c[name]['high']:.2f})"


def exactness(checks: list[Check]) -> None:
    error = studies.closed_forms()
    checks.append(Check("closed forms hold exactly", f"largest relative error {error:.1e}", "≤ 1e-9", error <= 1e-9))
    said, held = runs.invariants()
    name = "never two tasks on a device, memory exceeded or a barrier broken: random workloads, every policy"
    checks.append(Check(name, said, "none broken", held))


def saturation(cells: Cells, checks: list[Check]) -> None:
    by_policy: dict[str, Cells] = {}
    for c in cells:
        by_policy.setdefault(c["policy"], []).append(c)
    for label, target in (("jigsaw", 0.97), ("jigsaw, jitter 4 %, switch 2 ms", 0.0)):
        shares = [c["share"] for c in by_policy[label]]
        text = f"{min(shares):.3f} (mean {np.mean(shares):.3f})"
        name = f"saturated homogeneous jobs, share of the bound, least of {len(shares)}: {label}"
        checks.append(Check(name, text, f"≥ {target}" if target else "printed", min(shares) >= target))

    def least(label: str, figure: str) -> str:
        values = [c[figure] for c in by_policy[label]]
        return f"{min(values):.3f} ({np.mean(values):.3f})"

    title = "saturated homogeneous jobs on 16 devices, share of the bound: least (mean) of 18"
    show("saturated", title, list(by_policy), {
        "policy": lambda label: label,
        "while there is a queue": lambda label: least(label, "share"),
        "from the first task to the last": lambda label: least(label, "batch"),
    })  # fmt: skip
    show("saturated-cells", "jigsaw by its defaults, in units of full gangs", by_policy["jigsaw"], {
        "workers": lambda c: str(c["k"]),
        "backward/forward": lambda c: f"{c['backward']:g}",
        "off-device share": lambda c: f"{c['off']:g}",
        "reached": lambda c: f"{c['reached']:.3f}",
        "bound": lambda c: f"{c['bound']:.3f}",
        "share": lambda c: f"{c['share']:.3f}",
    })  # fmt: skip


def gains(cells: Cells, checks: list[Check]) -> None:
    by_name = {c["policy"]: c for c in reversed(cells)}  # the first workload's: device-bound under backlog
    mine, seeds = by_name["jigsaw:ladder"], cells[0]["seeds"]
    gain, makespan = mine["throughput"]["mean"], mine["makespan"]["mean"]
    over = f"mean (lowest–highest) of {seeds} seeds"
    checks.append(Check(f"{MIX}: throughput, {over}", spread("throughput")(mine), "mean ≥ 1.40", gain >= 1.40))
    checks.append(Check(f"{MIX}: makespan, {over}", spread("makespan")(mine), "mean ≤ 0.75", makespan <= 0.75))
    for what, name in (("SPB alone", f"{BASE}:ladder"), ("iteration-level alone", "jigsaw")):
        text = f"makespan {spread('makespan')(by_name[name])}, throughput {spread('throughput')(by_name[name])}"
        checks.append(Check(f"each ablation printed: {what}", text, "printed", True))
    show("mixes", f"60 jobs on 32 devices, relative to {BASE}: {over}", cells, {
        "workload": lambda c: c["workload"],
        "policy": lambda c: c["policy"],
        "makespan": spread("makespan"),
        "throughput": spread("throughput"),
        "mean completion": spread("mean"),
        "p99": spread("p99"),
        "busy": lambda c: f"{c['busy']['mean']:.0%}",
        "bound/makespan": lambda c: f"{c['of bound']['mean']:.2f}",
    })  # fmt: skip


def levels(cells: Cells, checks: list[Check]) -> None:
    for what in ("makespan", "completion"):
        errors = [abs(c[what]) for c in cells]
        text = f"largest {max(errors):.1%}, mean {np.mean(errors):.1%}, of {len(errors)} mixes"
        name = f"fluid level agrees with the task level, every mix: {'mean ' if what != 'makespan' else ''}{what}"
        checks.append(Check(name, text, "≤ 5 %", max(errors) <= 0.05))
    sure = [abs(c["makespan"]) for c in cells if c["makespan range"] <= 0.05]
    text = f"largest {max(sure):.1%}, mean {np.mean(sure):.1%}, of {len(sure)} mixes"
    name = "the same, mixes whose task-level makespans differ by at most 5 % among seeds of jitter: makespan"
    checks.append(Check(name, text, "≤ 5 %", max(sure) <= 0.05))

    def error(name: str, figure: str) -> str:
        values = [c[figure] for c in cells if c["policy"] == name]
        return f"{np.mean(values):+.1%} ({np.median(np.abs(values)):.1%}, {np.max(np.abs(values)):.1%})"

    def own(name: str, figure: str) -> str:
        values = [c[figure] for c in cells if c["policy"] == name]
        return f"{np.mean(values):.1%}, {np.max(values):.1%}"

    names = list(dict.fromkeys(c["policy"] for c in cells))
    title = "fluid level against task level on the same mixes: mean error (median, largest without its sign)"
    show("levels", title, names, {
        "policy": lambda name: name,
        "makespan": lambda name: error(name, "makespan"),
        "mean completion": lambda name: error(name, "completion"),
        "makespan, one run against one run": lambda name: error(name, "makespan of one run"),
        "task level's own spread: mean, largest": lambda name: own(name, "makespan of itself"),
        "fluid level's": lambda name: own(name, "makespan of fluid itself"),
    })  # fmt: skip


def contest(cells: Cells, checks: list[Check]) -> None:
    ends = [c["makespan"] for c in cells]
    apart = max(ends) / min(ends) - 1
    rate = {c["engine"]: c["rate"] for c in cells}
    mine = next(iter(rate.values()))
    text = f"{mine / 1e3:,.0f} thousand tasks/s; all find the same makespan within {apart:.0e}"
    checks.append(Check("numeric engine chosen by measurement", text, "same makespan", apart <= 1e-9))
    show("engines", "engines for the task level on the same jobs", cells, {
        "engine": lambda c: c["engine"],
        "thousand tasks/s": lambda c: f"{c['rate'] / 1e3:,.0f}",
        "of the one in use": lambda c: f"{c['rate'] / mine:.2f}",
    })  # fmt: skip


def full_scale(quick: bool, checks: list[Check]) -> Cells:
    cells: Cells = []
    for what, trace, devices, limit in (
        ("Philly, 82,247 jobs on 2,048 devices, jigsaw", "philly/philly.csv", 2048, 60.0),
        ("Muri trace 1 on 128 devices, jigsaw", "muri/trace1.csv", 128, 5.0),
    ):
        if not (runs.DATA / trace).exists():
            text = "not made: the trace is not here"
            checks.append(Check(f"{what}: seconds on one core", text, f"< {limit:g}", False))
            continue
        cells.append(runs.full_scale(trace, devices, "jigsaw:ladder"))
        cpu, clock, peak = cells[-1]["cpu"], cells[-1]["seconds"], cells[-1]["peak_bytes"] / 1e9
        # The process is pinned to one core; time that other processes take of that core does not count.
        text = f"{cpu:.1f} of the core's time, {clock:.1f} by the clock"
        checks.append(Check(f"{what}: seconds on one core", text, f"< {limit:g}", cpu < limit))
        if limit == 60.0:
            checks.append(Check(f"{what}: peak memory", f"{peak:.2f} GB", "< 2 GB", peak < 2))
    if not quick and cells:
        have = [(c["trace"], c["devices"], c["policy"]) for c in cells]
        wanted = [(*where, who) for where in PUBLISHED for who in (BASE, "jigsaw", "jigsaw:ladder")]
        cells += runs.on_all_cores(runs.full_scale_of, [w for w in wanted if w not in have])
    cells.sort(key=lambda c: (c["trace"], c["devices"], c["policy"]))
    show("traces", "published traces in full, one core each; hours", cells, {
        "trace": lambda c: c["trace"],
        "devices": lambda c: f"{c['devices']:,}",
        "load": lambda c: f"{c['report']['load']:.2f}",
        "policy": lambda c: c["policy"],
        "makespan": lambda c: f"{c['report']['makespan'] / 3600:,.0f}",
        "mean completion": lambda c: f"{c['report']['groups'][0]['mean'] / 3600:,.1f}",
        "by workers": lambda c: ", ".join(f"{g['name']}: {g['mean'] / 3600:,.1f}" for g in c["report"]["groups"][1:]),
        "busy": lambda c: f"{c['report']['busy']:.0%}",
        "core's seconds": lambda c: f"{c['cpu']:.1f}",
    })  # fmt: skip
    return cells


def main() -> None:
    args = arguments(__doc__ or "")
    checks: list[Check] = []
    tables: dict[str, Cells] = {}
    exactness(checks)
    tables["engines"] = engines()
    contest(tables["engines"], checks)
    tables["saturated"] = studies.saturated(60 if args.quick else 120)
    saturation(tables["saturated"], checks)
    tables["mixes"] = studies.mixes(3 if args.quick else 8, QUICK if args.quick else FULL)
    gains(tables["mixes"], checks)
    tables["levels"] = studies.agreement(2 if args.quick else 3)
    levels(tables["levels"], checks)
    tables["full scale"] = full_scale(args.quick, checks)
    if not args.quick:
        tables["capacity"] = studies.capacities(2)
        show("capacity", "capacity: the largest load with a bounded queue, mean (lowest–highest)", tables["capacity"], {
            "policy": lambda c: c["policy"],
            "capacity": lambda c: f"{c['capacity']:.2f} ({c['low']:.2f}–{c['high']:.2f})",
        })  # fmt: skip
        studies.curves(runs.ROOT / "docs" / "schedule.png")
        PAGE["example"] = runs.example("schedule --spb ladder")
    cells = [{"table": k, **row} for k, rows in tables.items() for row in rows]
    finish("schedule", args, cells, checks, tables=PAGE)
    put(args)


if __name__ == "__main__":
    main()

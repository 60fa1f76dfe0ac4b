"""Iteration-level scheduling against gangs, simulated: python benchmarks/schedule.py [--quick] [--json FILE]

Everything here is predicted by the simulator: no job runs. Each policy meets the same jobs, over several seeds. The
full run also draws the load curves into docs/schedule.png.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table

import schedule_studies as studies
from common import Check, arguments, console, finish
from schedule_studies import BASE

Cells = list[dict[str, Any]]
FULL = f"{BASE},jigsaw:ladder,{BASE}:ladder,jigsaw,jigsaw-srpt:ladder,jigsaw-las:ladder,jigsaw-cp:ladder,\
jigsaw-slo:ladder,jigsaw:late,gang-fifo,gang-srsf,tiresias-las,gandiva-timeslice,static-partition"
QUICK = f"{BASE},jigsaw:ladder,{BASE}:ladder,jigsaw,gang-srsf"
MIX = f"60 device-bound jobs on 32 devices under backlog, SPB ladder, against {BASE}"


def show(title: str, rows: Sequence[dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> None:
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(text(row) for text in columns.values()))
    console.print(table)


def spread(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda c: f"{c[name]['mean']:.2f} ({c[name]['low']:.2f}–{c[name]['high']:.2f})"


def exactness(checks: list[Check]) -> None:
    error = studies.closed_forms()
    checks.append(Check("closed forms hold exactly", f"largest relative error {error:.1e}", "≤ 1e-9", error <= 1e-9))
    said, held = studies.invariants()
    name = "never two tasks on a device, memory exceeded or a barrier broken: random workloads, every policy"
    checks.append(Check(name, said, "none broken", held))


def saturation(cells: Cells, checks: list[Check]) -> None:
    found = min(c["share"] for c in cells)
    checks.append(
        Check("saturated homogeneous jobs, share of the bound (least of 18)", f"{found:.3f}", "≥ 0.97", found >= 0.97)
    )
    show("saturated homogeneous jobs on 16 devices, jigsaw-las, no switch cost, in units of full gangs", cells, {
        "workers": lambda c: str(c["k"]),
        "backward/forward": lambda c: f"{c['backward']:g}",
        "off-device share": lambda c: f"{c['off']:g}",
        "reached": lambda c: f"{c['reached']:.3f}",
        "bound": lambda c: f"{c['bound']:.3f}",
        "share": lambda c: f"{c['share']:.3f}",
    })  # fmt: skip


def gains(cells: Cells, checks: list[Check]) -> None:
    by_name = {c["policy"]: c for c in reversed(cells)}  # the first workload's: device-bound under backlog
    gain, makespan = by_name["jigsaw:ladder"]["throughput"]["mean"], by_name["jigsaw:ladder"]["makespan"]["mean"]
    checks.append(Check(f"{MIX}: throughput", f"{gain:.3f}", "≥ 1.40", gain >= 1.40))
    checks.append(Check(f"{MIX}: makespan", f"{makespan:.3f}", "≤ 0.75", makespan <= 0.75))
    for what, name in (("SPB alone", f"{BASE}:ladder"), ("iteration-level alone", "jigsaw")):
        a = by_name[name]
        text = f"makespan {a['makespan']['mean']:.2f}, throughput {a['throughput']['mean']:.2f}"
        checks.append(Check(f"each ablation printed: {what}", text, "printed", True))
    show(f"60 jobs on 32 devices, relative to {BASE}: mean (lowest–highest) of {cells[0]['seeds']} seeds", cells, {
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
    off = max(max(abs(c["makespan"]), abs(c["completion"])) for c in cells)
    checks.append(
        Check("fluid level agrees with the task level", f"largest mean error {off:.1%}", "≤ 5 %", off <= 0.05)
    )
    show("fluid level against task level on the same mixes: mean error (largest)", cells, {
        "policy": lambda c: c["policy"],
        "makespan": lambda c: f"{c['makespan']:+.1%} ({c['worst makespan']:.1%})",
        "mean completion": lambda c: f"{c['completion']:+.1%} ({c['worst completion']:.1%})",
    })  # fmt: skip


def full_scale(quick: bool, checks: list[Check]) -> Cells:
    cells: Cells = []
    for what, trace, devices, limit in (
        ("Philly, 82,247 jobs on 2,048 devices, jigsaw", "philly/philly.csv", 2048, 60.0),
        ("Muri trace 1 on 128 devices, jigsaw", "muri/trace1.csv", 128, 5.0),
    ):
        if not (studies.DATA / trace).exists():
            checks.append(
                Check(f"{what}: seconds on one core", "not made: the trace is not here", f"< {limit:g}", False)
            )
            continue
        cells.append(studies.full_scale(trace, devices, "jigsaw:ladder"))
        cpu, clock, peak = cells[-1]["cpu"], cells[-1]["seconds"], cells[-1]["peak_bytes"] / 1e9
        # The process is pinned to one core; what others take of that core is not the simulator's.
        text = f"{cpu:.1f} of the core's time, {clock:.1f} by the clock"
        checks.append(Check(f"{what}: seconds on one core", text, f"< {limit:g}", cpu < limit))
        if limit == 60.0:
            checks.append(Check(f"{what}: peak memory", f"{peak:.2f} GB", "< 2 GB", peak < 2))
    if not quick and cells:
        for trace, devices in (
            ("muri/trace1.csv", 64),
            ("muri/trace1.csv", 128),
            ("muri/trace1.csv", 256),
            ("philly/philly.csv", 2048),
        ):
            for who in (BASE, "jigsaw", "jigsaw:ladder"):
                if (trace, devices, who) not in [(c["trace"], c["devices"], c["policy"]) for c in cells]:
                    cells.append(studies.full_scale(trace, devices, who))
    cells.sort(key=lambda c: (c["trace"], c["devices"], c["policy"]))
    show("published traces in full, one core each; hours", cells, {
        "trace": lambda c: c["trace"].split("/")[1],
        "devices": lambda c: str(c["devices"]),
        "load": lambda c: f"{c['report']['load']:.2f}",
        "policy": lambda c: c["policy"],
        "core s": lambda c: f"{c['cpu']:.1f}",
        "makespan": lambda c: f"{c['report']['makespan'] / 3600:,.0f}",
        "mean completion": lambda c: f"{c['report']['groups'][0]['mean'] / 3600:.2f}",
        "by workers": lambda c: ", ".join(f"{g['name']}: {g['mean'] / 3600:.2f}" for g in c["report"]["groups"][1:]),
        "busy": lambda c: f"{c['report']['busy']:.0%}",
    })  # fmt: skip
    return cells


def main() -> None:
    args = arguments(__doc__ or "")
    seeds = 3
    checks: list[Check] = []
    tables: dict[str, Cells] = {}
    exactness(checks)
    tables["saturated"] = studies.saturated(60 if args.quick else 120)
    saturation(tables["saturated"], checks)
    tables["mixes"] = studies.mixes(seeds, QUICK if args.quick else FULL)
    gains(tables["mixes"], checks)
    tables["levels"] = studies.agreement(2 if args.quick else 3)
    levels(tables["levels"], checks)
    tables["full scale"] = full_scale(args.quick, checks)
    if not args.quick:
        tables["capacity"] = studies.capacities(2)
        show("capacity: the largest load with a bounded queue, two seeds", tables["capacity"], {
            "policy": lambda c: c["policy"],
            "capacity": lambda c: f"{c['capacity']:.2f} ({c['low']:.2f}–{c['high']:.2f})",
        })  # fmt: skip
        studies.curves(studies.ROOT / "docs" / "schedule.png")
    finish("schedule", args, [{"table": k, **row} for k, rows in tables.items() for row in rows], checks)


if __name__ == "__main__":
    main()

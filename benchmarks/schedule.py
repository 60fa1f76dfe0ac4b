"""Iteration-level scheduling against gangs, simulated: python benchmarks/schedule.py [--quick] [--json FILE] [--png FILE]

Everything here is predicted by the simulator: no job runs. Each policy meets the same jobs, over several seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.job import Job, Phase, ladder
from dovetail.core.store import write_text
from dovetail.planning.pack import Cluster
from dovetail.planning.schedulers import policy
from dovetail.simulate.cluster import EXACT, Costs, Outcome, bounds, capacity, report, simulate
from dovetail.simulate.cluster.bounds import saturated_bound
from dovetail.simulate.cluster.study import contenders, study
from dovetail.simulate.traces import read_trace

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "traces"
BASE = "gang-fifo-backfill"
LIKE: dict[str, tuple[float, float, float, float]] = {
    # Seconds on the device and off it in one iteration, GiB that persist and that a task needs.
    "bert": (0.164, 0.027, 1.4, 4.0),
    "gpt2": (0.414, 0.020, 2.0, 6.0),
    "vgg16": (0.072, 0.129, 2.2, 5.0),
    "vgg19": (0.085, 0.127, 2.3, 5.0),
}
DEVICE_BOUND, WITH_NETWORK_BOUND = ("bert", "gpt2"), ("bert", "gpt2", "vgg16", "vgg19")


@dataclass(frozen=True)
class Check:
    name: str
    value: float | str | None
    target: str
    holds: bool | None
    """None where it could not be made here."""


def mix(models: Sequence[str], seed: int, *, count: int = 60, devices: int = 32, load: float = 0.0) -> list[Job]:
    """Jobs of 1 to 8 workers and 16 to 160 seconds or so, all at once or with Poisson arrivals at a load."""
    rng = random.Random(seed)
    found, now = [], 0.0
    for i in range(count):
        workers = rng.choices((1, 2, 4, 8), (0.35, 0.1, 0.3, 0.25))[0]
        name = rng.choice(models)
        device, off, persistent, ephemeral = LIKE[name]
        job = Job(
            name=f"{name} {i}",
            arrival=now,
            phases=(Phase(iterations=int(math.exp(rng.uniform(math.log(16), math.log(160))) / (device + off)) + 5, workers=workers),),
            forward=device / 3,
            backward=device * 2 / 3,
            off_device=off,
            persistent_bytes=int(persistent * 2**30),
            ephemeral_bytes=int(ephemeral * 2**30),
        )  # fmt: skip
        found.append(job)
        if load:
            now += rng.expovariate(1) * job.gang_work / (load * devices)
    return found


def closed_forms() -> float:
    """The largest relative error of the task level against the closed forms, over a grid."""
    worst = 0.0
    for k in (1, 2, 3, 4, 8, 16):
        for f, b in ((1.0, 2.0), (3.0, 1.0), (0.25, 0.7)):
            one = Cluster(devices=k, node=k)
            pair = [
                Job(name=n, phases=(Phase(iterations=1, workers=k, depths=ladder(k)),), forward=f, backward=b)
                for n in "ab"
            ]
            got = simulate(pair, one, policy("jigsaw"), level="task", costs=EXACT).makespan
            worst = max(worst, abs(got / (2 * f + b * (k + 1) / k) - 1))
            job = Job(name="j", phases=(Phase(iterations=7, workers=k),), forward=f, backward=b, off_device=0.3)
            got = simulate([job], one, policy("gang-fifo"), level="task", costs=EXACT).makespan
            worst = max(worst, abs(got / (7 * (f + b + 0.3)) - 1))
    for p, s in ((1.0, 0.4), (1.0, 1.0), (1.0, 1.7), (2.0, 5.0)):
        n = 40
        pair = [Job(name=x, phases=(Phase(iterations=n, workers=1),), forward=p, off_device=s) for x in "ab"]
        got = simulate(pair, Cluster(devices=1), policy("jigsaw", duty_cap=9), level="task", costs=EXACT).makespan
        # Hidden: the device alternates without a pause. Not hidden: each job at its own pace, the second p later.
        expected = 2 * n * p + s if s <= p else n * (p + s) + p
        worst = max(worst, abs(got / expected - 1))
    return worst  # fmt: skip


def invariants() -> tuple[str, bool]:
    """The property tests of the task level, as they are run by `make test`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/simulate/test_cluster_tasks.py",
        "-k",
        "invariants",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    lines = run.stdout.strip().splitlines()
    return (lines[-1] if lines else "did not run"), run.returncode == 0  # fmt: skip


def saturated(iterations: int) -> list[dict[str, Any]]:
    """Many equal ladder jobs on 16 devices: the share of the bound that they reach."""
    cells = []
    for k in (2, 4, 8):
        for b in (1.0, 2.0):
            for off in (0.0, 0.15, 0.3):
                phase = Phase(iterations=iterations, workers=k, depths=ladder(k))
                jobs = [
                    Job(name=str(i), phases=(phase,), forward=1.0, backward=b, off_device=off * (1 + b))
                    for i in range(3 * 16 // k)
                ]
                chosen = policy("jigsaw-las", duty_cap=9)
                outcome = simulate(
                    jobs, Cluster(devices=16), chosen, level="task", costs=Costs(jitter=0.03, switch=0.0)
                )
                reached = sum(j.gang_work for j in jobs) / (16 * outcome.makespan)
                limit = saturated_bound(jobs[0])
                cells.append(
                    {"k": k, "backward": b, "off": off, "reached": reached, "bound": limit, "share": reached / limit}
                )
    return cells


CONTENDERS = (
    f"{BASE},jigsaw:ladder,{BASE}:ladder,jigsaw:full,jigsaw-srpt:ladder,jigsaw-las:ladder,jigsaw-cp:ladder,"
    "jigsaw-slo:ladder,jigsaw:late,gang-fifo,gang-srsf,tiresias-las,gandiva-timeslice,static-partition"
)


def mixes(seeds: int, who: str = CONTENDERS) -> list[dict[str, Any]]:
    """Every policy on every kind of mix, relative to gangs with backfill; the task level."""
    cells = []
    for kind, models, load in (
        ("device-bound, backlog", DEVICE_BOUND, 0.0),
        ("with network-bound, backlog", WITH_NETWORK_BOUND, 0.0),
        ("device-bound, load 0.9", DEVICE_BOUND, 0.9),
    ):
        figures: dict[str, list[tuple[float, ...]]] = {}
        for seed in range(seeds):
            jobs = mix(models, seed, load=load)
            base = None
            for c in contenders(who):
                batch = [j.with_depths(c.depths) for j in jobs]
                outcome = simulate(batch, Cluster(devices=32), c.policy, level="task", costs=Costs(seed=seed))
                r = report(outcome)
                base = base or r
                limit = bounds(batch, 32).makespan
                figures.setdefault(c.name, []).append(
                    (
                        r.makespan / base.makespan,
                        r.throughput / base.throughput,
                        r.all.mean / base.all.mean,
                        r.all.p99 / base.all.p99,
                        r.busy,
                        limit / r.makespan,
                    )
                )
        for name, rows in figures.items():
            columns = list(zip(*rows, strict=True))
            cell: dict[str, Any] = {"workload": kind, "policy": name, "seeds": seeds}
            for label, values in zip(
                ("makespan", "throughput", "mean", "p99", "busy", "of bound"), columns, strict=True
            ):
                cell[label] = {"mean": float(np.mean(values)), "low": min(values), "high": max(values)}
            cells.append(cell)
    return cells


def agreement(seeds: int) -> list[dict[str, Any]]:
    """The fluid level beside the task level on the same mixes."""
    cells = []
    for name in (
        "jigsaw:ladder",
        "jigsaw:full",
        "jigsaw-srpt:ladder",
        "jigsaw-las:ladder",
        BASE,
        "gang-srsf",
        "tiresias-las",
    ):
        (c,) = contenders(name)
        errors = []
        for seed in range(seeds):
            for load in (0.0, 0.9):
                jobs = [j.with_depths(c.depths) for j in mix(DEVICE_BOUND, seed, load=load)]
                pair = [
                    simulate(jobs, Cluster(devices=32), c.policy, level=level, costs=Costs(seed=seed))
                    for level in ("task", "fluid")
                ]  # type: ignore[arg-type]
                figures = [(o.makespan, _completion(o)) for o in pair]
                errors.append([b / a - 1 for a, b in zip(*figures, strict=True)])
        mean = np.mean(errors, axis=0)
        worst = np.abs(errors).max(axis=0)
        cells.append(
            {
                "policy": name,
                "makespan": float(mean[0]),
                "completion": float(mean[1]),
                "worst makespan": float(worst[0]),
                "worst completion": float(worst[1]),
            }
        )
    return cells  # fmt: skip


def _completion(o: Outcome) -> float:
    return float((o.finish - np.array([j.arrival for j in o.jobs])).mean())


def full_scale(name: str, devices: int, who: str) -> dict[str, Any]:
    """One published trace in a process of its own: seconds of reading and simulating, and its peak memory."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, str(devices), who]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def one(name: str, devices: int, who: str) -> None:
    os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})  # one core
    began, cpu = time.perf_counter(), time.process_time()
    trace = read_trace(DATA / name)
    read = time.perf_counter() - began
    (c,) = contenders(who)
    r = report(simulate([j.with_depths(c.depths) for j in trace.jobs], Cluster(devices=devices), c.policy))
    print(
        json.dumps(
            {
                "trace": name,
                "devices": devices,
                "policy": c.name,
                "jobs": r.jobs,
                "seconds": time.perf_counter() - began,
                "read": read,
                "cpu": time.process_time() - cpu,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "report": r.to_json(),
            }
        )
    )


def capacities(seeds: int) -> list[dict[str, Any]]:
    cells = []
    for c in contenders(f"{BASE},{BASE}:ladder,jigsaw:full,jigsaw:ladder,gang-fifo,gang-srsf"):
        loads = [
            capacity(mix(DEVICE_BOUND, 0), Cluster(devices=32), c.policy, depths=c.depths, seed=s).load
            for s in range(seeds)
        ]
        cells.append({"policy": c.name, "capacity": float(np.mean(loads)), "low": min(loads), "high": max(loads)})
    return cells  # fmt: skip


def curves(path: Path) -> None:
    from dovetail.view.schedule import curves_png

    jobs = mix(DEVICE_BOUND, 0, load=0.9)
    who = contenders(f"{BASE},gang-srsf,tiresias-las,jigsaw:full,jigsaw:ladder,jigsaw-srpt:ladder")
    loads = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4]
    cells = study(jobs, Cluster(devices=32), who, loads=loads, samples=3, count=300, level="fluid", window=(0.2, 0.8))
    curves_png(cells, path, title="device-bound mix, 32 devices, three samples of 300 jobs")


def table(title: str, rows: Sequence[dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> None:
    print(f"\n## {title}\n")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(text(row) for text in columns.values()) + " |")


def _range(cell: dict[str, Any], digits: int = 2) -> str:
    return f"{cell['mean']:.{digits}f} ({cell['low']:.{digits}f}–{cell['high']:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], int(args.one[1]), args.one[2])
        return
    seeds = 3 if args.quick else 8
    checks: list[Check] = []
    cells: dict[str, Any] = {}

    error = closed_forms()
    checks.append(Check("closed forms hold exactly (largest relative error)", error, "≤ 1e-9", error <= 1e-9))
    said, held = invariants()
    checks.append(Check("invariants on random workloads, for every policy (hypothesis)", said, "none broken", held))

    cells["saturated"] = saturated(60 if args.quick else 200)
    least = min(c["share"] for c in cells["saturated"])
    checks.append(Check("saturated homogeneous jobs: share of the bound (least of 18)", least, "≥ 0.97", least >= 0.97))

    who = CONTENDERS if not args.quick else f"{BASE},jigsaw:ladder,{BASE}:ladder,jigsaw:full,gang-srsf"
    cells["mixes"] = mixes(seeds, who)
    main_row = next(c for c in cells["mixes"] if c["policy"] == "jigsaw:ladder")
    gain, makespan = main_row["throughput"]["mean"], main_row["makespan"]["mean"]
    name = "60 device-bound jobs on 32 devices under backlog, SPB ladder, against gang-fifo-backfill"
    checks.append(Check(f"{name}: throughput", gain, "≥ 1.40", gain >= 1.40))
    checks.append(Check(f"{name}: makespan", makespan, "≤ 0.75", makespan <= 0.75))
    alone = {c["policy"]: c for c in reversed(cells["mixes"])}
    for what, policy_name in (("SPB alone", f"{BASE}:ladder"), ("iteration-level alone", "jigsaw:full")):
        a = alone[policy_name]
        text = f"makespan {a['makespan']['mean']:.2f}, throughput {a['throughput']['mean']:.2f}"
        checks.append(Check(f"ablation printed: {what}", text, "printed", True))

    cells["agreement"] = agreement(2 if args.quick else 5)
    off = max(max(abs(c["makespan"]), abs(c["completion"])) for c in cells["agreement"])
    checks.append(
        Check("fluid level against task level (largest mean error over policies)", off, "≤ 0.05", off <= 0.05)
    )

    cells["full scale"] = []
    for what, trace, devices, limit in (("Philly, 82,247 jobs on 2,048 devices", "philly/philly.csv", 2048, 60.0),
                                        ("Muri trace 1 on 128 devices", "muri/trace1.csv", 128, 5.0)):  # fmt: skip
        if not (DATA / trace).exists():
            checks.append(Check(f"{what}: seconds on one core", None, f"< {limit:g}", None))
            continue
        found = full_scale(trace, devices, "jigsaw:ladder")
        cells["full scale"].append(found)
        checks.append(Check(f"{what}: seconds on one core", found["seconds"], f"< {limit:g}", found["seconds"] < limit))
        if limit == 60.0:
            peak = found["peak_bytes"] / 1e9
            checks.append(Check(f"{what}: peak memory, GB", peak, "< 2", peak < 2))
    if not args.quick:
        if (DATA / "muri/trace1.csv").exists():
            for trace, sizes in (("muri/trace1.csv", (64, 128, 256)), ("philly/philly.csv", (448, 2048))):
                for devices in sizes:
                    for who in (BASE, "jigsaw:full", "jigsaw:ladder"):
                        if (trace, devices, who) not in [
                            (c["trace"], c["devices"], c["policy"]) for c in cells["full scale"]
                        ]:
                            cells["full scale"].append(full_scale(trace, devices, who.removesuffix(":full")))
        cells["capacity"] = capacities(3)
    if args.png:
        curves(args.png)

    print("# Iteration-level scheduling, predicted")
    table("Saturated homogeneous jobs, 16 devices", cells["saturated"], {
        "workers": lambda c: str(c["k"]), "backward/forward": lambda c: f"{c['backward']:g}", "off-device share": lambda c: f"{c['off']:g}",
        "reached": lambda c: f"{c['reached']:.3f}", "bound": lambda c: f"{c['bound']:.3f}", "share of the bound": lambda c: f"{c['share']:.3f}"})  # fmt: skip
    table(f"Mixes of 60 jobs on 32 devices, relative to {BASE} with full backpropagation: mean (lowest–highest) of {seeds} seeds", cells["mixes"], {
        "workload": lambda c: c["workload"], "policy": lambda c: c["policy"], "makespan": lambda c: _range(c["makespan"]),
        "throughput until the queue is empty": lambda c: _range(c["throughput"]), "mean completion": lambda c: _range(c["mean"]),
        "p99": lambda c: _range(c["p99"]), "busy": lambda c: f"{c['busy']['mean']:.0%}", "of the bound": lambda c: f"{c['of bound']['mean']:.0%}"})  # fmt: skip
    table("Fluid level against task level: mean error (largest)", cells["agreement"], {
        "policy": lambda c: c["policy"], "makespan": lambda c: f"{c['makespan']:+.1%} ({c['worst makespan']:.1%})",
        "mean completion": lambda c: f"{c['completion']:+.1%} ({c['worst completion']:.1%})"})  # fmt: skip
    table("Published traces in full, one core", cells["full scale"], {
        "trace": lambda c: c["trace"], "devices": lambda c: str(c["devices"]), "load": lambda c: f"{c['report']['load']:.2f}",
        "policy": lambda c: c["policy"], "seconds": lambda c: f"{c['seconds']:.1f}", "peak GB": lambda c: f"{c['peak_bytes'] / 1e9:.2f}",
        "makespan, d": lambda c: f"{c['report']['makespan'] / 86400:.1f}",
        "mean completion, h, all": lambda c: f"{c['report']['groups'][0]['mean'] / 3600:.2f}",
        "by workers": lambda c: ", ".join(f"{g['name']}: {g['mean'] / 3600:.2f}" for g in c["report"]["groups"][1:]),
        "busy": lambda c: f"{c['report']['busy']:.0%}"})  # fmt: skip
    if "capacity" in cells:
        table("Capacity: the largest load with a bounded queue, three seeds", cells["capacity"], {
            "policy": lambda c: c["policy"], "capacity": lambda c: f"{c['capacity']:.2f} ({c['low']:.2f}–{c['high']:.2f})"})  # fmt: skip
    print("\n## Checks\n")
    for check in checks:
        value = f"{check.value:.4g}" if isinstance(check.value, float) else str(check.value)
        print(
            f"{ {True: 'holds', False: 'FAILS', None: 'not made: no data'}[check.holds]:6}  {check.name}: {value} (target {check.target})"
        )
    if args.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        flat = [{"table": k, **row} for k, rows in cells.items() for row in rows]
        data = {"benchmark": "schedule", "command": " ".join(["python", "benchmarks/schedule.py", *sys.argv[1:]]), "machine": machine,
                "cells": flat, "checks": [asdict(c) for c in checks]}  # fmt: skip
        write_text(args.json, json.dumps(data, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()

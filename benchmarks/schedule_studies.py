"""The measurements behind benchmarks/schedule.py. Everything is predicted by the simulator: no job runs."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.job import Job, Phase, ladder
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


def mix(models: Sequence[str], seed: int, *, count: int = 60, devices: int = 32, load: float = 0.0) -> list[Job]:
    """Jobs of 1 to 8 workers and 16 to 160 seconds or so, all at once or with Poisson arrivals at a load."""
    rng = random.Random(seed)
    found, now = [], 0.0
    for i in range(count):
        workers = rng.choices((1, 2, 4, 8), (0.35, 0.1, 0.3, 0.25))[0]
        name = rng.choice(models)
        device, off, persistent, ephemeral = LIKE[name]
        seconds = math.exp(rng.uniform(math.log(16), math.log(160)))
        job = Job(
            name=f"{name} {i}",
            arrival=now,
            phases=(Phase(iterations=int(seconds / (device + off)) + 5, workers=workers),),
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


def mixes(seeds: int, who: str) -> list[dict[str, Any]]:
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
        "jigsaw",
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
    command = [sys.executable, str(Path(__file__).resolve()), name, str(devices), who]
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
    for c in contenders(f"{BASE},{BASE}:ladder,jigsaw,jigsaw:ladder,gang-srsf"):
        loads = [
            capacity(mix(DEVICE_BOUND, 0), Cluster(devices=32), c.policy, depths=c.depths, seed=s).load
            for s in range(seeds)
        ]
        cells.append({"policy": c.name, "capacity": float(np.mean(loads)), "low": min(loads), "high": max(loads)})
    return cells  # fmt: skip


def curves(path: Path) -> None:
    from dovetail.view.schedule import curves_png

    jobs = mix(DEVICE_BOUND, 0, load=0.9)
    who = contenders(f"{BASE},gang-srsf,jigsaw,jigsaw:ladder,jigsaw-srpt:ladder")
    loads = [0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3]
    cells = study(jobs, Cluster(devices=32), who, loads=loads, samples=2, count=240, level="fluid", window=(0.2, 0.8))
    curves_png(cells, path, title="device-bound mix, 32 devices, two samples of 240 jobs")


if __name__ == "__main__":
    one(sys.argv[1], int(sys.argv[2]), sys.argv[3])

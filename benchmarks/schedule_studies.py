"""The measurements behind benchmarks/schedule.py. Everything is predicted by the simulator: no job runs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.job import Job, JobPhase, ladder
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import EXACT, ClusterOutcome, Overheads, capacity, lower_bounds, report, simulate
from dovetail.simulate.cluster.report import saturated_bound
from dovetail.simulate.cluster.run import Level
from dovetail.simulate.cluster.study import Contender, contenders, study
from schedule_runs import on_all_cores

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
            phases=(JobPhase(iterations=int(seconds / (device + off)) + 5, workers=workers),),
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
            one = ClusterSize(devices=k, node=k)
            pair = [
                Job(name=n, phases=(JobPhase(iterations=1, workers=k, depths=ladder(k)),), forward=f, backward=b)
                for n in "ab"
            ]
            got = simulate(pair, one, policy("jigsaw"), level="task", overheads=EXACT).makespan
            worst = max(worst, abs(got / (2 * f + b * (k + 1) / k) - 1))
            job = Job(name="j", phases=(JobPhase(iterations=7, workers=k),), forward=f, backward=b, off_device=0.3)
            got = simulate([job], one, policy("gang-fifo"), level="task", overheads=EXACT).makespan
            worst = max(worst, abs(got / (7 * (f + b + 0.3)) - 1))
    for p, s in ((1.0, 0.4), (1.0, 1.0), (1.0, 1.7), (2.0, 5.0)):
        n = 40
        pair = [Job(name=x, phases=(JobPhase(iterations=n, workers=1),), forward=p, off_device=s) for x in "ab"]
        got = simulate(
            pair, ClusterSize(devices=1), policy("jigsaw", duty_cap=9), level="task", overheads=EXACT
        ).makespan
        # Hidden: the device alternates without a pause. Not hidden: each job runs at its own pace, the second p later.
        expected = 2 * n * p + s if s <= p else n * (p + s) + p
        worst = max(worst, abs(got / expected - 1))
    return worst  # fmt: skip


SATURATED: dict[str, tuple[str, float | None, Overheads]] = {
    # The policy, a duty cap in place of its own, and the overheads.
    "jigsaw": ("jigsaw", None, Overheads(jitter=0.03, switch=0.0)),
    "jigsaw, jitter 4 %, switch 2 ms": ("jigsaw", None, Overheads(jitter=0.04, switch=0.002)),
    "jigsaw, duty cap 2": ("jigsaw", 2.0, Overheads(jitter=0.03, switch=0.0)),
    "jigsaw-las, duty cap 9": ("jigsaw-las", 9.0, Overheads(jitter=0.03, switch=0.0)),
}


def saturated(iterations: int) -> list[dict[str, Any]]:
    """Many equal ladder jobs on 16 devices: the share of the bound that they reach.

    `share` counts while there is a queue, as the bound does; `batch` counts from the first task to the last, so that it
    includes the end, when there are too few jobs left to fill the devices.
    """
    cells = []
    for k in (2, 4, 8):
        for b in (1.0, 2.0):
            for off in (0.0, 0.15, 0.3):
                phase = JobPhase(iterations=iterations, workers=k, depths=ladder(k))
                f = 0.1
                jobs = [
                    Job(name=str(i), phases=(phase,), forward=f, backward=b * f, off_device=off * f * (1 + b))
                    for i in range(8 * 16 // k)
                ]
                limit = saturated_bound(jobs[0])
                for label, (name, cap, overheads) in SATURATED.items():
                    chosen = policy(name, duty_cap=cap)
                    r = report(simulate(jobs, ClusterSize(devices=16), chosen, level="task", overheads=overheads))
                    batch = sum(j.gang_work for j in jobs) / (16 * r.makespan)
                    cells.append(
                        {
                            "policy": label,
                            "k": k,
                            "backward": b,
                            "off": off,
                            "bound": limit,
                            "reached": r.throughput,
                            "share": r.throughput / limit,
                            "batch": batch / limit,
                        }
                    )
    return cells


RATIOS = ("makespan", "throughput", "mean", "p99", "busy", "of bound")
KINDS: dict[str, tuple[Sequence[str], float]] = {
    "device-bound, backlog": (DEVICE_BOUND, 0.0),
    "with network-bound, backlog": (WITH_NETWORK_BOUND, 0.0),
    "device-bound, load 0.9": (DEVICE_BOUND, 0.9),
}


def mixed(item: tuple[str, int, str]) -> dict[str, tuple[float, ...]]:
    """Every policy on one mix, relative to gangs with backfill; the task level."""
    kind, seed, who = item
    models, load = KINDS[kind]
    jobs = mix(models, seed, load=load)
    base, rows = None, dict[str, tuple[float, ...]]()
    two = Contender(replace(policy("jigsaw", duty_cap=2.0), name="jigsaw (duty cap 2)"), "ladder")
    for c in [*contenders(who), two]:
        batch = [j.with_depths(c.depths) for j in jobs]
        r = report(simulate(batch, ClusterSize(devices=32), c.policy, level="task", overheads=Overheads(seed=seed)))
        base = base or r
        rows[c.name] = (
            r.makespan / base.makespan,
            r.throughput / base.throughput,
            r.all.mean / base.all.mean,
            r.all.p99 / base.all.p99,
            r.busy,
            lower_bounds(batch, 32).makespan / r.makespan,
        )
    return rows


def mixes(seeds: int, who: str) -> list[dict[str, Any]]:
    cells = []
    found = on_all_cores(mixed, [(kind, seed, who) for kind in KINDS for seed in range(seeds)])
    for i, kind in enumerate(KINDS):
        mine = found[i * seeds : (i + 1) * seeds]
        for name in mine[0]:
            cell: dict[str, Any] = {"workload": kind, "policy": name, "seeds": seeds}
            columns = zip(*(rows[name] for rows in mine), strict=True)
            for label, values in zip(RATIOS, columns, strict=True):
                cell[label] = {"mean": float(np.mean(values)), "low": min(values), "high": max(values)}
            cells.append(cell)
    return cells


LEVELS = ("jigsaw:ladder", "jigsaw", "jigsaw-srpt:ladder", "jigsaw-las:ladder", BASE, "gang-srsf", "tiresias-las")
BOTH: tuple[Level, Level] = ("task", "fluid")
DRAWS = 8
"""Runs of the same jobs with other jitter, at each level: the mean of one is compared with the mean of the other."""


def compared(item: tuple[str, int, float]) -> dict[str, Any]:
    """One mix at both levels: relative errors of makespan and mean completion."""
    name, seed, load = item
    (c,) = contenders(name)
    jobs = [j.with_depths(c.depths) for j in mix(DEVICE_BOUND, seed, load=load)]
    seeds = [Overheads(seed=seed + 1000 * draw) for draw in range(DRAWS)]
    tasks, fluid = (
        [simulate(jobs, ClusterSize(devices=32), c.policy, level=level, overheads=o) for o in seeds] for level in BOTH
    )
    cell: dict[str, Any] = {"policy": name, "seed": seed, "load": load}
    for label, of in (("makespan", lambda o: o.makespan), ("completion", _completion)):
        real, model = (np.array([of(o) for o in outcomes]) for outcomes in (tasks, fluid))
        cell[label] = float(model.mean() / real.mean() - 1)
        cell[f"{label} of one run"] = float(model[0] / real[0] - 1)
        cell[f"{label} of itself"] = float(np.abs(real / real.mean() - 1).max())
        cell[f"{label} of fluid itself"] = float(np.abs(model / model.mean() - 1).max())
        cell[f"{label} range"] = float(real.max() / real.min() - 1)
    return cell


def agreement(seeds: int) -> list[dict[str, Any]]:
    """The fluid level beside the task level on the same mixes, mix by mix."""
    return on_all_cores(
        compared, [(name, seed, load) for name in LEVELS for load in (0.0, 0.9) for seed in range(seeds)]
    )


def _completion(o: ClusterOutcome) -> float:
    return float((o.finish - np.array([j.arrival for j in o.jobs])).mean())


def carried(item: tuple[str, int]) -> float:
    (c,) = contenders(item[0])
    return capacity(mix(DEVICE_BOUND, 0), ClusterSize(devices=32), c.policy, depths=c.depths, seed=item[1]).load


def capacities(seeds: int) -> list[dict[str, Any]]:
    names = (BASE, "gang-easy-backfill", f"{BASE}:ladder", "jigsaw", "jigsaw:ladder", "gang-srsf")
    found = on_all_cores(carried, [(name, seed) for name in names for seed in range(seeds)])
    cells = []
    for i, name in enumerate(names):
        loads = found[i * seeds : (i + 1) * seeds]
        cells.append(
            {"policy": name, "seeds": seeds, "capacity": float(np.mean(loads)), "low": min(loads), "high": max(loads)}
        )
    return cells


def curves(path: Path) -> None:
    from dovetail.view.schedule import curves_png

    jobs = mix(DEVICE_BOUND, 0, load=0.9)
    who = contenders(f"{BASE},gang-srsf,jigsaw,jigsaw:ladder,jigsaw-srpt:ladder")
    loads = [0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3]
    cells = study(
        jobs, ClusterSize(devices=32), who, loads=loads, samples=2, count=240, level="fluid", window=(0.2, 0.8)
    )
    curves_png(cells, path, title="device-bound mix, 32 devices, two samples of 240 jobs")

"""Studies: several policies on the same workload, at several loads, over several samples; and a policy's capacity.

A workload is a list of jobs from a trace: as it is (`at_load`: with arrivals stretched to another load), or a sample of
it with Poisson arrivals (`sample`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from dovetail.core.errors import Error
from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import SchedulingPolicy, policy

from .report import ClusterReport, Spread, report, spread
from .run import ClusterOutcome, Level, simulate
from .tasks import Overheads

Depths = Literal["full", "ladder", "late"]
LOWEST, HIGHEST = 0.01, 64.0
"""Loads between which capacity is sought."""


@dataclass(frozen=True)
class Contender:
    """A policy with the depths its jobs train with."""

    policy: SchedulingPolicy
    depths: Depths = "full"

    @property
    def name(self) -> str:
        return self.policy.name + (f":{self.depths}" if self.depths != "full" else "")


def contenders(text: str, *, spb: Depths = "full", duty_cap: float | None = None) -> list[Contender]:
    """Contenders from a text such as "jigsaw,gang-fifo-backfill:ladder".

    Without a suffix, jobs train with the depths of `spb` under policies that share devices, and with full depth under
    gangs, which partial depth alone does not help.
    """
    found: list[Contender] = []
    for item in (part.strip() for part in text.split(",")):
        name, _, depths = item.partition(":")
        chosen = policy(name, duty_cap=duty_cap)
        if depths and depths not in get_args(Depths):
            raise Error(f"policy {item!r}: expected one of {', '.join(get_args(Depths))} after the colon")
        which: Any = depths or (spb if chosen.shares else "full")
        if any((c.policy.name, c.depths) == (name, which) for c in found):
            raise Error(f"policy {item!r}: given twice")
        found.append(Contender(chosen, which))
    return found


@dataclass(frozen=True)
class StudyCell:
    """One contender at one load: a report per sample."""

    contender: Contender
    load: float | None
    """The load asked for; None for the trace's own arrivals."""
    reports: tuple[ClusterReport, ...]
    outcome: ClusterOutcome
    """The simulation of the first sample."""

    @property
    def name(self) -> str:
        return self.contender.name + (f" at load {self.load:g}" if self.load else "")

    def figure(self, of: Callable[[ClusterReport], float]) -> Spread:
        return spread([of(r) for r in self.reports])


def study(
    jobs: Sequence[Job],
    cluster: ClusterSize,
    who: Sequence[Contender],
    *,
    loads: Sequence[float] = (),
    samples: int = 1,
    count: int | None = None,
    level: Level = "auto",
    overheads: Overheads = Overheads(),
    window: tuple[float, float] = (0.0, 1.0),
    record: bool = False,
    tell: Callable[[str, float], None] = lambda text, done: None,
) -> list[StudyCell]:
    """One cell per load and contender, all on the same jobs.

    With one sample the trace's own arrivals are used, stretched to each load. With several, `count` jobs are drawn
    from the trace with Poisson arrivals, another seed each time.
    """
    if samples > 1 and not loads:
        raise Error("several samples need a load: they are drawn with Poisson arrivals at that load")
    cells = []
    steps: list[float | None] = list(loads) or [None]
    for i, load in enumerate(steps):
        if load is None:
            workloads = [list(jobs)]
        elif samples == 1:
            workloads = [at_load(jobs, cluster.devices, load)]
        else:
            size = count or min(len(jobs), 2000)
            workloads = [sample(jobs, cluster.devices, load, count=size, seed=s) for s in range(samples)]
        for j, contender in enumerate(who):
            tell(f"{contender.name}" + (f" at load {load:g}" if load else ""), (i + j / len(who)) / len(steps))
            outcomes = []
            for seed, workload in enumerate(workloads):
                batch = [job.with_depths(contender.depths) for job in workload]
                noisy = replace(overheads, seed=overheads.seed + seed)
                outcomes.append(
                    simulate(
                        batch,
                        cluster,
                        contender.policy,
                        level=level,
                        overheads=noisy,
                        window=window,
                        record=record and not seed,
                    )
                )
            cells.append(StudyCell(contender, load, tuple(report(o) for o in outcomes), outcomes[0]))
    return cells


@dataclass(frozen=True)
class Capacity:
    """The largest load that a policy carries with a bounded queue; 1.0: all devices full of gangs at full depth."""

    policy: str
    load: float
    tried: tuple[tuple[float, float], ...]
    """(load, drift) of every simulation of the bisection."""


def capacity(
    jobs: Sequence[Job],
    cluster: ClusterSize,
    policy: SchedulingPolicy,
    *,
    depths: Depths = "full",
    count: int = 600,
    seed: int = 0,
    low: float = 0.4,
    high: float = 2.2,
    steps: int = 7,
    overheads: Overheads = Overheads(),
) -> Capacity:
    """Bisects between a load that is carried with a bounded queue and one that is not, on samples of the jobs.

    `low` and `high` are tried first, and moved by factors of two until they are such loads; then come `steps` halvings.
    """
    tried = []

    def carried(load: float) -> bool:
        batch = [j.with_depths(depths) for j in sample(jobs, cluster.devices, load, count=count, seed=seed)]
        found = report(simulate(batch, cluster, policy, level="fluid", overheads=overheads))
        tried.append((load, found.drift))
        return found.bounded

    if carried(high):
        while high < HIGHEST:
            low, high = high, 2 * high
            if not carried(high):
                break
    else:
        while low > LOWEST and not carried(low):
            low, high = low / 2, low
    for _ in range(steps):
        middle = (low * high) ** 0.5
        if carried(middle):
            low = middle
        else:
            high = middle
    return Capacity(policy.name, (low * high) ** 0.5, tuple(tried))


def offered(jobs: Sequence[Job], devices: int) -> float:
    """The offered load: work of gangs at full depth over devices × span of arrivals; infinite if all arrive at once."""
    span = max(j.arrival for j in jobs) - min(j.arrival for j in jobs)
    return sum(j.gang_work for j in jobs) / (devices * span) if span else float("inf")


def at_load(jobs: Sequence[Job], devices: int, load: float) -> list[Job]:
    """The same jobs in the same order, their arrivals stretched or compressed to a load."""
    now = offered(jobs, devices)
    if now == float("inf"):
        raise Error("all jobs arrive at the same time: no load to change; give a sample with Poisson arrivals instead")
    first = min(j.arrival for j in jobs)
    return [msgspec.structs.replace(j, arrival=(j.arrival - first) * now / load) for j in jobs]


def sample(jobs: Sequence[Job], devices: int, load: float, *, count: int, seed: int) -> list[Job]:
    """`count` jobs drawn from a trace with replacement, with Poisson arrivals at a load."""
    rng = random.Random(seed)
    drawn = [rng.choice(jobs) for _ in range(count)]
    # Mean seconds between arrivals, so that work arrives at load × devices.
    gap = sum(j.gang_work for j in drawn) / (count * load * devices)
    now, found = 0.0, []
    for i, job in enumerate(drawn):
        found.append(msgspec.structs.replace(job, name=f"{job.name} #{i}", arrival=now))
        now += rng.expovariate(1.0) * gap
    return found


def clipped(jobs: Sequence[Job], widest: int) -> list[Job]:
    """The jobs, those wider than `widest` narrowed to it; their iterations stay as many as they were."""

    def narrow(p: JobPhase) -> JobPhase:
        if p.workers <= widest:
            return p
        return JobPhase(iterations=p.iterations, workers=widest, min_workers=min(p.min_workers, widest))

    return [
        j
        if all(p.workers <= widest for p in j.phases)
        else msgspec.structs.replace(j, phases=tuple(narrow(p) for p in j.phases))
        for j in jobs
    ]

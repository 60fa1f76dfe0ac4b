"""Workloads from a trace: another load, another sample, other depths."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from dovetail.core.errors import Error
from dovetail.core.job import Job, Phase


def offered(jobs: Sequence[Job], devices: int) -> float:
    """The load: work of gangs with full backpropagation over devices × span of arrivals; infinite for a batch."""
    span = max(j.arrival for j in jobs) - min(j.arrival for j in jobs)
    return sum(j.gang_work for j in jobs) / (devices * span) if span else float("inf")


def at_load(jobs: Sequence[Job], devices: int, load: float) -> list[Job]:
    """The same jobs in the same order, their arrivals stretched or squeezed to a load."""
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
    """Jobs wider than the cluster, narrowed to it; their iterations stay as many as they were."""

    def narrow(p: Phase) -> Phase:
        if p.workers <= widest:
            return p
        return Phase(iterations=p.iterations, workers=widest, min_workers=min(p.min_workers, widest))

    return [
        j
        if all(p.workers <= widest for p in j.phases)
        else msgspec.structs.replace(j, phases=tuple(narrow(p) for p in j.phases))
        for j in jobs
    ]

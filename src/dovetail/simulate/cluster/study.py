"""A study: several policies on the same workload, at several loads, over several samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dovetail.core.errors import Error
from dovetail.core.job import Job
from dovetail.planning.sharing.pack import Cluster
from dovetail.planning.sharing.policies import Policy, policy

from .report import Report, Spread, report, spread
from .run import Level, Outcome, simulate
from .tasks import Costs
from .workload import at_load, sample

Depths = Literal["full", "ladder", "late"]


@dataclass(frozen=True)
class Contender:
    """A policy with the depths its jobs train with."""

    policy: Policy
    depths: Depths = "full"

    @property
    def name(self) -> str:
        return self.policy.name + (f":{self.depths}" if self.depths != "full" else "")


def contenders(text: str, *, spb: Depths = "full", duty_cap: float | None = None) -> list[Contender]:
    """From "jigsaw,gang-fifo-backfill:ladder": without a suffix, `spb` for policies that share devices and full depth
    for gangs, which partial depth alone does not help."""
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
class Cell:
    """One contender at one load: a report per sample."""

    contender: Contender
    load: float | None
    """As asked for; None for the trace's own arrivals."""
    reports: tuple[Report, ...]
    outcome: Outcome
    """Of the first sample."""

    @property
    def name(self) -> str:
        return self.contender.name + (f" at load {self.load:g}" if self.load else "")

    def figure(self, of: Callable[[Report], float]) -> Spread:
        return spread([of(r) for r in self.reports])


def study(
    jobs: Sequence[Job],
    cluster: Cluster,
    who: Sequence[Contender],
    *,
    loads: Sequence[float] = (),
    samples: int = 1,
    count: int | None = None,
    level: Level = "auto",
    costs: Costs = Costs(),
    window: tuple[float, float] = (0.0, 1.0),
    record: bool = False,
    tell: Callable[[str, float], None] = lambda text, done: None,
) -> list[Cell]:
    """One cell per load and contender; every contender meets the same jobs.

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
                noisy = Costs(costs.jitter, costs.switch, costs.restart, costs.move, costs.seed + seed)
                outcomes.append(
                    simulate(
                        batch,
                        cluster,
                        contender.policy,
                        level=level,
                        costs=noisy,
                        window=window,
                        record=record and not seed,
                    )
                )
            cells.append(Cell(contender, load, tuple(report(o) for o in outcomes), outcomes[0]))
    return cells

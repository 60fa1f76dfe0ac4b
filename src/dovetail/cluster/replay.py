"""A recorded run, played again by the simulator: what it predicts for the same jobs, beside what happened.

The store says what was submitted when, the spans what every task took. From them each job becomes a `core.job.Job`
with its measured means, its measured time off the devices and its measured arrival; `simulate.cluster` plays those at
the task level under the same policy, with `planning`'s own functions for admission and dispatch, which the live
cluster calls too. The difference between the two makespans is what the simulator does not know: how long processes
take to start, and who was delayed by whom in the real machine. With another policy's name it predicts what that policy
would have given.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dovetail.core.errors import Error
from dovetail.core.job import Job, Phase
from dovetail.core.timeline import Comparison
from dovetail.planning.sharing.pack import Cluster
from dovetail.planning.sharing.policies import policy as named
from dovetail.simulate.cluster import Costs, Outcome, simulate

from .coordinator.job_store import Row, Store
from .executor import recorder
from .executor.recorder import Held, Ran
from .home import Home
from .transport.messages import Described


@dataclass(frozen=True)
class Recorded:
    """One job of the run: as the simulator takes it, and what became of it.

    Seconds are counted from the run's first task: how long the first job took to be loaded is nobody's policy, and
    whoever was submitted before is there at 0.
    """

    id: int
    job: Job
    finish: float
    tasks: int
    """Of the recorded ones."""


@dataclass(frozen=True, eq=False)
class Run:
    """What was recorded."""

    policy: str
    cluster: Cluster
    jobs: tuple[Recorded, ...]
    jitter: float
    """Coefficient of variation of a worker's tasks around their mean; the median over jobs."""
    overhead: float
    """Median seconds between tasks; part of the jobs' task times here, since the device is not free meanwhile."""
    busy: float
    """Device-seconds in tasks."""
    emulated: bool

    @property
    def makespan(self) -> float:
        return max(r.finish for r in self.jobs)


@dataclass(frozen=True, eq=False)
class Replay:
    """A run and its prediction."""

    run: Run
    policy: str
    outcome: Outcome
    comparison: Comparison
    """Of makespans; `by_kind` has the device-seconds in tasks."""


def replay(home: Path, *, policy: str = "", since: float = 0.0) -> Replay:
    """Reads what a cluster's home holds and plays it under `policy`, by default the one that it ran.

    Jobs that were submitted before `since` (time.time()) are left out. An Error if there is nothing to play.
    """
    return play(read(home, since=since), policy=policy)


def play(run: Run, *, policy: str = "") -> Replay:
    """The simulator's word on a recorded run."""
    name = policy or run.policy
    costs = Costs(jitter=run.jitter, switch=0.0, restart=0.0, move=0.0)
    outcome = simulate([r.job for r in run.jobs], run.cluster, named(name), level="task", costs=costs)
    predicted, measured = outcome.makespan, run.makespan
    comparison = Comparison(
        predicted=predicted,
        measured=measured,
        error=predicted / measured - 1 if measured else 0.0,
        by_kind={"task": (outcome.busy, run.busy)},
    )
    return Replay(run, name, outcome, comparison)


def read(home: Path, *, since: float = 0.0) -> Run:
    """The jobs of a home that have run and ended, with what their tasks took."""
    where = Home(Path(home))
    if not where.database.exists():
        raise Error(f"{home}: expected a cluster's home, with cluster.db in it")
    settings = where.settings()
    store = Store(where.database)
    try:
        rows = [r for r in store.jobs(("finished", "failed", "cancelled"), limit=1_000_000) if r.submitted >= since]
    finally:
        store.close()
    tasks: dict[str, list[Ran]] = defaultdict(list)
    for ran in recorder.ran(home):
        tasks[ran.job].append(ran)
    held = _held(home)
    rows = [r for r in reversed(rows) if r.ended is not None and (held[str(r.id)] if r.gang else tasks[str(r.id)])]
    if not rows:
        raise Error(f"{home}: expected jobs that have ended and recorded tasks, found none")
    first = min(x.start for r in rows for x in (held[str(r.id)] if r.gang else tasks[str(r.id)]))
    jobs, spreads, overheads = [], [], []
    for row in rows:
        mine = tasks[str(row.id)]
        waits = [t.overhead for t in mine if t.overhead >= 0]
        overheads += waits
        overhead = _mean(waits)
        if row.gang:
            job = _gang(row, held[str(row.id)], first, settings.device_bytes)
        else:
            job = _job(row, mine, first, overhead=overhead, devices=settings.devices)
            spreads.append(_spread(mine))
        assert row.ended is not None
        jobs.append(Recorded(id=row.id, job=job, finish=row.ended - first, tasks=len(mine)))
    busy = sum(t.stop - t.start for r in jobs for t in tasks[str(r.id)])
    emulated = settings.emulated
    return Run(
        policy=settings.policy,
        cluster=Cluster(devices=settings.devices, node=settings.devices, device_bytes=settings.device_bytes),
        jobs=tuple(jobs),
        jitter=float(np.median(spreads)) if spreads else 0.0,
        overhead=float(np.median(overheads)) if overheads else 0.0,
        busy=busy,
        emulated=emulated,
    )


def _job(row: Row, tasks: Sequence[Ran], origin: float, *, overhead: float, devices: int) -> Job:
    """The mean of every worker's tasks, exactly: shares of the longest stand in the place of depths.

    Where there are more workers than devices, one stands for several that run one after the other.
    """
    by_worker: dict[int, list[float]] = defaultdict(list)
    for t in tasks:
        by_worker[t.worker].append(t.stop - t.start + overhead)
    means = folded([_exact(float(np.mean(by_worker[w]))) for w in sorted(by_worker)], devices)
    longest = max(*means, 1e-9)
    described = msgspec.json.decode(row.described, type=Described) if row.described else None
    return Job(
        name=f"{row.id} {row.name}",
        arrival=_exact(max(0.0, row.submitted - origin)),
        phases=(
            Phase(
                iterations=len({t.iteration for t in tasks}),  # again after a restart counts once, as in the curve
                workers=len(means),
                depths=tuple(min(1.0, m / longest) for m in means),
            ),
        ),
        backward=longest,
        off_device=_off_device(tasks, described),
        persistent_bytes=described.persistent_bytes if described else 0,
        ephemeral_bytes=described.ephemeral_bytes if described else 0,
        background=row.share == "background",
    )


def folded(seconds: list[float], most: int) -> list[float]:
    """At most so many, of the same sum: the longest first, each to whom has the least so far."""
    if len(seconds) <= most:
        return seconds
    found = [0.0] * most
    for one in sorted(seconds, reverse=True):
        heapq.heapreplace(found, _exact(found[0] + one))
    return found


def _gang(row: Row, leases: Sequence[Held], origin: float, device_bytes: int) -> Job:
    """One long iteration that leaves no memory for others."""
    seconds = max(h.stop for h in leases) - min(h.start for h in leases)
    return Job(
        name=f"{row.id} {row.name}",
        arrival=_exact(max(0.0, row.submitted - origin)),
        phases=(Phase(iterations=1, workers=row.gang),),
        forward=max(seconds, 1e-6),
        persistent_bytes=device_bytes,
        background=row.share == "background",
    )


def _off_device(tasks: Sequence[Ran], described: Described | None) -> float:
    """Mean seconds from an iteration's last end to the next one's release; what the job said if none was recorded."""
    released: dict[int, float] = {}
    last: dict[int, float] = {}
    for t in tasks:
        last[t.iteration] = max(t.stop, last.get(t.iteration, t.stop))
        if t.waited >= 0:
            at = t.start - t.waited
            released[t.iteration] = min(at, released.get(t.iteration, at))
    gaps = [released[i] - last[i - 1] for i in released if i - 1 in last and released[i] >= last[i - 1]]
    if not gaps:
        return described.off_device if described else 0.0
    return _exact(_mean(gaps))


def _spread(tasks: Sequence[Ran]) -> float:
    by_worker: dict[int, list[float]] = defaultdict(list)
    for t in tasks:
        by_worker[t.worker].append(t.stop - t.start)
    shares = [float(np.std(v) / np.mean(v)) for v in by_worker.values() if len(v) > 2 and np.mean(v) > 0]
    return round(float(np.median(shares)), 4) if shares else 0.0


def _mean(values: Sequence[float]) -> float:
    """Without what is far out: a process that was started again in between is not the job's."""
    if not values:
        return 0.0
    limit = 10 * float(np.median(values)) + 1e-3
    return float(np.mean([v for v in values if v <= limit]))


def _exact(seconds: float) -> float:
    """To the microsecond, which is what clocks tell: jobs that are the same look the same."""
    return round(seconds, 6)


def _held(home: Path) -> dict[str, list[Held]]:
    """Leases by job, in seconds of the calendar's clock."""
    found: dict[str, list[Held]] = defaultdict(list)
    offset = 0.0
    for line in recorder.lines(home):
        if isinstance(line, recorder.Clock):
            offset = line.offset
        elif isinstance(line, Held):
            found[line.job].append(msgspec.structs.replace(line, start=line.start + offset, stop=line.stop + offset))
    return found

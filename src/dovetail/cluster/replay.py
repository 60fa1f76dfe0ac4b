"""Replays a recorded run in the simulator and compares its prediction with what happened.

The job store says what was submitted when, the recorded spans what every task took. From them each job becomes a
`core.job.Job` with its measured mean task times, time off the devices and arrival. `simulate.cluster` simulates these
at the task level under the same policy, with the functions of `planning` for admission and dispatch that the live
cluster calls too. The difference between the two makespans is what the simulator does not model: how long processes
take to start, and how jobs delay each other on the real machine. With another policy's name it predicts what that
policy would have given.
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
from dovetail.core.job import Job, JobPhase
from dovetail.core.timeline import Comparison
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy as named
from dovetail.simulate.cluster import ClusterOutcome, Overheads, simulate

from .coordinator.job_store import Store, StoredJob
from .executor import recorder
from .executor.recorder import LeaseLine, TaskLine
from .home import Home
from .transport.messages import Described


@dataclass(frozen=True)
class RecordedJob:
    """One job of the run: as the simulator takes it, and when it finished.

    Seconds are counted from the run's first task, since no policy can change how long the first job took to load; jobs
    that were submitted earlier arrive at 0.
    """

    id: int
    job: Job
    finish: float
    tasks: int
    """Number of recorded tasks."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A recorded run."""

    policy: str
    cluster: ClusterSize
    jobs: tuple[RecordedJob, ...]
    jitter: float
    """Coefficient of variation of a worker's tasks around their mean; the median over jobs."""
    overhead: float
    """Median seconds between tasks; counted in the jobs' task times here, since the device is not free meanwhile."""
    busy: float
    """Device-seconds in tasks."""
    emulated: bool

    @property
    def makespan(self) -> float:
        return max(r.finish for r in self.jobs)


@dataclass(frozen=True, eq=False)
class Replay:
    """A recorded run and its prediction."""

    run: RecordedRun
    policy: str
    outcome: ClusterOutcome
    comparison: Comparison
    """Compares makespans; `by_kind` has the device-seconds in tasks."""


def replay(home: Path, *, policy: str = "", since: float = 0.0) -> Replay:
    """Reads the run in a cluster's home and simulates it under `policy`, by default the one that it ran under.

    Jobs that were submitted before `since` (time.time()) are left out. An Error if there is nothing to replay.
    """
    return play(read(home, since=since), policy=policy)


def play(run: RecordedRun, *, policy: str = "") -> Replay:
    """The simulator's prediction for a recorded run."""
    name = policy or run.policy
    overheads = Overheads(jitter=run.jitter, switch=0.0, restart=0.0, move=0.0)
    outcome = simulate([r.job for r in run.jobs], run.cluster, named(name), level="task", overheads=overheads)
    predicted, measured = outcome.makespan, run.makespan
    comparison = Comparison(
        predicted=predicted,
        measured=measured,
        error=predicted / measured - 1 if measured else 0.0,
        by_kind={"task": (outcome.busy, run.busy)},
    )
    return Replay(run, name, outcome, comparison)


def read(home: Path, *, since: float = 0.0) -> RecordedRun:
    """The jobs of a home that have run and ended, with the times of their tasks."""
    where = Home(Path(home))
    if not where.database.exists():
        raise Error(f"{home}: expected a cluster's home, with cluster.db in it")
    settings = where.settings()
    store = Store(where.database)
    try:
        rows = [r for r in store.jobs(("finished", "failed", "cancelled"), limit=1_000_000) if r.submitted >= since]
    finally:
        store.close()
    tasks: dict[str, list[TaskLine]] = defaultdict(list)
    for ran in recorder.recorded_tasks(home):
        tasks[ran.job].append(ran)
    leases = _leases(home)
    rows = [r for r in reversed(rows) if r.ended is not None and (leases[str(r.id)] if r.gang else tasks[str(r.id)])]
    if not rows:
        raise Error(f"{home}: expected jobs that have ended and recorded tasks, found none")
    first = min(x.start for r in rows for x in (leases[str(r.id)] if r.gang else tasks[str(r.id)]))
    jobs, spreads, overheads = [], [], []
    for row in rows:
        mine = tasks[str(row.id)]
        waits = [t.overhead for t in mine if t.overhead >= 0]
        overheads += waits
        overhead = _mean(waits)
        if row.gang:
            job = _gang(row, leases[str(row.id)], first, settings.device_bytes)
        else:
            job = _job(row, mine, first, overhead=overhead, devices=settings.devices)
            spreads.append(_spread(mine))
        assert row.ended is not None
        jobs.append(RecordedJob(id=row.id, job=job, finish=row.ended - first, tasks=len(mine)))
    busy = sum(t.stop - t.start for r in jobs for t in tasks[str(r.id)])
    emulated = settings.imitated
    return RecordedRun(
        policy=settings.policy,
        cluster=ClusterSize(devices=settings.devices, node=settings.devices, device_bytes=settings.device_bytes),
        jobs=tuple(jobs),
        jitter=float(np.median(spreads)) if spreads else 0.0,
        overhead=float(np.median(overheads)) if overheads else 0.0,
        busy=busy,
        emulated=emulated,
    )


def _job(row: StoredJob, tasks: Sequence[TaskLine], origin: float, *, overhead: float, devices: int) -> Job:
    """A job with the mean time of every worker's tasks, given as depths: shares of the longest.

    If there are more workers than devices, some workers are merged, as if their tasks ran one after the other.
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
            JobPhase(
                iterations=len({t.iteration for t in tasks}),  # one that was repeated after a restart counts once
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
    """At most `most` times with the same sum: the longest first, each added to the smallest so far."""
    if len(seconds) <= most:
        return seconds
    found = [0.0] * most
    for one in sorted(seconds, reverse=True):
        heapq.heapreplace(found, _exact(found[0] + one))
    return found


def _gang(row: StoredJob, leases: Sequence[LeaseLine], origin: float, device_bytes: int) -> Job:
    """A gang as one long iteration that leaves no memory for others."""
    seconds = max(h.stop for h in leases) - min(h.start for h in leases)
    return Job(
        name=f"{row.id} {row.name}",
        arrival=_exact(max(0.0, row.submitted - origin)),
        phases=(JobPhase(iterations=1, workers=row.gang),),
        forward=max(seconds, 1e-6),
        persistent_bytes=device_bytes,
        background=row.share == "background",
    )


def _off_device(tasks: Sequence[TaskLine], described: Described | None) -> float:
    """Mean seconds from an iteration's last task to the next release; what the job declared if none was recorded."""
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


def _spread(tasks: Sequence[TaskLine]) -> float:
    by_worker: dict[int, list[float]] = defaultdict(list)
    for t in tasks:
        by_worker[t.worker].append(t.stop - t.start)
    shares = [float(np.std(v) / np.mean(v)) for v in by_worker.values() if len(v) > 2 and np.mean(v) > 0]
    return round(float(np.median(shares)), 4) if shares else 0.0


def _mean(values: Sequence[float]) -> float:
    """The mean without outliers, such as the time in which a process was restarted."""
    if not values:
        return 0.0
    limit = 10 * float(np.median(values)) + 1e-3
    return float(np.mean([v for v in values if v <= limit]))


def _exact(seconds: float) -> float:
    """Rounded to microseconds, so that equal jobs look equal."""
    return round(seconds, 6)


def _leases(home: Path) -> dict[str, list[LeaseLine]]:
    """Leases by job. Times are of time.time()."""
    found: dict[str, list[LeaseLine]] = defaultdict(list)
    offset = 0.0
    for line in recorder.lines(home):
        if isinstance(line, recorder.ClockLine):
            offset = line.offset
        elif isinstance(line, LeaseLine):
            found[line.job].append(msgspec.structs.replace(line, start=line.start + offset, stop=line.stop + offset))
    return found

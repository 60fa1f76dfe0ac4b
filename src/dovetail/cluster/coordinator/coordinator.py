"""The coordinator: admits jobs, places them, watches their processes and starts those again that died.

It runs no user code, and no task waits for it. A job is stored, waits, is prepared (its aggregator loads it and
describes it), gets a lease of devices, runs, ends. Whatever must survive is in the store before it is acted upon; which
executor should serve which job is computed from there, and executors are sent the difference to what they have
(`ExecutorState.sync`). So a coordinator that was killed continues where it was: it reads the store, asks the engine
which processes run, and learns from the executors which jobs they still serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine
from typing import Any

from dovetail.cluster.engines.base import ClusterDevice, Engine, Exit
from dovetail.cluster.engines.process import note
from dovetail.cluster.home import Home, Settings, sweep_arenas
from dovetail.cluster.job.submission import Submission
from dovetail.cluster.transport.messages import Shutdown, StopJob
from dovetail.cluster.transport.wire import Connection, Lost
from dovetail.core.errors import Error
from dovetail.planning.sharing.policies import policy as named_policy

from . import executor_state, job_files, strikes
from .executor_state import ExecutorState
from .job_state import ActiveJob, from_stored, shape_now
from .job_store import ENDED, State, Store, StoredJob
from .peers import Peer
from .placement import Placement, queue_key

PREPARE_LIMIT = 300.0
"""Seconds for an aggregator to load its job."""
FLUSH_LIMIT = 5.0
"""Seconds for executors to write their last spans when the cluster goes down."""
STOP_LIMIT = 60.0
"""Seconds for an aggregator to end its iteration and write a checkpoint."""


class Coordinator:
    """All state of the cluster; used by one event loop only."""

    def __init__(self, home: Home, settings: Settings, store: Store, engine: Engine, control: tuple[str, int]) -> None:
        self.home, self.settings, self.store, self.engine, self.control = home, settings, store, engine, control
        self.policy = named_policy(settings.policy)
        self.most = settings.devices
        """Devices of the cluster."""
        self.jobs: dict[int, ActiveJob] = {r.id: from_stored(r, most=self.most) for r in store.active()}
        self.peers: dict[int, Peer] = {}
        """Connections of aggregators, by job."""
        self.executors: dict[int, ExecutorState] = {}
        self.placement: Placement | None = None
        self.kill_at: dict[str, float] = {}
        """By process: time.monotonic() at which it is killed if it still runs."""
        self.dirty: set[int] = set()
        """Jobs with progress that is not in the store yet."""
        self.closing = False
        self.began = time.time()
        self._chains: dict[str, asyncio.Task[None]] = {}  # by process: the last of the engine's calls
        self.changed = asyncio.Event()

    # -- beginning --

    async def open(self) -> None:
        """Takes over the processes that run, and starts those that are missing."""
        alive = await self.engine.open()
        devices = await self.engine.devices()
        self.control = (getattr(self.engine, "host", self.control[0]), self.control[1])
        now = time.monotonic()
        self.most = len(devices)
        self.placement = Placement(devices, self.policy)
        wanted = {e.key for e in self._adopt_executors(devices, alive, now)} | self._adopt_jobs(alive, now)
        for key in alive:
            if key not in wanted:
                self.kill(key)
        self.sweep()
        self.decide_soon()

    def _adopt_executors(self, devices: list[ClusterDevice], alive: dict[str, int], now: float) -> list[ExecutorState]:
        for device in devices:
            e = self.executors[device.index] = ExecutorState(device, lost_at=now, started=now)
            e.process = e.key in alive
            e.deadline = now + executor_state.HELLO_LIMIT
            if not e.process:
                self.start_executor(e, now)
        return list(self.executors.values())

    def _adopt_jobs(self, alive: dict[str, int], now: float) -> set[str]:
        assert self.placement is not None
        leases = {lease.job: lease.devices for lease in self.store.leases(open_only=True)}
        keys = set()
        for job in sorted(self.jobs.values(), key=lambda j: queue_key(self.policy, j)):
            job.standing.shape = shape_now(job.described, None, job.gang, most=self.most)
            if job.key in alive and not job.is_gang:
                job.process, job.deadline = True, now + PREPARE_LIMIT
                keys.add(job.key)
                if job.state not in ("preparing", "running"):
                    job.stopping, job.deadline = True, now + STOP_LIMIT
            if job.state == "running":
                devices = leases.get(job.id, ())
                if devices and set(devices) <= set(self.executors) and self.placement.lease(job, devices):
                    job.devices, job.ranks_started = devices, job.is_gang
                else:
                    self.move(job, "queued" if job.is_gang else "preparing")
        return keys

    def grow(self, devices: list[ClusterDevice]) -> None:
        """Adds the devices of machines that have joined."""
        new = [d for d in devices if d.index not in self.executors]
        if not new or self.placement is None:
            return
        self.placement = Placement([*self.placement.devices.values(), *new], self.policy)
        self.most = len(self.placement.devices)
        for job in self.jobs.values():
            if job.devices:
                fits = self.placement.lease(job, job.devices)
                assert fits, "it had room"
            elif job.described is not None:
                job.standing.shape = shape_now(job.described, job.progress, job.gang, most=self.most)
        self._adopt_executors(new, {}, time.monotonic())
        self.decide_soon()

    def start_executor(self, e: ExecutorState, now: float) -> None:
        e.process, e.started, e.deadline = True, now, now + executor_state.HELLO_LIMIT
        executor_state.forget_running(self.home, e.index)
        d = e.device
        settings: dict[str, Any] = {"device": d.index, "node": d.node, "kind": d.kind, "core": d.core}
        if d.accelerator:
            settings |= {"accelerator": d.accelerator, "memory": d.bytes}
        settings |= self._common() | {"guard": self.policy.rules.guard}
        self._do(e.key, self.engine.start(e.key, "executor", settings, node=d.node), starts=True)

    def _common(self) -> dict[str, Any]:
        return {"home": str(self.home.path), "coordinator": self.control, "key_file": str(self.home.key_file)}

    def kill(self, key: str) -> None:
        self._do(key, self.engine.kill(key))

    def _do(self, key: str, call: Coroutine[Any, Any, None], *, starts: bool = False) -> None:
        """Runs an engine's call after the one before it for the same process. A start that fails counts as its end."""
        before = self._chains.get(key)

        async def chained() -> None:
            if before is not None:
                await asyncio.wait([before])
            try:
                await call
            except Exception as e:
                note(f"{key}: {e!r}")
                if starts:
                    self.exited(Exit(key=key, code=1))
            if self._chains.get(key) is asyncio.current_task():
                del self._chains[key]

        self._chains[key] = asyncio.create_task(chained())

    # -- requests of users: on disk when these return --

    def submit(self, submission: Submission) -> StoredJob:
        row = self.store.submit(submission)
        if row.id not in self.jobs and row.state not in ENDED:
            self.jobs[row.id] = from_stored(row, most=self.most)
            self.decide_soon()
        return row

    def cancel(self, number: int) -> None:
        self.end(self._asked(number), "cancelled", "")

    def pause(self, number: int) -> None:
        """A running job ends its iteration and writes a checkpoint first; a gang's ranks are killed."""
        job = self._asked(number)
        if job.state == "paused":
            raise Error(f"job {number}: is paused already")
        if job.process and job.devices and job.id in self.peers:
            job.stopping, job.deadline = True, time.monotonic() + STOP_LIMIT
            self.peers[job.id].send(StopJob())
            self.move(job, "paused")
        else:
            self.move(job, "paused")
            self.end_aggregator(job, 0.0)
        self.decide_soon()

    def resume(self, number: int) -> None:
        job = self._asked(number)
        if job.state != "paused":
            raise Error(f"job {number}: is {job.state}, only a paused job can be resumed")
        self.move(job, "queued")
        self.decide_soon()

    def _asked(self, number: int) -> ActiveJob:
        if number not in self.jobs:
            row = self.store.job(number)
            raise Error(f"job {number}: has {'been cancelled' if row.state == 'cancelled' else row.state} already")
        return self.jobs[number]

    async def down(self, grace: float) -> None:
        """Lets running jobs write checkpoints within `grace` seconds, then ends every process; the store stays."""
        self.closing = True
        for job in self.jobs.values():
            if job.id in self.peers:
                self.peers[job.id].send(StopJob(discard=not job.devices))
        limit = time.monotonic() + grace
        while time.monotonic() < limit and any(j.process and j.devices for j in self.jobs.values()):
            await asyncio.sleep(0.02)
        peers = [e.peer for e in self.executors.values() if e.peer is not None]
        for peer in peers:
            peer.send(Shutdown())
        limit = time.monotonic() + min(grace, FLUSH_LIMIT)
        while time.monotonic() < limit and any(e.peer in peers for e in self.executors.values()):
            await asyncio.sleep(0.02)
        self.save()
        self.store.end_leases()
        await self.engine.close(stop=True)
        with contextlib.suppress(OSError, Lost):  # with Ray the supervisor has this process only, and is ended here
            supervisor = Connection(self.home.connect())
            supervisor.send(Shutdown())
            supervisor.close()

    # -- states of a job --

    def move(self, job: ActiveJob, state: State, **fields: Any) -> None:
        """Stores the job's next state, and ends its lease unless the job runs or is still stopping."""
        self.store.move(job.id, state, **fields)
        job.state = state
        if state != "running" and not job.stopping:
            self.release(job)

    def release(self, job: ActiveJob) -> None:
        """Ends the job's lease."""
        if self.placement is not None:
            self.placement.release(job)
        job.devices, job.ranks_started, job.exit_codes = (), False, {}

    def prepare(self, job: ActiveJob) -> None:
        """Starts the job's aggregator; a job that has devices keeps them meanwhile."""
        job.attempt += 1
        if job.state == "queued":
            self.move(job, "preparing", attempt=job.attempt)
        else:
            self.store.note({job.id: {"attempt": job.attempt}})
        job_files.write(self.home, job.id, self.store.submission(job.id))
        job.process, job.connected, job.retry_at = True, False, 0.0
        job.deadline = time.monotonic() + PREPARE_LIMIT
        settings = {"job": str(job.id), "attempt": job.attempt} | self._common()
        self._do(job.key, self.engine.start(job.key, "aggregator", settings), starts=True)

    def end(self, job: ActiveJob, state: State, reason: str) -> None:
        """Stores the job's last state and forgets the job; an aggregator that has finished may end by itself."""
        at: dict[str, Any] = {"iteration": job.iteration, "loss": finite(job.loss), "checkpoint": job.checkpoint}
        at["slowdown"] = finite(executor_state.slowdown(job, self.executors))
        self.store.move(job.id, state, reason=reason, **at)
        if reason:
            job_files.log(self.home, job.id, f"{state}: {reason}")
        job.state = state
        self.release(job)
        del self.jobs[job.id]
        self.dirty.discard(job.id)
        self.end_aggregator(job, 5.0 if state == "finished" else 0.0)
        self.decide_soon()

    def end_aggregator(self, job: ActiveJob, seconds: float) -> None:
        """Kills the job's aggregator if it has not ended by itself within `seconds`."""
        if job.process and not seconds:
            self.kill(job.key)
        elif job.process:
            self.kill_at[job.key] = time.monotonic() + seconds

    def strike(self, job: ActiveJob, reason: str, weight: float = 1.0) -> None:
        """Gives the job a strike; the third ends it. Otherwise it waits a little before the next try."""
        job.record = strikes.with_strike(job.record, strikes.Strike(job.iteration, reason[:500], weight))
        job_files.log(self.home, job.id, reason)
        note(f"job {job.id}: strike {len(job.record.strikes)}: {reason}")
        line = strikes.verdict(job.record)
        if line:
            self.end(job, "failed", line)
            return
        job.retry_at = time.monotonic() + strikes.pause(job.record)
        self.store.note({job.id: {"strikes": strikes.encode(job.record)}})

    def restart_gang(self, job: ActiveJob) -> None:
        """Starts all ranks again: one cannot go on without the others."""
        if job.id in self.jobs and job.devices:
            job.attempt += 1
            job.exit_codes, job.ranks_started = {}, False
            self.store.note({job.id: {"attempt": job.attempt}})
            self.decide_soon()

    # -- ends of processes --

    def exited(self, end: Exit) -> None:
        """Handles the end of a process: strikes for the job that caused it, a new start for executors and gangs."""
        now, role, _, rest = time.monotonic(), *end.key.partition(" ")
        self.kill_at.pop(end.key, None)
        if role == "executor" and int(rest) in self.executors:
            e = self.executors[int(rest)]
            job = self.jobs.get(executor_state.running_job(self.home, e.index))
            if job is not None and end.code and not e.strike_counted and not end.node_lost and not self.closing:
                self.strike(job, *strikes.death(f"executor {e.index}", end.code))
            e.ended(now)
            for gang in list(self.jobs.values()):
                if gang.is_gang and gang.ranks_started and e.index in gang.devices:
                    self.restart_gang(gang)
        elif role == "aggregator":
            number, attempt = map(int, rest.split("."))
            self._aggregator_ended(number, attempt, end)
        self.decide_soon()

    def _aggregator_ended(self, number: int, attempt: int, end: Exit) -> None:
        self.sweep()
        job = self.jobs.get(number)
        if job is None or job.attempt != attempt:
            return
        job.process = job.connected = False
        if job.stopping:
            job.stopping = False
            self.release(job)
        elif (
            job.state in ("preparing", "running")
            and not self.closing
            and not end.node_lost
            and job.strike_counted_for != attempt
        ):
            self.strike(job, *strikes.death("its aggregator", end.code))

    def sweep(self) -> None:
        """Removes the shared memory of aggregators that do not run any more."""
        sweep_arenas(self.home.path, alive=[(str(j.id), j.attempt) for j in self.jobs.values() if j.process])

    def decide_soon(self) -> None:
        """Wakes `decide`: something has changed."""
        self.changed.set()

    def ready(self) -> set[int]:
        return {e.index for e in self.executors.values() if e.ready}

    def save(self) -> None:
        """Stores the progress since the last call, in one transaction."""
        changes: dict[int, dict[str, Any]] = {}
        for number in self.dirty & set(self.jobs):
            job = self.jobs[number]
            changes[number] = {"iteration": job.iteration, "loss": finite(job.loss), "checkpoint": job.checkpoint,
                               "strikes": strikes.encode(job.record)}  # fmt: skip
        self.dirty.clear()
        self.store.note(changes)


def finite(loss: float | None) -> float | None:
    """The number, or None in place of NaN and infinities, which JSON does not have."""
    return loss if loss is not None and math.isfinite(loss) else None

"""The coordinator: admits, places, watches, restarts. It runs no user code, and no task waits for it.

A job is stored, waits, is prepared (its aggregator loads it and describes it), gets devices, runs, ends. Everything
that must survive is in the store before it is acted upon; who should serve which job is computed from there, and
executors are told the difference to what they have (`fleet.Executor.sync`). So a coordinator that was killed takes up
where it was: it reads the store, asks the engine what runs, and hears from executors what they still serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine
from typing import Any

from dovetail.cluster.engines.base import Device, Engine, Exit
from dovetail.cluster.home import Home, Settings, sweep_arenas
from dovetail.cluster.job.submission import Submission
from dovetail.cluster.transport.messages import Shutdown, Stop
from dovetail.cluster.transport.wire import Connection, Lost
from dovetail.core.errors import Error
from dovetail.planning.sharing.policies import policy as named_policy

from . import fleet, folders, strikes
from .fleet import Executor
from .job_state import Live, from_row, shape_now
from .job_store import ENDED, Row, State, Store
from .peers import Link, note
from .placement import Floor, place

PREPARE_LIMIT = 300.0
"""Seconds for an aggregator to load its job."""
LAST_WORDS = 1.0
"""Seconds for executors to write down their last tasks when the cluster goes down."""
LEAVE_LIMIT = 60.0
"""Seconds for an aggregator to end its iteration and write a checkpoint."""


class Coordinator:
    """All state of the cluster; used by one event loop only."""

    def __init__(self, home: Home, settings: Settings, store: Store, engine: Engine, control: tuple[str, int]) -> None:
        self.home, self.settings, self.store, self.engine, self.control = home, settings, store, engine, control
        self.policy = named_policy(settings.policy)
        self.most = settings.devices
        self.jobs: dict[int, Live] = {r.id: from_row(r, most=self.most) for r in store.active()}
        self.links: dict[int, Link] = {}  # of aggregators
        self.executors: dict[int, Executor] = {}
        self.floor: Floor | None = None
        self.doomed: dict[str, float] = {}  # processes that must have ended by then
        self.dirty: set[int] = set()
        self.closing = False
        self.began = time.time()
        self._chains: dict[str, asyncio.Task[None]] = {}
        self.kicked = asyncio.Event()

    # -- beginning --

    async def open(self) -> None:
        """Takes over what runs, and starts what should."""
        alive = await self.engine.open()
        devices = await self.engine.devices()
        self.control = (getattr(self.engine, "host", self.control[0]), self.control[1])
        now = time.monotonic()
        self.most = len(devices)
        self.floor = Floor(devices, self.policy)
        wanted = {e.key for e in self._adopt_executors(devices, alive, now)} | self._adopt_jobs(alive, now)
        for key in alive:
            if key not in wanted:
                self.kill(key)
        self.sweep()
        self.kick()

    def _adopt_executors(self, devices: list[Device], alive: dict[str, int], now: float) -> list[Executor]:
        for device in devices:
            e = self.executors[device.index] = Executor(device, away=now, started=now)
            e.process = e.key in alive
            e.deadline = now + fleet.HELLO_LIMIT
            if not e.process:
                self.start_executor(e, now)
        return list(self.executors.values())

    def _adopt_jobs(self, alive: dict[str, int], now: float) -> set[str]:
        assert self.floor is not None
        leases = {lease.job: lease.devices for lease in self.store.leases(open_only=True)}
        keys = set()
        for job in sorted(self.jobs.values(), key=lambda j: place(self.policy, j)):
            job.standing.shape = shape_now(job.described, None, job.gang, most=self.most)
            if job.key in alive and not job.is_gang:
                job.process, job.deadline = True, now + PREPARE_LIMIT
                keys.add(job.key)
                if job.state not in ("preparing", "running"):
                    job.leaving, job.deadline = "paused" if job.state == "paused" else "queued", now + LEAVE_LIMIT
            if job.state == "running":
                devices = leases.get(job.id, ())
                if devices and set(devices) <= set(self.executors) and self.floor.book(job, devices):
                    job.devices, job.sent = devices, job.is_gang
                else:
                    self.move(job, "queued" if job.is_gang else "preparing")
        return keys

    def grow(self, devices: list[Device]) -> None:
        """Machines have joined: their devices, besides those there are."""
        new = [d for d in devices if d.index not in self.executors]
        if not new or self.floor is None:
            return
        self.floor = Floor([*self.floor.devices.values(), *new], self.policy)
        self.most = len(self.floor.devices)
        for job in self.jobs.values():
            if job.devices:
                booked = self.floor.book(job, job.devices)
                assert booked, "it had room"
            elif job.described is not None:
                job.standing.shape = shape_now(job.described, job.progress, job.gang, most=self.most)
        self._adopt_executors(new, {}, time.monotonic())
        self.kick()

    def start_executor(self, e: Executor, now: float) -> None:
        e.process, e.started, e.deadline = True, now, now + fleet.HELLO_LIMIT
        fleet.forget_running(self.home, e.index)
        d = e.device
        settings: dict[str, Any] = {"device": d.index, "node": d.node, "kind": d.kind, "core": d.core}
        settings |= self._common() | {"guard": self.policy.rules.guard}
        self._do(e.key, self.engine.start(e.key, "executor", settings, node=d.node), starts=True)

    def _common(self) -> dict[str, Any]:
        return {"home": str(self.home.path), "coordinator": self.control, "key_file": str(self.home.key_file)}

    def kill(self, key: str) -> None:
        self._do(key, self.engine.kill(key))

    def _do(self, key: str, call: Coroutine[Any, Any, None], *, starts: bool = False) -> None:
        """Runs an engine's call after the one before it for the same process. Who cannot be started has ended."""
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

    # -- what people ask for: on disk when these return --

    def submit(self, submission: Submission) -> Row:
        row = self.store.submit(submission)
        if row.id not in self.jobs and row.state not in ENDED:
            self.jobs[row.id] = from_row(row, most=self.most)
            self.kick()
        return row

    def cancel(self, number: int) -> None:
        self.end(self._asked(number), "cancelled", "")

    def pause(self, number: int) -> None:
        """A running job ends its iteration and writes a checkpoint first; a gang's ranks are ended as they are."""
        job = self._asked(number)
        if job.state == "paused":
            raise Error(f"job {number}: is paused already")
        self.leave(job, "paused")

    def resume(self, number: int) -> None:
        job = self._asked(number)
        if job.state != "paused":
            raise Error(f"job {number}: is {job.state}, only a paused job can be resumed")
        self.move(job, "queued")
        if job.leaving:
            job.leaving = "queued"
        self.kick()

    def _asked(self, number: int) -> Live:
        if number not in self.jobs:
            row = self.store.job(number)
            raise Error(f"job {number}: has {'been cancelled' if row.state == 'cancelled' else row.state} already")
        return self.jobs[number]

    async def down(self, grace: float) -> None:
        """Lets running jobs write checkpoints, then ends every process. Jobs go on with the next start."""
        self.closing = True
        for job in self.jobs.values():
            if job.id in self.links:
                self.links[job.id].send(Stop(discard=not job.devices))
        limit = time.monotonic() + grace
        while time.monotonic() < limit and any(j.process and j.devices for j in self.jobs.values()):
            await asyncio.sleep(0.02)
        links = [e.link for e in self.executors.values() if e.link is not None]
        for link in links:
            link.send(Shutdown())
        limit = time.monotonic() + min(grace, LAST_WORDS)
        while time.monotonic() < limit and any(e.link in links for e in self.executors.values()):
            await asyncio.sleep(0.02)
        self.save()
        self.store.end_leases()
        await self.engine.close(stop=True)
        with contextlib.suppress(OSError, Lost):  # whose supervisor runs nothing but this process
            supervisor = Connection(self.home.connect())
            supervisor.send(Shutdown())
            supervisor.close()

    # -- a job's life --

    def move(self, job: Live, state: State, **fields: Any) -> None:
        self.store.move(job.id, state, **fields)
        job.state = state
        if state != "running" and not job.leaving:
            self.free(job)

    def free(self, job: Live) -> None:
        if self.floor is not None:
            self.floor.free(job)
        job.devices, job.sent, job.codes = (), False, {}

    def prepare(self, job: Live) -> None:
        """Starts its aggregator; a job that has devices keeps them meanwhile."""
        job.epoch += 1
        if job.state == "queued":
            self.move(job, "preparing", epoch=job.epoch)
        else:
            self.store.note({job.id: {"epoch": job.epoch}})
        folders.write(self.home, job.id, self.store.submission(job.id))
        job.process, job.linked, job.not_before = True, False, 0.0
        job.deadline = time.monotonic() + PREPARE_LIMIT
        settings = {"job": str(job.id), "epoch": job.epoch} | self._common()
        self._do(job.key, self.engine.start(job.key, "aggregator", settings), starts=True)

    def leave(self, job: Live, state: State) -> None:
        """Gives up its devices for the queue or a pause, with a checkpoint where it runs."""
        if job.process and job.devices and job.id in self.links:
            job.leaving = "paused" if state == "paused" else "queued"
            job.deadline = time.monotonic() + LEAVE_LIMIT
            self.links[job.id].send(Stop())
            self.move(job, state)
        else:
            self.move(job, state)
            self.doom(job, 0.0)
        self.kick()

    def end(self, job: Live, state: State, reason: str) -> None:
        at: dict[str, Any] = {"iteration": job.iteration, "loss": finite(job.loss), "checkpoint": job.checkpoint}
        at["slowdown"] = finite(fleet.slowdown(job, self.executors))
        self.store.move(job.id, state, reason=reason, **at)
        if reason:
            folders.log(self.home, job.id, f"{state}: {reason}")
        job.state = state
        self.free(job)
        del self.jobs[job.id]
        self.dirty.discard(job.id)
        self.doom(job, 5.0 if state == "finished" else 0.0)
        self.kick()

    def doom(self, job: Live, seconds: float) -> None:
        """Its aggregator must have ended by then."""
        if job.process and not seconds:
            self.kill(job.key)
        elif job.process:
            self.doomed[job.key] = time.monotonic() + seconds

    def strike(self, job: Live, reason: str, weight: float = 1.0) -> None:
        """Counts against the job; the third ends it. Otherwise it waits a little before the next try."""
        job.record = strikes.struck(job.record, strikes.Strike(job.iteration, reason[:500], weight))
        folders.log(self.home, job.id, reason)
        note(f"job {job.id}: strike {len(job.record.strikes)}: {reason}")
        line = strikes.verdict(job.record)
        if line:
            self.end(job, "failed", line)
            return
        job.not_before = time.monotonic() + strikes.pause(job.record)
        self.store.note({job.id: {"strikes": strikes.encode(job.record)}})

    def gang_again(self, job: Live) -> None:
        """All its ranks anew: one without the others is of no use."""
        if job.id in self.jobs and job.devices:
            job.epoch += 1
            job.codes, job.sent = {}, False
            self.store.note({job.id: {"epoch": job.epoch}})
            self.kick()

    # -- ends of processes --

    def exited(self, end: Exit) -> None:
        """A process has ended."""
        now, role, _, rest = time.monotonic(), *end.key.partition(" ")
        self.doomed.pop(end.key, None)
        if role == "executor" and int(rest) in self.executors:
            e = self.executors[int(rest)]
            guilty = self.jobs.get(fleet.running_job(self.home, e.index))
            if guilty is not None and end.code and not e.struck and not end.node_lost and not self.closing:
                self.strike(guilty, *strikes.death(f"executor {e.index}", end.code))
            e.ended(now)
            for job in list(self.jobs.values()):
                if job.is_gang and job.sent and e.index in job.devices:
                    self.gang_again(job)
        elif role == "aggregator":
            number, epoch = map(int, rest.split("."))
            self._aggregator_ended(number, epoch, end)
        self.kick()

    def _aggregator_ended(self, number: int, epoch: int, end: Exit) -> None:
        self.sweep()
        job = self.jobs.get(number)
        if job is None or job.epoch != epoch:
            return
        job.process = job.linked = False
        if job.leaving:
            job.leaving = ""
            self.free(job)
        elif job.state in ("preparing", "running") and not self.closing and not end.node_lost and job.blamed != epoch:
            self.strike(job, *strikes.death("its aggregator", end.code))

    def sweep(self) -> None:
        sweep_arenas(self.home.path, alive=[(str(j.id), j.epoch) for j in self.jobs.values() if j.process])

    def kick(self) -> None:
        """Something has changed: decide again soon."""
        self.kicked.set()

    def ready(self) -> set[int]:
        return {e.index for e in self.executors.values() if e.ready}

    def save(self) -> None:
        """Progress since the last time, in one transaction."""
        changes: dict[int, dict[str, Any]] = {}
        for number in self.dirty & set(self.jobs):
            job = self.jobs[number]
            changes[number] = {"iteration": job.iteration, "loss": finite(job.loss), "checkpoint": job.checkpoint,
                               "strikes": strikes.encode(job.record)}  # fmt: skip
        self.dirty.clear()
        self.store.note(changes)


def finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None

"""The executor of one device: it keeps the weights of several jobs, runs one task at a time, and decides which is next.

The coordinator grants leases ahead of time. For each, the executor joins the job's aggregator, which tells it what
tasks are ready. Whenever the device is idle, `planning.sharing.dispatch.pick`, which the simulator calls too, chooses
the job. The executor takes a task by a lock in the job's shared memory, so that no other process is involved between
two tasks (an executor on another machine asks the aggregator, one round trip). It loads the job if that has not
happened yet, runs the task in this thread and sends Done. A job whose aggregator dies offers nothing until the
coordinator grants a lease of its next attempt; the death of the coordinator changes nothing.

The job's code runs in this process, but what it does in a task is the job's fault alone: whatever it raises is a strike
for the job, what it prints goes to the job's log, and the running job's id is on disk in case the executor dies.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dovetail.cluster.accelerators import is_emulated
from dovetail.cluster.home import Home
from dovetail.cluster.output import Streams
from dovetail.cluster.transport.messages import (
    Claim,
    Done,
    Failed,
    GrantLease,
    Heartbeat,
    Hello,
    Task,
    TaskFailed,
    Welcome,
)
from dovetail.cluster.transport.wire import Lost
from dovetail.core.errors import Error, typed_line
from dovetail.planning.sharing.dispatch import Resident, pick

from .recorder import DeviceRecorder
from .statistics import RunningFile, TaskStatistics
from .tenant import JobRunner, Tenant
from .tenants import Tenants

if TYPE_CHECKING:
    from .device.task_device import TaskDevice

Opener = Callable[[GrantLease, Welcome, bool, str], JobRunner]
"""Loads a job, from (lease, welcome, emulated, this machine's address as the aggregator sees it)."""

Guard = Literal["off", "background", "all"]
ANSWER = 0.005
"""Seconds to wait for a Claim's answer before looking at other jobs; a later answer still counts."""
GAP_POLL, HELD_POLL, IDLE_POLL = 0.001, 0.01, 0.5
"""Seconds between polls: of a gang's gap file while background tasks are ready; while tasks wait; otherwise."""
_TRACE = 20_000  # characters of a stack trace that go to the job's log


class Executor:
    """The main loop of one device."""

    def __init__(
        self,
        *,
        home: Path,
        device: int,
        node: str,
        kind: str,
        coordinator: tuple[str, int],
        key: str,
        guard: Guard = "background",
        opener: Opener,
        accelerator: str = "",
    ) -> None:
        self.device, self.node, self.emulated = device, node, kind == "emulated"
        self.guard, self.ending = guard, False
        self._key, self._opener, self._pid, self._folder = key, opener, os.getpid(), home
        self._ended_at, self._rested_at, self._woke_at = time.monotonic(), 0.0, 0.0
        self._streams, self._statistics = Streams(), TaskStatistics()
        self._running = RunningFile(Home(home).running_file(device))
        imitates = self.emulated or is_emulated(accelerator)
        self._recorder = DeviceRecorder(home, device, node=node, emulated=imitates)
        self._tenants = Tenants(
            home=home,
            device=device,
            node=node,
            key=key,
            coordinator=coordinator,
            hello=self._hello,
            heartbeat=self._heartbeat,
            recorder=self._recorder,
            statistics=self._statistics,
        )

    def run(self) -> int:
        """Runs until the coordinator refuses it or it is told to end. Returns the exit code."""
        tenants, again = self._tenants, True
        tenants.link.start()
        try:
            while not (self.ending or tenants.closing or tenants.refused):
                tenants.listen(0.0 if again else self._poll_seconds())
                if not again:
                    self._woke_at = time.monotonic()
                again = self._dispatch()
        finally:
            tenants.close()
        if tenants.refused:
            print(f"device {self.device}: refused: {tenants.refused}", file=sys.stderr)
        return int(bool(tenants.refused))

    # -- called by the heartbeat thread --

    def _hello(self, leases: tuple[tuple[str, int], ...]) -> Hello:
        return Hello(
            key=self._key,
            role="executor",
            pid=self._pid,
            device=self.device,
            node=self.node,
            emulated=self.emulated,
            leases=leases,
        )

    def _heartbeat(self) -> Heartbeat:
        now = time.monotonic()
        running, since = self._statistics.running, self._statistics.since
        promised = [(tenant.job, tenant.promise) for tenant in list(self._tenants.jobs) if tenant.promise is not None]
        promised += [(rank.job, rank.promise) for rank in list(self._tenants.ranks.values()) if rank.foreground]
        return Heartbeat(
            running=running,
            since=now - since if running else 0.0,
            busy=dict(self._statistics.busy),
            tasks=dict(self._statistics.tasks),
            overhead=self._statistics.overhead,
            slowdown={job: promise.slowdown(now) for job, promise in promised},
            idle=self._statistics.idle(now),
        )

    # -- tasks --

    def prefetch(self) -> None:
        """While an accelerator computes a task: begins to bring the parameters of the job that is first in line."""
        ready = next((tenant for tenant in self._tenants.jobs if tenant.ready and tenant.runner is not None), None)
        if ready is not None and ready.runner is not None:
            ready.runner.prefetch(ready.iteration)

    def _poll_seconds(self) -> float:
        """Seconds to wait for messages while no task can start."""
        if any(tenant.ready for tenant in self._tenants.jobs):
            return GAP_POLL if self._tenants.ranks else HELD_POLL
        return IDLE_POLL

    def _dispatch(self) -> bool:
        """Runs or loads what is to run now. True if it did, so that messages may have come meanwhile."""
        while True:
            now = time.monotonic()
            candidates, guard = self._candidates()
            chosen = pick(candidates, self.device, now, guard)
            if chosen is None:
                break
            assert isinstance(chosen, Tenant)
            # A task that was held back could start when we woke, any other one when it was released.
            ready = chosen.ready_at if chosen.ready_at > self._rested_at else self._woke_at
            if chosen.runner is None:
                self._tenants.send()
                self._open(chosen)
                return True
            if chosen.assigned is None and not self._claim(chosen):
                continue
            for other in self._tenants.jobs:
                if other is not chosen:
                    other.give_up()
            self._tenants.send()
            if chosen.assigned is not None:  # unless its aggregator was lost just now
                self._run(chosen, max(ready, self._ended_at))
                return True
        self._rested_at = now
        self._reserve()
        self._tenants.send()
        unloaded = next((t for t in self._tenants.jobs if t.welcome and t.runner is None and not t.failed), None)
        if unloaded is None or self._tenants.ranks:
            return False
        self._open(unloaded)
        return True

    def _candidates(self) -> tuple[Sequence[Resident], Guard]:
        """The jobs that compete for the device: beside a gang's rank only background jobs, and only in its gaps."""
        if not self._tenants.ranks:
            return self._tenants.jobs, self.guard
        guard: Guard = "all" if self.guard == "all" else "background"
        return [*self._tenants.ranks.values(), *(tenant for tenant in self._tenants.jobs if tenant.background)], guard

    def _claim(self, tenant: Tenant) -> bool:
        """Takes the job's longest task. False if another executor has it, or the answer has not come yet."""
        if tenant.lockable:
            tenant.lock(time.monotonic())
            return tenant.assigned is not None
        self._tenants.send()
        return self._ask(tenant)

    def _reserve(self) -> None:
        """Where one job alone is served, takes a task of its next iteration before the release."""
        if len(self._tenants.jobs) == 1 and not self._tenants.ranks:
            self._tenants.jobs[0].reserve()

    def _ask(self, tenant: Tenant) -> bool:
        connection = tenant.connection
        if connection is None:
            return False
        try:
            connection.send(Claim(iteration=tenant.iteration))
            tenant.claiming()
            deadline = time.monotonic() + ANSWER
            while tenant.claimed and tenant.connection is connection:
                now = time.monotonic()
                message = connection.receive(timeout=deadline - now)
                if message is None:
                    return False
                self._tenants.hear(tenant, message, time.monotonic())
        except Lost:
            self._tenants.disconnect(tenant)
        self._tenants.read(tenant)  # messages that were read together with the answer
        return tenant.assigned is not None

    def _run(self, tenant: Tenant, ready: float) -> None:
        task, profiled = tenant.begin(time.monotonic())
        released = tenant.released_at
        job, runner = tenant.job, tenant.runner
        assert runner is not None and tenant.log is not None
        self._running.write(job)
        self._streams.lend(tenant.log)
        start = time.monotonic()
        self._statistics.start(job, start)
        done: Done | None = None
        failure: TaskFailed | None = None
        try:
            done = runner.run(task)
        except Lost:  # the tensor channel failed: the aggregator gives the task to another executor
            self._tenants.disconnect(tenant)
        except BaseException as e:  # SystemExit and KeyboardInterrupt too: the job's code raised them
            failure = _failed(task, e)
        if os.getpid() != self._pid:
            os._exit(1)  # a process that the job's code has forked and that returned into ours
        self._restore_process()
        stop = self._ended_at = time.monotonic()
        self._running.clear()
        if done is not None:
            tenant.observe(profiled, stop - start)
        if tenant.background:
            self._background_task_ended(start, stop)
        reply = failure or done
        if reply is not None:
            tenant.unsent.append(reply)
        overhead = max(0.0, start - ready)
        self._statistics.stop(job, start, stop, overhead)
        self._recorder.task(job, task.iteration, task.worker, start, stop, overhead, max(0.0, start - released))

    def _restore_process(self) -> None:
        """Undoes what the job's code may have changed: streams, working folder, alarms that would hit other jobs."""
        self._streams.take_back()
        os.chdir(self._folder)
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _background_task_ended(self, start: float, stop: float) -> None:
        self._tenants.last_background.start, self._tenants.last_background.stop = start, stop
        self._tenants.last_background.count += 1
        for rank in self._tenants.ranks.values():
            rank.background_task_ended(stop)

    def _open(self, tenant: Tenant) -> None:
        """Loads the job, which runs its code. Reports a failure, unless the aggregator is lost too."""
        assert tenant.connection is not None and tenant.welcome is not None and tenant.log is not None
        start = time.monotonic()
        self._running.write(tenant.job)
        self._statistics.start(tenant.job, start)
        self._streams.lend(tenant.log)
        reason = ""
        try:
            local = str(tenant.connection.socket.getsockname()[0])
            tenant.runner = self._opener(tenant.lease, tenant.welcome, self.emulated, local)
        except BaseException as e:
            reason = _line(e)
            if not isinstance(e, Error):
                traceback.print_exc()
        if os.getpid() != self._pid:
            os._exit(1)
        self._restore_process()
        self._running.clear()
        self._statistics.running = ""
        self._ended_at = time.monotonic()
        if tenant.background:
            self._background_task_ended(start, self._ended_at)
        self._tenants.read(tenant)
        if reason and tenant.connection is not None and not self._aggregator_ends(tenant):
            tenant.fail()
            about = ("load", tenant.job, tenant.lease.attempt)
            self._tenants.link.report(
                tenant.job, about, Failed(job=tenant.job, attempt=tenant.lease.attempt, reason=reason)
            )

    def _aggregator_ends(self, tenant: Tenant) -> bool:
        """Whether the aggregator ends just now: its tensors may be lost before its connection."""
        connection = tenant.connection
        assert connection is not None
        try:
            message = connection.receive(timeout=0.2)
            if message is not None:
                self._tenants.hear(tenant, message, time.monotonic())
        except Lost:
            self._tenants.disconnect(tenant)
        return tenant.connection is not connection


def main(
    *,
    home: Path,
    device: int,
    node: str,
    kind: Literal["cpu", "emulated", "accelerator"],
    core: int,
    coordinator: tuple[str, int],
    key_file: Path,
    guard: Guard = "background",
    opener: Opener | None = None,
    accelerator: str = "",
    memory: int = 0,
) -> None:
    """Runs the executor of one device in this process until it is told to end. `opener`: `loader.open_job` if None.

    `accelerator`: the name of an accelerator, of which jobs may use `memory` bytes together.
    """
    on: TaskDevice | None = None
    if opener is None:
        opener, on = _opener(accelerator, memory)
    home = Path(home).absolute()
    if kind == "cpu" and core >= 0:
        try:
            os.sched_setaffinity(0, {core})
        except OSError as e:
            print(f"device {device}: cannot be pinned to core {core}: {e}", file=sys.stderr)
    executor = Executor(
        home=home,
        device=device,
        node=node,
        kind=kind,
        coordinator=coordinator,
        key=Path(key_file).read_text(encoding="ascii").strip(),
        guard=guard,
        opener=opener,
        accelerator=accelerator,
    )
    if on is not None:
        on.meanwhile = executor.prefetch

    def end(signum: int, frame: object) -> None:
        executor.ending = True  # after the running task

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # collecting garbage of a job that has left does not scan all of torch
    code = executor.run()
    if code:
        raise SystemExit(code)


def _opener(accelerator: str, memory: int) -> tuple[Opener, TaskDevice | None]:
    """How jobs are loaded, and the accelerator that they are loaded onto, if one is named."""
    from .loader import open_job  # here, since it imports torch

    if not accelerator:
        return open_job, None
    from .device.task_device import TaskDevice

    on = TaskDevice(accelerator, memory)
    return partial(open_job, on=on), on


def _failed(task: Task, error: BaseException) -> TaskFailed:
    trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
    return TaskFailed(iteration=task.iteration, worker=task.worker, reason=_line(error), trace=trace[-_TRACE:])


def _line(error: BaseException) -> str:
    """One line for people; our own errors are one line already."""
    return str(error) if isinstance(error, Error) else typed_line(error)

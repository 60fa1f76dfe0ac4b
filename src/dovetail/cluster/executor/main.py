"""An executor: one per device. Several jobs are resident, one task runs at a time, and what runs next is decided here.

The coordinator grants jobs ahead of time. For each the executor joins the job's aggregator and hears which tasks are
ready. Whenever it is idle it asks `planning.dispatch.pick`, the function that the simulator asks, whose task to take;
takes one by a lock in the job's shared memory, so that nothing but this process stands between two tasks (an executor
on another machine asks the aggregator, one round trip); loads the job if that has not happened yet; runs the task in
this thread; says Done. A job whose aggregator dies offers nothing until the coordinator grants its next start; a
coordinator that dies changes nothing.

The job's code runs in this process, so nothing that it does in a task counts against the executor: whatever it raises
is a strike for the job, what it prints goes to the job's log, and whose task runs is written down before it starts.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dovetail.cluster.job.spec import first_line
from dovetail.cluster.output import Streams
from dovetail.cluster.transport.messages import Beat, Claim, Done, Failed, Hello, Task, TaskFailed
from dovetail.cluster.transport.wire import Lost
from dovetail.core.errors import Error
from dovetail.planning.sharing.dispatch import Resident, pick

from .loader import Opener, open_job
from .recorder import Recorder
from .residents import Live
from .statistics import Running, Tally
from .tenants import Tenants

Guard = Literal["off", "background", "all"]
ANSWER = 0.005
"""Seconds that a Claim's answer may take before other jobs are looked at; it counts whenever it comes."""
GAP_POLL, HELD_POLL, REST = 0.001, 0.01, 0.5
"""Seconds between looks: at a gang's gap word while fillers are ready, at fillers that are held back, otherwise."""
_TRACE = 20_000  # letters of a stack trace that go to the job's log


class Executor:
    """The loop of one device."""

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
        opener: Opener = open_job,
    ) -> None:
        self.device, self.node, self.emulated = device, node, kind == "emulated"
        self.guard, self.ending = guard, False
        self._key, self._opener, self._pid, self._folder = key, opener, os.getpid(), home
        self._ended_at, self._rested_at, self._woke_at = time.monotonic(), 0.0, 0.0
        self._streams, self._tally = Streams(), Tally()
        self._running = Running(home / "executors" / f"{device}.running")
        self._recorder = Recorder(home, device, node=node, emulated=self.emulated)
        self._tenants = Tenants(
            home=home,
            device=device,
            node=node,
            key=key,
            coordinator=coordinator,
            hello=self._hello,
            beat=self._beat,
            recorder=self._recorder,
            tally=self._tally,
        )

    def run(self) -> int:
        """Until refused or told to end; the code to exit with."""
        tenants, again = self._tenants, True
        tenants.link.start()
        try:
            while not (self.ending or tenants.closing or tenants.refused):
                tenants.listen(0.0 if again else self._rest())
                if not again:
                    self._woke_at = time.monotonic()
                again = self._dispatch()
        finally:
            tenants.close()
        if tenants.refused:
            print(f"device {self.device}: refused: {tenants.refused}", file=sys.stderr)
        return int(bool(tenants.refused))

    # -- for the beating thread --

    def _hello(self, residents: tuple[tuple[str, int], ...]) -> Hello:
        return Hello(
            key=self._key,
            role="executor",
            pid=self._pid,
            device=self.device,
            node=self.node,
            emulated=self.emulated,
            residents=residents,
        )

    def _beat(self) -> Beat:
        now = time.monotonic()
        running, since = self._tally.running, self._tally.since
        promised = [(r.job, r.promise) for r in list(self._tenants.residents) if r.promise is not None]
        promised += [(rank.job, rank.promise) for rank in list(self._tenants.ranks.values()) if rank.foreground]
        return Beat(
            running=running,
            since=now - since if running else 0.0,
            busy=dict(self._tally.busy),
            tasks=dict(self._tally.tasks),
            overhead=self._tally.overhead,
            slowdown={job: promise.slowdown(now) for job, promise in promised},
            idle=self._tally.idle(now),
        )

    # -- tasks --

    def _rest(self) -> float:
        """How long to wait for something to happen, if nothing does."""
        if any(r.ready for r in self._tenants.residents):
            return GAP_POLL if self._tenants.ranks else HELD_POLL
        return REST

    def _dispatch(self) -> bool:
        """Runs the task that is to run now; whether there was one, or something else that took time."""
        while True:
            now = time.monotonic()
            residents, guard = self._rivals()
            chosen = pick(residents, self.device, now, guard)
            if chosen is None:
                break
            assert isinstance(chosen, Live)
            # A task that was held back could have started when we woke; any other when it was released.
            ready = chosen.ready_at if chosen.ready_at > self._rested_at else self._woke_at
            if chosen.runner is None:
                self._tenants.speak()
                self._open(chosen)
                return True
            if chosen.assigned is None and not self._claim(chosen):
                continue
            for other in self._tenants.residents:
                if other is not chosen:
                    other.give_up()
            self._tenants.speak()
            if chosen.assigned is not None:  # its aggregator might just have gone
                self._run(chosen, max(ready, self._ended_at))
                return True
        self._rested_at = now
        self._reserve()
        self._tenants.speak()
        waiting = next((r for r in self._tenants.residents if r.welcome and r.runner is None and not r.failed), None)
        if waiting is not None and not self._tenants.ranks:
            self._open(waiting)
        return waiting is not None and not self._tenants.ranks

    def _rivals(self) -> tuple[Sequence[Resident], Guard]:
        """Who competes for the device: beside a gang's rank only background jobs, and only in its gaps."""
        if not self._tenants.ranks:
            return self._tenants.residents, self.guard
        guard: Guard = "all" if self.guard == "all" else "background"
        return [*self._tenants.ranks.values(), *(r for r in self._tenants.residents if r.background)], guard

    def _claim(self, live: Live) -> bool:
        """The job's longest task is ours. False if it was taken meanwhile, or the answer is not there yet."""
        if live.open:
            live.lock(time.monotonic())
            return live.assigned is not None
        self._tenants.speak()
        return self._ask(live)

    def _reserve(self) -> None:
        """Nobody else is served here: the job's next task may be ours before it is released."""
        if len(self._tenants.residents) == 1 and not self._tenants.ranks:
            self._tenants.residents[0].reserve()

    def _ask(self, live: Live) -> bool:
        connection = live.connection
        if connection is None:
            return False
        try:
            connection.send(Claim(iteration=live.iteration))
            live.claiming()
            deadline = time.monotonic() + ANSWER
            while live.claimed and live.connection is connection:
                now = time.monotonic()
                message = connection.receive(timeout=deadline - now)
                if message is None:
                    return False
                self._tenants.hear(live, message, time.monotonic())
        except Lost:
            self._tenants.unplug(live)
        self._tenants.read(live)  # what came behind the answer: no socket will tell of it
        return live.assigned is not None

    def _run(self, live: Live, ready: float) -> None:
        task, profiled = live.begin(time.monotonic())
        released = live.released_at
        job, runner = live.job, live.runner
        assert runner is not None and live.log is not None
        self._running.write(job)
        self._streams.lend(live.log)
        start = time.monotonic()
        self._tally.start(job, start)
        done: Done | None = None
        failure: TaskFailed | None = None
        try:
            done = runner.run(task)
        except Lost:  # the tensor channel: the aggregator gives the task to somebody else
            self._tenants.unplug(live)
        except BaseException as e:  # SystemExit and KeyboardInterrupt too: it is the job's code that ends, not ours
            failure = _failed(task, e)
        if os.getpid() != self._pid:
            os._exit(1)  # a process that the job's code has forked and let run into ours
        self._take_back()
        stop = self._ended_at = time.monotonic()
        self._running.clear()
        if done is not None:
            live.observe(profiled, stop - start)
        if live.background:
            self._filler_ended(start, stop)
        reply = failure or done
        if reply is not None:
            live.unsaid.append(reply)
        overhead = max(0.0, start - ready)
        self._tally.stop(job, start, stop, overhead)
        self._recorder.task(job, task.iteration, task.worker, start, stop, overhead, max(0.0, start - released))

    def _take_back(self) -> None:
        """What the job's code may have changed of the process: streams, folder, alarms that would ring in others."""
        self._streams.take_back()
        os.chdir(self._folder)
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _filler_ended(self, start: float, stop: float) -> None:
        self._tenants.filled.start, self._tenants.filled.stop = start, stop
        self._tenants.filled.count += 1
        for rank in self._tenants.ranks.values():
            rank.filler_ended(stop)

    def _open(self, live: Live) -> None:
        """Loads the job: its code runs. If it fails the coordinator hears why, unless the aggregator is gone anyway."""
        assert live.connection is not None and live.welcome is not None and live.log is not None
        start = time.monotonic()
        self._running.write(live.job)
        self._tally.start(live.job, start)
        self._streams.lend(live.log)
        reason = ""
        try:
            local = str(live.connection.socket.getsockname()[0])
            live.runner = self._opener(live.grant, live.welcome, self.emulated, local)
        except BaseException as e:
            reason = _line(e)
            if not isinstance(e, Error):
                traceback.print_exc()
        if os.getpid() != self._pid:
            os._exit(1)
        self._take_back()
        self._running.clear()
        self._tally.running = ""
        self._ended_at = time.monotonic()
        if live.background:
            self._filler_ended(start, self._ended_at)
        self._tenants.read(live)
        if reason and live.connection is not None and not self._left(live):
            live.fail()
            about = ("load", live.job, live.grant.epoch)
            self._tenants.link.tell(live.job, about, Failed(job=live.job, epoch=live.grant.epoch, reason=reason))

    def _left(self, live: Live) -> bool:
        """Whether the aggregator goes just now: its tensors may have gone before it, and the job is not to blame."""
        connection = live.connection
        assert connection is not None
        try:
            message = connection.receive(timeout=0.2)
            if message is not None:
                self._tenants.hear(live, message, time.monotonic())
        except Lost:
            self._tenants.unplug(live)
        return live.connection is not connection


def main(
    *,
    home: Path,
    device: int,
    node: str,
    kind: Literal["cpu", "emulated"],
    core: int,
    coordinator: tuple[str, int],
    key_file: Path,
    guard: Guard = "background",
    opener: Opener = open_job,
) -> None:
    """Runs the executor of one device in this process until it is told to end."""
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
    )

    def end(signum: int, frame: object) -> None:
        executor.ending = True  # after the task that runs

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # collecting a revoked job's garbage does not go through all of torch
    code = executor.run()
    if code:
        raise SystemExit(code)


def _failed(task: Task, error: BaseException) -> TaskFailed:
    trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
    return TaskFailed(iteration=task.iteration, worker=task.worker, reason=_line(error), trace=trace[-_TRACE:])


def _line(error: BaseException) -> str:
    """Our own errors are one line already."""
    return str(error) if isinstance(error, Error) else first_line(error)

"""The aggregator of one job: owns parameters and optimiser, offers tasks, updates at the barrier, writes checkpoints.

It sends Hello, loads the job file, resumes from the newest checkpoint if there is one, and releases an iteration.
Executors take its tasks, the longest first. When all have ended it averages the gradients in the order of the workers,
runs the optimiser, and releases the next iteration. The coordinator may restart meanwhile. The aggregator ends when all
iterations are done, when it is told to stop, or when the job cannot go on; only checkpoints, losses and log remain.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dovetail.cluster.home import arena_name
from dovetail.cluster.job import spec
from dovetail.cluster.job.objects import JobError
from dovetail.cluster.job.submission import stored_options
from dovetail.cluster.output import LogHandler
from dovetail.cluster.transport.messages import (
    Barrier,
    Failed,
    Finished,
    Message,
    Progress,
    Refusal,
    StopJob,
    TaskFailed,
)
from dovetail.core.errors import Error, InputError, typed_line
from dovetail.planning.sharing.dispatch import SMOOTHING

from . import checkpoint
from .members import Member, Members
from .offers import IterationTasks, Offers
from .reporter import Reporter, hello_of, local_host
from .training import NotFinite, Training

log = logging.getLogger("dovetail")
CHECKPOINT_SECONDS = 30.0
"""Most seconds between two checkpoints."""
PROGRESS_SECONDS = 0.2
STOP_GRACE = 10.0
"""Seconds in which the running tasks may still end after StopJob; otherwise the iteration is done again later."""
TASK_GRACE = 30.0
"""Seconds beyond a task's time-out after which its executor counts as lost; the coordinator acts earlier."""
TASK_TIMEOUT = 120.0
"""Seconds after which a task counts as endless, unless the submission sets another limit."""
LOADING = 240.0
"""Seconds for making the job's model and data and for the first trial; the coordinator waits a little longer."""
FAREWELL = 600.0
"""Seconds for which an aggregator that has ended tries to report that to the coordinator."""
ANSWER = 5.0
"""Seconds for which it then waits for the coordinator to close the connection."""
TURN = 0.5
"""Longest wait in the loop, in seconds."""


class Ending(Exception):
    """Ends the process without a further message."""


class Aggregator:
    """One attempt of one job."""

    def __init__(
        self, *, home: Path, job: str, attempt: int, coordinator: tuple[str, int], key: str, node: str
    ) -> None:
        self.home, self.job, self.attempt = home, job, attempt
        self.folder = home / "jobs" / job
        self.selector = selectors.DefaultSelector()
        host = local_host(coordinator)
        self.members = Members(
            self.selector,
            host,
            key=key,
            job=job,
            attempt=attempt,
            node=node,
            joined=self._joined,
            heard=self._heard,
            lost=self._lost,
        )
        hello = hello_of(key=key, job=job, attempt=attempt, node=node, address=self.members.address)
        self.reporter = Reporter(self.selector, coordinator, hello, self._coordinator_said)
        self.training: Training | None = None
        self.stopping = False
        self.discard = False
        self.answered = False
        self.stop_by = 0.0

    # -- the life of an attempt --

    def run(self) -> int:
        """Runs the attempt. Returns the exit code: 0 unless the job failed."""
        try:
            self._reach_coordinator()
            with sole_attempt(self.folder):
                self._load()
                self._train()
                self._finish()
        except Ending:
            return 0
        except Error as e:
            return self._fail(e)
        except Exception as e:  # a full disk, or a bug of ours: the next attempt may succeed
            return self._fail(JobError(f"aggregator: {typed_line(e)}", traceback.format_exc()))
        finally:
            if self.training is not None:
                self.training.arena.unlink()
            self.reporter.close()
            self.members.close("the job's aggregator has ended")
            self.selector.close()
        return 0

    def _load(self) -> None:
        options = stored_options(self.folder)
        self.timeout = options.task_timeout or TASK_TIMEOUT
        checkpoint.tidy(self.folder)
        with time_limit(max(LOADING, self.timeout), "loading the job"):
            self.spec = spec.load(self.folder / "job.py", options)
            state = checkpoint.newest(self.folder)
            training = Training(self.spec, arena_name(self.home, self.job, self.attempt), state)
        self.tasks = IterationTasks(training.division)
        self.offers = Offers(self.tasks, training.arena, self.members)
        self.training = training
        self.losses = checkpoint.Losses(self.folder, training.iteration)
        self.writer = checkpoint.Writer(self.folder)
        self.writer.done = training.iteration if state is not None else -1
        self.written_at, self.complaint = time.monotonic(), ""
        self.loss = self.losses.last
        self.release_at: float | None = time.monotonic()
        self.barrier_at = self.progress_at = self.check_at = 0.0
        self.off_device, self.iteration_seconds = self.spec.off_device, 0.0
        begun = f"resumes at iteration {training.iteration}" if state is not None else "starts"
        log.info("%s: attempt %d %s, %d iterations", self.spec.name, self.attempt, begun, self.spec.steps)
        self.reporter.must_know(
            msgspec.structs.replace(training.described(self.attempt, self.job), task_timeout=self.timeout)
        )
        self.offers.prepare(training.iteration, training.depths())
        self.members.open(training.arena)

    def _reach_coordinator(self) -> None:
        """Waits a moment for the coordinator, so that a failure to load can be reported."""
        limit = time.monotonic() + 2.0
        while not self.reporter.connected and time.monotonic() < limit:
            self._turn(0.05)

    def _train(self) -> None:
        assert self.training is not None
        while self.training.iteration < self.spec.steps:
            now = time.monotonic()
            if self.stopping and (self.discard or not self._worth_waiting(now)):
                return
            if self.release_at is not None and now >= self.release_at and not self.stopping:
                self._release(now)
            self._chores(now)
            wait = TURN if self.release_at is None else max(0.0, self.release_at - time.monotonic())
            self._turn(min(TURN, wait))
            if self.tasks.complete:
                self._barrier()

    def _worth_waiting(self, now: float) -> bool:
        """After StopJob: whether the iteration will end soon. Otherwise the next attempt does it again."""
        return self.release_at is None and not self.tasks.ready and now < self.stop_by

    def _finish(self) -> None:
        """Finished or stopped: what was done is on disk before it is reported."""
        assert self.training is not None
        if self.discard:
            raise Ending
        with contextlib.suppress(Error):  # an earlier one that failed does not matter now
            self.writer.finish()
        if self.writer.done != self.training.iteration:
            self._checkpoint()
            self.writer.finish()
        done = self.training.iteration
        if done < self.spec.steps:
            log.info("stopped after %d iterations", done)
            self._progress(time.monotonic())
            raise Ending
        log.info("finished: %d iterations, loss %.6g", done, self.loss)
        self.training.arena.unlink()
        self.members.close("the job is finished")
        self._farewell(Finished(job=self.job, attempt=self.attempt, iteration=done, loss=self.loss))

    def _fail(self, error: Error) -> int:
        """Reports a strike, or the job's end. There is no checkpoint: the coordinator would take it for progress."""
        trace = error.trace if isinstance(error, JobError) else ""
        where = f"iteration {self.tasks.number}" if hasattr(self, "tasks") else "start"
        log.error("failed at %s: %s%s", where, error, f"\n{trace}" if trace else "")
        wrong_job = isinstance(error, JobError | InputError) and self.training is None
        fatal = isinstance(error, NotFinite) or wrong_job
        if self.training is not None:
            self.training.arena.unlink()
        self.members.close(str(error))
        with contextlib.suppress(Ending):
            self._farewell(Failed(job=self.job, attempt=self.attempt, reason=str(error), fatal=fatal))
        return 1

    def _farewell(self, last: Message) -> None:
        """Reports the end until the coordinator has got it, which then closes the connection or sends StopJob."""
        self.reporter.must_know(last)
        limit = time.monotonic() + FAREWELL
        heard_by = None
        self.answered = False
        while time.monotonic() < limit and not self.answered:
            if self.reporter.caught_up:
                heard_by = heard_by or time.monotonic() + ANSWER
                if time.monotonic() > heard_by:
                    return
            elif heard_by is not None:
                return  # it got the message and closed the connection
            self._turn(0.05)

    # -- iterations --

    def _release(self, now: float) -> None:
        if self.barrier_at:
            self.off_device += SMOOTHING * (now - self.barrier_at - self.off_device)
        self.release_at = None
        self.offers.release(now)

    def _barrier(self) -> None:
        assert self.training is not None
        now, before, number = time.monotonic(), self.barrier_at, self.tasks.number
        self.members.send_all(Barrier(iteration=number, until=now + self.off_device, at=now))
        self.loss = self.training.update(self.tasks.done, self.tasks.depths)
        self.tasks.done = {}
        self.losses.add(number, self.loss)
        self.barrier_at = now
        if before:
            self.iteration_seconds += SMOOTHING * (now - before - self.iteration_seconds)
        self.release_at = max(time.monotonic(), now + self.spec.off_device)
        done = self.training.iteration
        if done < self.spec.steps:
            self.offers.prepare(done, self.training.depths())
        due = done - max(self.writer.done, 0) >= self.spec.checkpoint_every and not self.writer.error
        if (due or now - self.written_at > CHECKPOINT_SECONDS) and not self.writer.busy and done < self.spec.steps:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Begins to write a checkpoint. If the disk is full, it is tried again after a while; training goes on."""
        assert self.training is not None
        self.written_at = time.monotonic()
        try:
            self.losses.sync()
        except OSError as e:
            self.writer.error = typed_line(e)
            return
        self.writer.begin(self.training.iteration, self.training.state())

    def _chores(self, now: float) -> None:
        if now >= self.progress_at:
            self.progress_at = now + PROGRESS_SECONDS
            self._progress(now)
        if now >= self.check_at:
            self.check_at = now + 1.0
            if self.writer.error != self.complaint:
                self.complaint = self.writer.error
                log.warning("checkpoint: %s", self.complaint or "can be written again")
            self.offers.check_overdue(now, self.timeout + TASK_GRACE)

    def _progress(self, now: float) -> None:
        assert self.training is not None
        division, depths = self.training.division, self.tasks.depths or self.training.depths()
        number = self.tasks.number
        self.reporter.send(
            Progress(
                job=self.job,
                attempt=self.attempt,
                iteration=self.training.iteration,
                loss=self.loss,
                checkpoint=max(self.writer.done, 0),
                task_seconds=tuple(map(self.tasks.predicted, range(self.spec.workers))) if number >= 0 else (),
                off_device=self.off_device,
                iteration_seconds=self.iteration_seconds,
                depths=tuple(division.shares[d] for d in depths) if division.plan else (),
            )
        )

    # -- messages of executors --

    def _joined(self, member: Member) -> None:
        self.offers.joined(member)

    def _heard(self, member: Member, message: Message) -> None:
        if isinstance(message, TaskFailed):
            self._task_failed(member, message)
        else:
            self.offers.heard(member, message)

    def _task_failed(self, member: Member, message: TaskFailed) -> None:
        if not self.tasks.has(member, message):
            return
        where = f"iteration {message.iteration}, worker {message.worker}"
        raise JobError(f"{where}: {' '.join(message.reason.split())}", message.trace)

    def _lost(self, member: Member) -> None:
        self.offers.lost(member)

    # -- messages of the coordinator --

    def _coordinator_said(self, message: Message) -> None:
        if isinstance(message, Refusal):
            log.info("attempt %d ends: %s", self.attempt, message.reason)
            raise Ending
        if isinstance(message, StopJob):
            self.stop(discard=message.discard)

    def stop(self, *, discard: bool = False) -> None:
        self.answered = True
        self.discard |= discard
        if not self.stopping:
            self.stopping, self.stop_by = True, time.monotonic() + STOP_GRACE
            if self.training is not None:
                self.offers.withdraw()

    def _turn(self, timeout: float) -> None:
        """Waits once for messages, at most `timeout` seconds, and handles them."""
        now = time.monotonic()
        self.reporter.tick(now)
        self.members.tick(now)
        for key, _ in self.selector.select(timeout):
            call: Callable[[], None] = key.data
            call()


@contextmanager
def sole_attempt(folder: Path) -> Iterator[None]:
    """Holds the job's lock, so that no two attempts run at once; waits a little for an earlier one to end."""
    handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        limit = time.monotonic() + 30.0
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > limit:
                    raise Error("an earlier attempt of the job does not end") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """A JobError if the block takes longer. By a signal, since it may be an endless loop in the job's code."""

    def ring(*_: object) -> None:
        raise JobError(f"{what} took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(*, home: Path, job: str, attempt: int, coordinator: tuple[str, int], key_file: Path, node: str = "") -> None:
    """Runs an aggregator in this process. `node`: its machine; executors of another machine share no memory with it."""
    home, key = Path(home), Path(key_file).read_text(encoding="ascii").strip()
    folder = home / "jobs" / job
    handler = LogHandler(folder / "log.txt", "aggregator")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    sys.setswitchinterval(0.0005)  # seconds: a claim does not wait for the checkpoint thread
    coordinator = (str(coordinator[0]), int(coordinator[1]))
    aggregator = Aggregator(home=home, job=job, attempt=attempt, coordinator=coordinator, key=key, node=node)
    signal.signal(signal.SIGTERM, lambda *_: aggregator.stop())
    raise SystemExit(aggregator.run())

"""One job's aggregator: owns its parameters and optimiser, hands out tasks, steps at the barrier, makes checkpoints.

It says Hello, loads the job file, goes on from the newest checkpoint if there is one, and releases an iteration.
Executors take its tasks, the longest first; when all have ended it averages the gradients in the order of the workers,
steps, and releases the next. The coordinator may come and go meanwhile. It ends when all iterations are done, when it
is told to stop, or when the job cannot go on, and leaves nothing behind but its checkpoints, losses and log.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from dovetail.cluster.home import arena_name
from dovetail.cluster.job import spec
from dovetail.cluster.job.objects import JobError
from dovetail.cluster.job.submission import stored_options
from dovetail.cluster.transport.messages import Barrier, Failed, Finished, Message, Progress, Refused, Stop, TaskFailed
from dovetail.core.errors import Error, InputError
from dovetail.planning.sharing.dispatch import SMOOTHING

from . import checkpoint
from .crew import Crew, Member
from .iteration_tasks import Iteration
from .offers import Offers
from .reporter import Reporter, hello_of, local_host
from .startup import ToLog, alone, limited, newest
from .training import NotFinite, Training

log = logging.getLogger("dovetail")
CHECKPOINT_SECONDS = 30.0
"""There is a checkpoint at least so often while iterations are made."""
PROGRESS_SECONDS = 0.2
STOP_GRACE = 10.0
"""Seconds in which the tasks of the present iteration may still end after Stop; it is done again otherwise."""
TASK_GRACE = 30.0
"""Seconds beyond a task's time-out after which its executor counts as lost: the coordinator acts before."""
TASK_TIMEOUT = 120.0
"""Seconds after which a task counts as endless, unless the submission says otherwise."""
LOADING = 240.0
"""Seconds for the job's own model, data and first trials; the coordinator waits a little longer."""
FAREWELL = 600.0
"""Seconds for which an aggregator that is done waits for the coordinator to hear of it."""
ANSWER = 5.0
"""Seconds for which it then waits for the coordinator to hang up."""
TURN = 0.5
"""Longest wait in the loop, in seconds."""


class Ending(Exception):
    """Leaves the loop: nothing more is to be said."""


class Aggregator:
    """One start of one job."""

    def __init__(self, *, home: Path, job: str, epoch: int, coordinator: tuple[str, int], key: str, node: str) -> None:
        self.home, self.job, self.epoch = home, job, epoch
        self.folder = home / "jobs" / job
        self.selector = selectors.DefaultSelector()
        host = local_host(coordinator)
        self.crew = Crew(
            self.selector,
            host,
            key=key,
            job=job,
            epoch=epoch,
            node=node,
            joined=self._joined,
            heard=self._heard,
            lost=self._lost,
        )
        hello = hello_of(key=key, job=job, epoch=epoch, node=node, address=self.crew.address)
        self.reporter = Reporter(self.selector, coordinator, hello, self._told)
        self.training: Training | None = None
        self.stopping = False
        self.discard = False
        self.answered = False
        self.stop_by = 0.0

    # -- from beginning to end --

    def run(self) -> int:
        """The code to exit with: 0 unless the job failed."""
        try:
            self._reach_coordinator()
            with alone(self.folder):
                self._load()
                self._train()
                self._leave_well()
        except Ending:
            return 0
        except Error as e:
            return self._fail(e)
        except Exception as e:  # a full disk, or a mistake of ours: the next start may do better
            return self._fail(JobError(f"aggregator: {spec.first_line(e)}", traceback.format_exc()))
        finally:
            if self.training is not None:
                self.training.arena.unlink()
            self.reporter.close()
            self.crew.close("the job's aggregator ends")
            self.selector.close()
        return 0

    def _load(self) -> None:
        options = stored_options(self.folder)
        self.timeout = options.task_timeout or TASK_TIMEOUT
        checkpoint.tidy(self.folder)
        with limited(max(LOADING, self.timeout), "loading the job"):
            self.spec = spec.load(self.folder / "job.py", options)
            state = newest(self.folder)
            training = Training(self.spec, arena_name(self.home, self.job, self.epoch), state)
        self.iteration = Iteration(training.division)
        self.offers = Offers(self.iteration, training.arena, self.crew)
        self.training = training
        self.losses = checkpoint.Losses(self.folder, training.iteration)
        self.writer = checkpoint.Writer(self.folder)
        self.writer.done = training.iteration if state is not None else -1
        self.written_at, self.complaint = time.monotonic(), ""
        self.loss = self.losses.last
        self.release_at: float | None = time.monotonic()
        self.barrier_at = self.progress_at = self.look_at = 0.0
        self.off_device, self.iteration_seconds = self.spec.off_device, 0.0
        begun = f"goes on from iteration {training.iteration}" if state is not None else "begins"
        log.info("%s: start %d %s, %d iterations", self.spec.name, self.epoch, begun, self.spec.steps)
        self.reporter.must_know(
            msgspec.structs.replace(training.described(self.epoch, self.job), task_timeout=self.timeout)
        )
        self.offers.prepare(training.iteration, training.depths())
        self.crew.open(training.arena)

    def _reach_coordinator(self) -> None:
        """A moment for the first Hello, so that a failure to load can be told; not more than a moment."""
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
            if self.iteration.complete:
                self._barrier()

    def _worth_waiting(self, now: float) -> bool:
        """After Stop: whether the iteration will end by itself. Otherwise it is done again by the next start."""
        return self.release_at is None and not self.iteration.ready and now < self.stop_by

    def _leave_well(self) -> None:
        """Finished or stopped: what was done is on disk before anybody hears of it."""
        assert self.training is not None
        if self.discard:
            raise Ending
        with contextlib.suppress(Error):  # that of an earlier one counts no more
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
        self.crew.close("the job is finished")
        self._farewell(Finished(job=self.job, epoch=self.epoch, iteration=done, loss=self.loss))

    def _fail(self, error: Error) -> int:
        """A strike, or the end of the job. No checkpoint: the next start must not believe that something was gained."""
        trace = error.trace if isinstance(error, JobError) else ""
        where = f"iteration {self.iteration.number}" if hasattr(self, "iteration") else "start"
        log.error("failed at %s: %s%s", where, error, f"\n{trace}" if trace else "")
        wrong_job = isinstance(error, JobError | InputError) and self.training is None
        fatal = isinstance(error, NotFinite) or wrong_job
        if self.training is not None:
            self.training.arena.unlink()
        self.crew.close(str(error))
        with contextlib.suppress(Ending):
            self._farewell(Failed(job=self.job, epoch=self.epoch, reason=str(error), fatal=fatal))
        return 1

    def _farewell(self, last: Message) -> None:
        """The coordinator must hear of the end; it hangs up, or says Stop, when it has."""
        self.reporter.must_know(last)
        limit = time.monotonic() + FAREWELL
        heard_by = None
        self.answered = False
        while time.monotonic() < limit and not self.answered:
            if self.reporter.told:
                heard_by = heard_by or time.monotonic() + ANSWER
                if time.monotonic() > heard_by:
                    return
            elif heard_by is not None:
                return  # it had the message and hung up
            self._turn(0.05)

    # -- iterations --

    def _release(self, now: float) -> None:
        if self.barrier_at:
            self.off_device += SMOOTHING * (now - self.barrier_at - self.off_device)
        self.release_at = None
        self.offers.release(now)

    def _barrier(self) -> None:
        assert self.training is not None
        now, before, number = time.monotonic(), self.barrier_at, self.iteration.number
        self.crew.say_all(Barrier(iteration=number, until=now + self.off_device, at=now))
        self.loss = self.training.step(self.iteration.done, self.iteration.depths)
        self.iteration.done = {}
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
        """One that cannot be written, for want of room perhaps, is tried again after a while; training goes on."""
        assert self.training is not None
        self.written_at = time.monotonic()
        try:
            self.losses.sync()
        except OSError as e:
            self.writer.error = spec.first_line(e)
            return
        self.writer.begin(self.training.iteration, self.training.state())

    def _chores(self, now: float) -> None:
        if now >= self.progress_at:
            self.progress_at = now + PROGRESS_SECONDS
            self._progress(now)
        if now >= self.look_at:
            self.look_at = now + 1.0
            if self.writer.error != self.complaint:
                self.complaint = self.writer.error
                log.warning("checkpoint: %s", self.complaint or "written again")
            self.offers.look(now, self.timeout + TASK_GRACE)

    def _progress(self, now: float) -> None:
        assert self.training is not None
        division, depths = self.training.division, self.iteration.depths or self.training.depths()
        number = self.iteration.number
        self.reporter.send(
            Progress(
                job=self.job,
                epoch=self.epoch,
                iteration=self.training.iteration,
                loss=self.loss,
                checkpoint=max(self.writer.done, 0),
                task_seconds=tuple(map(self.iteration.predicted, range(self.spec.workers))) if number >= 0 else (),
                off_device=self.off_device,
                iteration_seconds=self.iteration_seconds,
                depths=tuple(division.shares[d] for d in depths) if division.plan else (),
            )
        )

    # -- what executors say --

    def _joined(self, member: Member) -> None:
        self.offers.joined(member)

    def _heard(self, member: Member, message: Message) -> None:
        if isinstance(message, TaskFailed):
            self._task_failed(member, message)
        else:
            self.offers.heard(member, message)

    def _task_failed(self, member: Member, message: TaskFailed) -> None:
        if not self.iteration.has(member, message):
            return
        where = f"iteration {message.iteration}, worker {message.worker}"
        raise JobError(f"{where}: {' '.join(message.reason.split())}", message.trace)

    def _lost(self, member: Member) -> None:
        self.offers.lost(member)

    # -- what the coordinator says --

    def _told(self, message: Message) -> None:
        if isinstance(message, Refused):
            log.info("start %d leaves: %s", self.epoch, message.reason)
            raise Ending
        if isinstance(message, Stop):
            self.stop(discard=message.discard)

    def stop(self, *, discard: bool = False) -> None:
        self.answered = True
        self.discard |= discard
        if not self.stopping:
            self.stopping, self.stop_by = True, time.monotonic() + STOP_GRACE
            if self.training is not None:
                self.offers.withdraw()

    def _turn(self, timeout: float) -> None:
        """One wait, and what came of it."""
        now = time.monotonic()
        self.reporter.tick(now)
        self.crew.tick(now)
        for key, _ in self.selector.select(timeout):
            call: Callable[[], None] = key.data
            call()


def main(*, home: Path, job: str, epoch: int, coordinator: tuple[str, int], key_file: Path, node: str = "") -> None:
    """Run by an engine in a process of its own. `node`: its machine; executors of another name share no memory."""
    home, key = Path(home), Path(key_file).read_text(encoding="ascii").strip()
    folder = home / "jobs" / job
    handler = ToLog(folder / "log.txt")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    sys.setswitchinterval(0.0005)  # seconds: a claim does not wait for a checkpoint's thread
    coordinator = (str(coordinator[0]), int(coordinator[1]))
    aggregator = Aggregator(home=home, job=job, epoch=epoch, coordinator=coordinator, key=key, node=node)
    signal.signal(signal.SIGTERM, lambda *_: aggregator.stop())
    raise SystemExit(aggregator.run())

"""What executors and aggregators tell the coordinator, and what follows from it."""

from __future__ import annotations

import math
import time

import msgspec

from dovetail.cluster.transport.messages import (
    Beat,
    Described,
    Failed,
    Finished,
    Hello,
    Message,
    Progress,
    RankEnded,
    Revoke,
    Stop,
)

from . import fleet, strikes
from .coordinator import Coordinator
from .job_state import Live, shape_now
from .peers import Link, note

_WORTH_BOOKING = 0.05  # change of duty


class Hearing:
    """`peers.Listener` of a coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator

    def hello(self, hello: Hello, link: Link) -> str:
        reason = self._executor(hello, link) if hello.role == "executor" else self._aggregator(hello, link)
        self._c.kick()
        return reason

    def _executor(self, hello: Hello, link: Link) -> str:
        e = self._c.executors.get(hello.device)
        if e is None:
            return f"there is no device {hello.device}"
        if e.link is not None:
            e.link.close()
        e.welcome(hello, link, time.monotonic())
        return ""

    def _aggregator(self, hello: Hello, link: Link) -> str:
        job = self._c.jobs.get(int(hello.job)) if hello.job.isdigit() else None
        if job is None or hello.epoch != job.epoch or not job.process or job.blamed == job.epoch:
            return f"job {hello.job} is not in epoch {hello.epoch}"
        if job.id in self._c.links:
            self._c.links[job.id].close()
        self._c.links[job.id] = link
        job.address, job.node = hello.address, hello.node
        # Back after this coordinator was restarted: its description is in the store.
        job.linked = job.described is not None and job.described.epoch == job.epoch
        if job.leaving or job.state not in ("preparing", "running"):
            link.send(Stop())
        elif job.linked:
            job.deadline = math.inf
        return ""

    def lost(self, hello: Hello, link: Link) -> None:
        if hello.role == "executor":
            e = self._c.executors[hello.device]
            if e.link is link:
                e.gone(time.monotonic())
            return
        number = int(hello.job)
        if self._c.links.get(number) is link:
            del self._c.links[number]
            job = self._c.jobs.get(number)
            if job is not None and job.epoch == hello.epoch and not job.leaving and job.blamed != job.epoch:
                job.deadline = time.monotonic() + fleet.HELLO_LIMIT

    def heard(self, hello: Hello, link: Link, message: Message) -> None:
        c = self._c
        if isinstance(message, Beat):
            for number, seconds in c.executors[hello.device].beats(message, time.monotonic()).items():
                if number in c.jobs:
                    c.jobs[number].standing.attained += seconds
            return
        job = c.jobs.get(int(getattr(message, "job", "0")))
        if job is None or getattr(message, "epoch", -1) != job.epoch:
            return  # of a job that has ended, or an earlier start
        if isinstance(message, Progress):
            self._progress(job, message)
        elif isinstance(message, Described):
            self._described(job, message)
        elif isinstance(message, Finished):
            job.iteration, job.loss, job.checkpoint = message.iteration, message.loss, message.iteration
            c.end(job, "finished", "")
            link.close()  # it waits for that: the end is on disk
        elif isinstance(message, Failed):
            self._failed(job, message, hello, link)
            if hello.role == "aggregator":
                link.close()
        elif isinstance(message, RankEnded):
            self._rank_ended(job, message)

    def _described(self, job: Live, described: Described) -> None:
        c = self._c
        if job.described is None:
            note(f"job {job.id}: {described.workers} workers, {described.iterations} iterations")
        job.described, job.linked, job.deadline = described, True, math.inf
        job.standing.total = described.iterations
        c.store.note({job.id: {"described": msgspec.json.encode(described).decode()}})
        shape = shape_now(described, job.progress, job.gang, most=c.most)
        if c.floor is not None and c.floor.holds(job):
            if not c.floor.rebook(job, shape):
                c.move(job, "preparing")  # it has grown; the queue finds it room
        else:
            job.standing.shape = shape
        c.kick()

    def _progress(self, job: Live, progress: Progress) -> None:
        c = self._c
        job.progress, job.iteration, job.loss = progress, progress.iteration, progress.loss
        job.standing.done = float(progress.iteration)
        if progress.checkpoint > job.checkpoint:
            job.checkpoint, job.record = progress.checkpoint, strikes.CLEAN
        c.dirty.add(job.id)
        shape = shape_now(job.described, progress, job.gang, most=c.most)
        if c.floor is not None and c.floor.holds(job) and abs(shape.duty - job.shape.duty) > _WORTH_BOOKING:
            fits = c.floor.rebook(job, shape)
            assert fits, "its memory has not changed"
            c.kick()

    def _failed(self, job: Live, failed: Failed, hello: Hello, link: Link) -> None:
        c = self._c
        if failed.fatal:
            c.end(job, "failed", failed.reason)
            return
        if hello.role == "executor":
            link.send(Revoke(job=failed.job, epoch=failed.epoch))  # it is granted anew after the pause
            c.executors[hello.device].granted.pop((job.id, job.epoch), None)
        else:
            job.blamed, job.linked, job.deadline = job.epoch, False, time.monotonic() + 2.0  # it is about to end
        c.strike(job, failed.reason)
        c.kick()

    def _rank_ended(self, job: Live, ended: RankEnded) -> None:
        if not job.sent or (ended.code and self._c.closing):
            return  # we ended it ourselves
        job.codes[ended.worker] = ended.code
        if ended.code:
            last = ended.tail.strip().splitlines()[-1:]
            reason, weight = strikes.death(f"rank {ended.worker}", ended.code)
            self._c.strike(job, f"{reason}: {last[0]}" if last else reason, weight)
            self._c.gang_again(job)
        elif len(job.codes) == job.gang:
            self._c.end(job, "finished", "")

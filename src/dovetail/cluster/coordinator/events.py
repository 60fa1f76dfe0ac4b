"""What the coordinator does with the messages of executors and aggregators."""

from __future__ import annotations

import math
import time

import msgspec

from dovetail.cluster.engines.process import note
from dovetail.cluster.transport.messages import (
    Described,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Progress,
    RankEnded,
    RevokeLease,
    StopJob,
)

from . import executor_state, strikes
from .coordinator import Coordinator
from .job_state import ActiveJob, shape_now
from .peers import Peer

_WORTH_RESIZING = 0.05  # change of duty from which a lease gets the measured shape


class PeerEvents:
    """The coordinator's `peers.Listener`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator

    def hello(self, hello: Hello, peer: Peer) -> str:
        reason = self._executor(hello, peer) if hello.role == "executor" else self._aggregator(hello, peer)
        self._c.decide_soon()
        return reason

    def _executor(self, hello: Hello, peer: Peer) -> str:
        e = self._c.executors.get(hello.device)
        if e is None:
            return f"there is no device {hello.device}"
        if e.peer is not None:
            e.peer.close()
        e.connected(hello, peer, time.monotonic())
        return ""

    def _aggregator(self, hello: Hello, peer: Peer) -> str:
        job = self._c.jobs.get(int(hello.job)) if hello.job.isdigit() else None
        if job is None or hello.attempt != job.attempt or not job.process or job.strike_counted_for == job.attempt:
            return f"job {hello.job} is not in attempt {hello.attempt}"
        if job.id in self._c.peers:
            self._c.peers[job.id].close()
        self._c.peers[job.id] = peer
        job.address, job.node = hello.address, hello.node
        # True where it was described to an earlier coordinator: that description is in the store.
        job.connected = job.described is not None and job.described.attempt == job.attempt
        if job.stopping or job.state not in ("preparing", "running"):
            peer.send(StopJob())
        elif job.connected:
            job.deadline = math.inf
        return ""

    def lost(self, hello: Hello, peer: Peer) -> None:
        if hello.role == "executor":
            e = self._c.executors[hello.device]
            if e.peer is peer:
                e.disconnected(time.monotonic())
            return
        number = int(hello.job)
        if self._c.peers.get(number) is peer:
            del self._c.peers[number]
            job = self._c.jobs.get(number)
            if (
                job is not None
                and job.attempt == hello.attempt
                and not job.stopping
                and job.strike_counted_for != job.attempt
            ):
                job.deadline = time.monotonic() + executor_state.HELLO_LIMIT

    def heard(self, hello: Hello, peer: Peer, message: Message) -> None:
        c = self._c
        if isinstance(message, Heartbeat):
            for number, seconds in c.executors[hello.device].take_heartbeat(message, time.monotonic()).items():
                if number in c.jobs:
                    c.jobs[number].standing.attained += seconds
            return
        job = c.jobs.get(int(getattr(message, "job", "0")))
        if job is None or getattr(message, "attempt", -1) != job.attempt:
            return  # of a job that has ended, or of an earlier attempt
        if isinstance(message, Progress):
            self._progress(job, message)
        elif isinstance(message, Described):
            self._described(job, message)
        elif isinstance(message, Finished):
            job.iteration, job.loss, job.checkpoint = message.iteration, message.loss, message.iteration
            c.end(job, "finished", "")
            peer.close()  # the aggregator waits for that: the end is on disk now
        elif isinstance(message, Failed):
            self._failed(job, message, hello, peer)
            if hello.role == "aggregator":
                peer.close()
        elif isinstance(message, RankEnded):
            self._rank_ended(job, message)

    def _described(self, job: ActiveJob, described: Described) -> None:
        c = self._c
        if c.settings.accelerators:
            described = _evictable(described)
        if job.described is None:
            note(f"job {job.id}: {described.workers} workers, {described.iterations} iterations")
        job.described, job.connected, job.deadline = described, True, math.inf
        job.standing.total = described.iterations
        c.store.note({job.id: {"described": msgspec.json.encode(described).decode()}})
        shape = shape_now(described, job.progress, job.gang, most=c.most)
        if c.placement is not None and c.placement.has_lease(job):
            if not c.placement.resize(job, shape):
                c.move(job, "preparing")  # it needs more memory than its devices have left: placed again
        else:
            job.standing.shape = shape
        c.decide_soon()

    def _progress(self, job: ActiveJob, progress: Progress) -> None:
        c = self._c
        job.progress, job.iteration, job.loss = progress, progress.iteration, progress.loss
        job.standing.done = float(progress.iteration)
        if progress.checkpoint > job.checkpoint:
            job.checkpoint, job.record = progress.checkpoint, strikes.CLEAN
        c.dirty.add(job.id)
        shape = shape_now(job.described, progress, job.gang, most=c.most)
        changed = abs(shape.duty - job.shape.duty) > _WORTH_RESIZING
        if changed and c.placement is not None and c.placement.has_lease(job):
            fits = c.placement.resize(job, shape)
            assert fits, "its memory has not changed"
            c.decide_soon()

    def _failed(self, job: ActiveJob, failed: Failed, hello: Hello, peer: Peer) -> None:
        c = self._c
        if failed.fatal:
            c.end(job, "failed", failed.reason)
            return
        if hello.role == "executor":
            peer.send(RevokeLease(job=failed.job, attempt=failed.attempt))  # it is sent again after the pause
            c.executors[hello.device].leases.pop((job.id, job.attempt), None)
        else:
            # It is about to end by itself, and has its strike then.
            job.strike_counted_for, job.connected, job.deadline = job.attempt, False, time.monotonic() + 2.0
        c.strike(job, failed.reason)
        c.decide_soon()

    def _rank_ended(self, job: ActiveJob, ended: RankEnded) -> None:
        if not job.ranks_started or (ended.code and self._c.closing):
            return  # the coordinator ended it
        job.exit_codes[ended.worker] = ended.code
        if ended.code:
            last = ended.tail.strip().splitlines()[-1:]
            reason, weight = strikes.death(f"rank {ended.worker}", ended.code)
            self._c.strike(job, f"{reason}: {last[0]}" if last else reason, weight)
            self._c.restart_gang(job)
        elif len(job.exit_codes) == job.gang:
            self._c.end(job, "finished", "")


def _evictable(described: Described) -> Described:
    """On an accelerator only the job whose task runs needs its weights there: they are evicted for others' tasks."""
    running = described.persistent_bytes + described.ephemeral_bytes
    return msgspec.structs.replace(described, persistent_bytes=0, ephemeral_bytes=running)

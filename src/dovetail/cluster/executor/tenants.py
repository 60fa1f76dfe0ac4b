"""Who is on a device: jobs that were granted, the connections to their aggregators, and ranks of gangs.

Grants and revocations come from the coordinator, readiness from aggregators, ends of ranks from the kernel; one
selector waits for all of them. What is ready and who may go first is then in `residents` and `ranks`.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.cluster.job.spec import first_line
from dovetail.cluster.output import Log
from dovetail.cluster.transport.messages import (
    Beat,
    Failed,
    Grant,
    Hello,
    Join,
    Leave,
    Message,
    RankEnded,
    Refused,
    Revoke,
    Shutdown,
    StartRank,
)
from dovetail.cluster.transport.wire import Connection, Lost

from .coordinator_link import Link
from .gang import Rank, sweep
from .gaps import Filled
from .recorder import Recorder
from .residents import Live
from .statistics import Tally

STUCK = 1.0
"""Seconds after which an aggregator that does not read counts as lost: nothing we say is long."""


class Tenants:
    """All methods but `hello` and `chores` are the main thread's."""

    def __init__(
        self,
        *,
        home: Path,
        device: int,
        node: str,
        key: str,
        coordinator: tuple[str, int],
        hello: Callable[[tuple[tuple[str, int], ...]], Hello],
        beat: Callable[[], Beat],
        recorder: Recorder,
        tally: Tally,
    ) -> None:
        self.home, self.device, self.node = home, device, node
        self.residents: list[Live] = []
        """In order of rank."""
        self.ranks: dict[tuple[str, int], Rank] = {}
        self.filled = Filled()
        self.refused = ""
        """Why the coordinator does not want this executor."""
        self.closing = False
        """The cluster goes down."""
        self._key, self._hello, self._recorder, self._tally = key, hello, recorder, tally
        self._jobs: dict[str, Live] = {}
        sweep(f"{home}/executors/{device}.")  # what an executor before this one has left, if it was killed
        self._selector = selectors.DefaultSelector()
        self._coordinator: Connection | None = None
        self.link = Link(lambda: coordinator, hello=self.hello, beat=beat, chores=self.chores)
        self._selector.register(self.link, selectors.EVENT_READ, self.link)

    # -- the beating thread's: only reads --

    def hello(self) -> Hello:
        served = [(r.job, r.grant.epoch) for r in list(self.residents)]
        served += [(rank.job, rank.start.epoch) for rank in list(self.ranks.values())]
        return self._hello(tuple(dict.fromkeys(served)))

    def chores(self) -> None:
        self._recorder.flush()
        for log in [*(r.log for r in list(self.residents)), *(r.log for r in list(self.ranks.values()))]:
            if log is not None:
                log.trim()

    # -- listening --

    def listen(self, timeout: float) -> None:
        now = time.monotonic()
        for live in self.residents:
            if live.connection is None and now >= live.retry_at:
                self.speak()  # before whatever may take long, here and below
                self._join(live)
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Live):
                self.read(key.data)
            elif isinstance(key.data, Rank):
                self.speak()
                self._rank_ended(key.data)
            elif isinstance(key.data, Link):
                self._reconnected()
            else:
                self._obey()

    def _reconnected(self) -> None:
        fresh = self.link.take()
        if fresh is not None:
            self._drop_coordinator()
            self._coordinator = fresh
            self._selector.register(fresh, selectors.EVENT_READ, None)

    def _drop_coordinator(self) -> None:
        if self._coordinator is not None:
            self._selector.unregister(self._coordinator)
            self.link.lost(self._coordinator)
            self._coordinator = None

    def _obey(self) -> None:
        """What the coordinator says."""
        if self._coordinator is None:
            return
        try:
            messages = self._coordinator.waiting()
        except Lost:
            self._drop_coordinator()
            return
        self.speak()
        for message in messages:
            if isinstance(message, Grant):
                self._granted(message)
            elif isinstance(message, Revoke):
                self._revoked(message)
            elif isinstance(message, StartRank):
                self._start_rank(message)
            elif isinstance(message, Refused):
                self.refused = message.reason or "no reason given"
            elif isinstance(message, Shutdown):
                self.closing = True

    def read(self, live: Live) -> None:
        """What an aggregator says."""
        if live.connection is None:
            return
        try:
            messages = live.connection.waiting()
        except Lost:
            self.unplug(live)
            return
        now = time.monotonic()
        for message in messages:
            self.hear(live, message, now)

    def hear(self, live: Live, message: Message, now: float) -> None:
        if isinstance(message, Leave):
            self.unplug(live, drop=True)
            live.retry_at = float("inf")
        elif live.connection is not None:
            live.hear(message, now)

    def speak(self) -> None:
        """Says what aggregators are to hear. Whom it wakes may want this core at once: first the next task is ours."""
        for live in self.residents:
            if live.unsaid:
                self._speak(live)

    def _speak(self, live: Live) -> None:
        unsaid, live.unsaid = live.unsaid, []
        if live.connection is not None:
            try:
                live.connection.send(*unsaid, timeout=STUCK)
            except Lost:
                self.unplug(live)

    # -- grants --

    def _granted(self, grant: Grant) -> None:
        live = self._jobs.get(grant.job)
        if live is None:
            try:
                log = Log(Path(grant.folder) / "log.txt")
            except OSError as e:  # a full disk, or a folder that this machine does not see
                reason = f"device {self.device}: {grant.folder}: {first_line(e)}"
                message = Failed(job=grant.job, epoch=grant.epoch, reason=reason)
                self.link.tell(grant.job, ("log", grant.job, grant.epoch), message)
                return
            self._tally.returned(grant.job)
            live = self._jobs[grant.job] = Live(grant, self.device, self.filled, node=self.node)
            live.log = log
            self.residents.append(live)
        elif grant.epoch > live.grant.epoch:
            self.link.settled(grant.job)
            self.unplug(live, drop=True)
            live.regrant(grant)
            live.retry_at = 0.0
        elif grant.epoch == live.grant.epoch:
            live.regrant(grant)
        self.residents.sort(key=lambda r: r.rank)

    def _revoked(self, revoke: Revoke) -> None:
        for rank in [r for r in self.ranks.values() if r.job == revoke.job and r.start.epoch <= revoke.epoch]:
            self._rank_ended(rank)
        live = self._jobs.get(revoke.job)
        if live is not None and live.grant.epoch <= revoke.epoch:
            del self._jobs[revoke.job]
            self.residents.remove(live)
            self._let_go(live)
            self._tally.left(revoke.job)
        if revoke.job not in self._jobs:
            self.link.settled(revoke.job)

    def _let_go(self, live: Live) -> None:
        live.unsaid.append(Leave(reason="the device was taken back"))
        self._speak(live)
        self.unplug(live, drop=True)
        if live.log is not None:
            live.log.trim()
            live.log.close()
        self._recorder.lease(live.job, live.since, time.monotonic())

    def _join(self, live: Live) -> None:
        try:
            connection = Connection.to(live.grant.aggregator, timeout=2.0)
            connection.send(
                Join(key=self._key, job=live.job, epoch=live.grant.epoch, device=self.device, node=self.node)
            )
        except (OSError, Lost):
            live.disconnected(drop=False)
            return
        live.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, live)

    def unplug(self, live: Live, *, drop: bool = False) -> None:
        """The connection is over. What a channel has filled goes with it; shared memory may be joined again."""
        if live.connection is not None:
            self._selector.unregister(live.connection)
            live.connection.close()
        remote = live.welcome is not None and not live.welcome.memory
        live.disconnected(drop=drop or remote)

    # -- gangs --

    def _start_rank(self, start: StartRank) -> None:
        """A rank that runs, or has ended and was reported, is not started twice by a coordinator that forgot."""
        about = ("rank", start.job, start.epoch, start.worker)
        before = self.ranks.get((start.job, start.worker))
        if self.link.told(about) or (before is not None and before.start.epoch >= start.epoch):
            return
        if before is not None:
            self._rank_ended(before)
        self.link.settled(start.job)
        try:
            rank = Rank(start, self.home, self.device, self.filled)
        except (OSError, ValueError) as e:
            message = RankEnded(job=start.job, epoch=start.epoch, worker=start.worker, code=127, tail=first_line(e))
            self.link.tell(start.job, about, message)
            return
        self.ranks[start.job, start.worker] = rank
        self._selector.register(rank.exited, selectors.EVENT_READ, rank)

    def _rank_ended(self, rank: Rank) -> None:
        if self.ranks.get((rank.job, rank.start.worker)) is not rank:
            return  # revoked and ended at the same moment
        del self.ranks[rank.job, rank.start.worker]
        self._selector.unregister(rank.exited)
        message = rank.end()
        self._recorder.lease(rank.job, rank.since, time.monotonic())
        self.link.tell(rank.job, ("rank", rank.job, message.epoch, message.worker), message)

    def close(self) -> None:
        """Everybody leaves."""
        for rank in list(self.ranks.values()):
            self._rank_ended(rank)
        for live in self.residents:
            self._let_go(live)
        self._recorder.close()
        self._drop_coordinator()
        self._selector.close()
        self.link.end()

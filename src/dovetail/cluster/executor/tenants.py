"""All tenants of a device: jobs with a lease, the connections to their aggregators, and ranks of gangs.

The coordinator grants and revokes leases, aggregators offer tasks, the kernel reports ranks that have ended; one
selector waits for all of them. `jobs` (by precedence) and `ranks` hold what may run next.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.cluster.output import Log
from dovetail.cluster.transport.messages import (
    Failed,
    GrantLease,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    RankEnded,
    Refusal,
    RevokeLease,
    Shutdown,
    StartRank,
)
from dovetail.cluster.transport.wire import Connection, Lost
from dovetail.core.errors import typed_line

from .coordinator_link import CoordinatorLink
from .gang import Rank, sweep
from .gaps import LastBackgroundTask
from .recorder import DeviceRecorder
from .statistics import TaskStatistics
from .tenant import Tenant

STUCK = 1.0
"""Seconds after which an aggregator that does not read counts as lost: our messages are short."""


class Tenants:
    """Only the main thread calls its methods, except `hello` and `chores`, which the heartbeat thread calls."""

    def __init__(
        self,
        *,
        home: Path,
        device: int,
        node: str,
        key: str,
        coordinator: tuple[str, int],
        hello: Callable[[tuple[tuple[str, int], ...]], Hello],
        heartbeat: Callable[[], Heartbeat],
        recorder: DeviceRecorder,
        statistics: TaskStatistics,
    ) -> None:
        self.home, self.device, self.node = home, device, node
        self.jobs: list[Tenant] = []
        """The jobs with a lease, in order of priority."""
        self.ranks: dict[tuple[str, int], Rank] = {}
        self.last_background = LastBackgroundTask()
        self.refused = ""
        """The coordinator's reason for refusing this executor."""
        self.closing = False
        """The cluster shuts down."""
        self._key, self._hello, self._recorder, self._statistics = key, hello, recorder, statistics
        self._by_id: dict[str, Tenant] = {}
        sweep(f"{home}/executors/{device}.")  # processes of an earlier executor that was killed
        self._selector = selectors.DefaultSelector()
        self._coordinator: Connection | None = None
        self.link = CoordinatorLink(lambda: coordinator, hello=self.hello, heartbeat=heartbeat, chores=self.chores)
        self._selector.register(self.link, selectors.EVENT_READ, self.link)

    # -- called by the heartbeat thread: only reads --

    def hello(self) -> Hello:
        served = [(tenant.job, tenant.lease.attempt) for tenant in list(self.jobs)]
        served += [(rank.job, rank.start.attempt) for rank in list(self.ranks.values())]
        return self._hello(tuple(dict.fromkeys(served)))

    def chores(self) -> None:
        self._recorder.flush()
        for log in [*(tenant.log for tenant in list(self.jobs)), *(rank.log for rank in list(self.ranks.values()))]:
            if log is not None:
                log.trim()

    # -- listening --

    def listen(self, timeout: float) -> None:
        now = time.monotonic()
        for tenant in self.jobs:
            if tenant.connection is None and now >= tenant.retry_at:
                self.send()  # before anything that may take long, here and below
                self._join(tenant)
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Tenant):
                self.read(key.data)
            elif isinstance(key.data, Rank):
                self.send()
                self._rank_ended(key.data)
            elif isinstance(key.data, CoordinatorLink):
                self._reconnected()
            else:
                self._read_coordinator()

    def _reconnected(self) -> None:
        fresh = self.link.take()
        if fresh is not None:
            self._drop_coordinator()
            self._coordinator = fresh
            self._selector.register(fresh, selectors.EVENT_READ, None)

    def _drop_coordinator(self) -> None:
        if self._coordinator is not None:
            self._selector.unregister(self._coordinator)
            self.link.dropped(self._coordinator)
            self._coordinator = None

    def _read_coordinator(self) -> None:
        """Obeys the coordinator's messages."""
        if self._coordinator is None:
            return
        try:
            messages = self._coordinator.waiting()
        except Lost:
            self._drop_coordinator()
            return
        self.send()
        for message in messages:
            if isinstance(message, GrantLease):
                self._lease_granted(message)
            elif isinstance(message, RevokeLease):
                self._lease_revoked(message)
            elif isinstance(message, StartRank):
                self._start_rank(message)
            elif isinstance(message, Refusal):
                self.refused = message.reason or "no reason given"
            elif isinstance(message, Shutdown):
                self.closing = True

    def read(self, tenant: Tenant) -> None:
        """Handles what has come from an aggregator."""
        if tenant.connection is None:
            return
        try:
            messages = tenant.connection.waiting()
        except Lost:
            self.disconnect(tenant)
            return
        now = time.monotonic()
        for message in messages:
            self.hear(tenant, message, now)

    def hear(self, tenant: Tenant, message: Message, now: float) -> None:
        if isinstance(message, Leave):
            self.disconnect(tenant, drop=True)
            tenant.retry_at = float("inf")
        elif tenant.connection is not None:
            tenant.hear(message, now)

    def send(self) -> None:
        """Sends what is due to aggregators.

        Called after the next task is taken, since an aggregator that wakes up may want this core at once.
        """
        for tenant in self.jobs:
            if tenant.unsent:
                self._send(tenant)

    def _send(self, tenant: Tenant) -> None:
        messages, tenant.unsent = tenant.unsent, []
        if tenant.connection is not None:
            try:
                tenant.connection.send(*messages, timeout=STUCK)
            except Lost:
                self.disconnect(tenant)

    # -- leases --

    def _lease_granted(self, lease: GrantLease) -> None:
        tenant = self._by_id.get(lease.job)
        if tenant is None:
            try:
                log = Log(Path(lease.folder) / "log.txt")
            except OSError as e:  # a full disk, or a folder that this machine does not see
                reason = f"device {self.device}: {lease.folder}: {typed_line(e)}"
                message = Failed(job=lease.job, attempt=lease.attempt, reason=reason)
                self.link.report(lease.job, ("log", lease.job, lease.attempt), message)
                return
            self._statistics.returned(lease.job)
            tenant = self._by_id[lease.job] = Tenant(lease, self.device, self.last_background, node=self.node)
            tenant.log = log
            self.jobs.append(tenant)
        elif lease.attempt > tenant.lease.attempt:
            self.link.settled(lease.job)
            self.disconnect(tenant, drop=True)
            tenant.renew(lease)
            tenant.retry_at = 0.0
        elif lease.attempt == tenant.lease.attempt:
            tenant.renew(lease)
        self.jobs.sort(key=lambda tenant: tenant.precedence)

    def _lease_revoked(self, revoke: RevokeLease) -> None:
        for rank in [r for r in self.ranks.values() if r.job == revoke.job and r.start.attempt <= revoke.attempt]:
            self._rank_ended(rank)
        tenant = self._by_id.get(revoke.job)
        if tenant is not None and tenant.lease.attempt <= revoke.attempt:
            del self._by_id[revoke.job]
            self.jobs.remove(tenant)
            self._remove(tenant)
            self._statistics.removed(revoke.job)
        if revoke.job not in self._by_id:
            self.link.settled(revoke.job)

    def _remove(self, tenant: Tenant) -> None:
        tenant.unsent.append(Leave(reason="the lease was revoked"))
        self._send(tenant)
        self.disconnect(tenant, drop=True)
        if tenant.log is not None:
            tenant.log.trim()
            tenant.log.close()
        self._recorder.lease(tenant.job, tenant.since, time.monotonic())

    def _join(self, tenant: Tenant) -> None:
        try:
            connection = Connection.to(tenant.lease.aggregator, timeout=2.0)
            connection.send(
                Join(key=self._key, job=tenant.job, attempt=tenant.lease.attempt, device=self.device, node=self.node)
            )
        except (OSError, Lost):
            tenant.disconnected(drop=False)
            return
        tenant.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, tenant)

    def disconnect(self, tenant: Tenant, *, drop: bool = False) -> None:
        """Closes the connection. Tensors that came over a channel are dropped; shared memory may be joined again."""
        if tenant.connection is not None:
            self._selector.unregister(tenant.connection)
            tenant.connection.close()
        remote = tenant.welcome is not None and not tenant.welcome.memory
        tenant.disconnected(drop=drop or remote)

    # -- gangs --

    def _start_rank(self, start: StartRank) -> None:
        """Starts a rank, unless it runs or has ended and was reported: a restarted coordinator may ask again."""
        about = ("rank", start.job, start.attempt, start.worker)
        before = self.ranks.get((start.job, start.worker))
        if self.link.pending(about) or (before is not None and before.start.attempt >= start.attempt):
            return
        if before is not None:
            self._rank_ended(before)
        self.link.settled(start.job)
        try:
            rank = Rank(start, self.home, self.device, self.last_background)
        except (OSError, ValueError) as e:
            message = RankEnded(job=start.job, attempt=start.attempt, worker=start.worker, code=127, tail=typed_line(e))
            self.link.report(start.job, about, message)
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
        self.link.report(rank.job, ("rank", rank.job, message.attempt, message.worker), message)

    def close(self) -> None:
        """Ends all leases and ranks."""
        for rank in list(self.ranks.values()):
            self._rank_ended(rank)
        for tenant in self.jobs:
            self._remove(tenant)
        self._recorder.close()
        self._drop_coordinator()
        self._selector.close()
        self.link.end()

"""An executor's connection to the coordinator, kept by a thread of its own.

The thread connects, sends Hello, then a heartbeat twice a second, so that a stuck task cannot silence it. When the
coordinator is lost it reconnects, with growing pauses. The executor's main thread only reads: it is woken when there is
a new connection. Reports that the coordinator must get (a rank has ended, a job cannot be loaded) are kept until the
lease is revoked and sent again on every new connection, since a coordinator that died may not have stored them.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable

from dovetail.cluster.transport.messages import Heartbeat, Hello, Message
from dovetail.cluster.transport.wire import Connection, Lost

INTERVAL = 0.5
"""Seconds between heartbeats."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
_MOST_KEPT = 1000


class CoordinatorLink(threading.Thread):
    """Create it, register it with a selector for reading, then `start` it."""

    def __init__(
        self,
        address: Callable[[], tuple[str, int]],
        *,
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat],
        chores: Callable[[], None],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._address, self._hello, self._heartbeat, self._chores = address, hello, heartbeat, chores
        self._kept: dict[Hashable, tuple[str, Message]] = {}
        self._unsent: list[Message] = []
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._ended = False
        self._connection: Connection | None = None
        self._fresh: Connection | None = None
        self._reading: Connection | None = None
        self._dropped = False
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._pause, self._next_try = FIRST_PAUSE, 0.0

    # -- called by the main thread --

    def fileno(self) -> int:
        """Readable when there is a new connection to `take`."""
        return self._bell.fileno()

    def take(self) -> Connection | None:
        """The connection to read from, if there is a new one since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(64)
        with self._lock:
            fresh, self._fresh = self._fresh, None
        return fresh

    def report(self, job: str, about: Hashable, message: Message) -> None:
        """Sends a report to the coordinator, now and on every new connection, until `settled`."""
        with self._lock:
            while len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[about] = job, message
            self._unsent.append(message)
        self._news.set()

    def pending(self, about: Hashable) -> bool:
        """Whether such a report was made and the coordinator has not acted on it yet."""
        with self._lock:
            return about in self._kept

    def settled(self, job: str) -> None:
        """The coordinator has decided about the job: its reports are dropped."""
        with self._lock:
            for about in [a for a, (whose, _) in self._kept.items() if whose == job]:
                del self._kept[about]

    def dropped(self, reading: Connection) -> None:
        """Tells the thread that the main thread has seen the connection end."""
        reading.close()
        with self._lock:
            self._dropped = reading is self._reading
        self._news.set()

    def end(self) -> None:
        """Ends the thread; a last heartbeat counts the last tasks."""
        self._ended = True
        self._news.set()
        if self.ident is not None:
            self.join(timeout=5.0)
        if not self.is_alive():
            self._bell.close()
            self._ringer.close()

    # -- the thread itself --

    def run(self) -> None:
        due = 0.0
        while not self._ended:
            now = time.monotonic()
            if self._dropped and self._connection is not None:
                self._drop()
            if self._connection is None and now >= self._next_try:
                self._connect()
            if self._connection is not None:
                self._send(heartbeat=now >= due)
            if now >= due:
                due = now + INTERVAL
                self._do_chores()
            wait = due if self._connection is not None else min(due, self._next_try)
            self._news.wait(max(0.0, wait - time.monotonic()))
            self._news.clear()
        if self._connection is not None:
            self._send(heartbeat=True)
            if self._connection is not None:
                self._drop()

    def _connect(self) -> None:
        try:
            connection = Connection.to(self._address(), timeout=2.0)
        except OSError:
            self._later()
            return
        try:
            connection.send(self._hello(), timeout=5.0)
            # Two objects on one socket: each thread has its own time limit.
            reading = Connection(connection.socket.dup())
        except (Lost, OSError):
            connection.close()
            self._later()
            return
        self._pause = FIRST_PAUSE
        with self._lock:
            self._connection = connection
            if self._fresh is not None:
                self._fresh.close()
            self._fresh = self._reading = reading
            self._dropped = False
            self._unsent = [message for _, message in self._kept.values()]
        with contextlib.suppress(BlockingIOError):
            self._ringer.send(b".")

    def _send(self, *, heartbeat: bool) -> None:
        connection = self._connection
        assert connection is not None
        with self._lock:
            messages, self._unsent = self._unsent, []
        try:
            for message in [*messages, *([self._heartbeat()] if heartbeat else [])]:
                connection.send(message, timeout=5.0)
        except (Lost, OSError):
            self._drop()

    def _drop(self) -> None:
        assert self._connection is not None
        _shut(self._connection)  # the reader sees it end too
        self._connection.close()
        self._connection, self._dropped = None, False
        self._later()

    def _later(self) -> None:
        self._next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _do_chores(self) -> None:
        try:
            self._chores()
        except Exception:  # heartbeats must go on
            traceback.print_exc(file=sys.__stderr__)


def _shut(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.socket.shutdown(socket.SHUT_RDWR)

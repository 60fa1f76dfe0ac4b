"""An executor's connection to the coordinator, kept by a thread of its own.

The thread connects, says Hello, and beats twice a second, so that a task that is stuck cannot silence it; when the
coordinator is gone it tries again, more and more rarely. The executor's main thread only reads: it is woken when there
is a new connection. What the coordinator must hear (a rank has ended, a job cannot be loaded) is kept until the job is
revoked and said again on every new connection, since a coordinator that dies may not have written it down.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable

from dovetail.cluster.transport.messages import Beat, Hello, Message
from dovetail.cluster.transport.wire import Connection, Lost

INTERVAL = 0.5
"""Seconds from beat to beat."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
_MOST_KEPT = 1000


class Link(threading.Thread):
    """Make it, register `fileno` for reading, then `start`."""

    def __init__(
        self,
        address: Callable[[], tuple[str, int]],
        *,
        hello: Callable[[], Hello],
        beat: Callable[[], Beat],
        chores: Callable[[], None],
    ) -> None:
        super().__init__(name="beat", daemon=True)
        self._address, self._hello, self._beat, self._chores = address, hello, beat, chores
        self._kept: dict[Hashable, tuple[str, Message]] = {}
        self._unsent: list[Message] = []
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._ended = False
        self._connection: Connection | None = None
        self._fresh: Connection | None = None
        self._reading: Connection | None = None
        self._over = False
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._pause, self._next_try = FIRST_PAUSE, 0.0

    # -- the main thread's side --

    def fileno(self) -> int:
        """Readable when there is a new connection to `take`."""
        return self._bell.fileno()

    def take(self) -> Connection | None:
        """The new connection for reading, if there is one since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(64)
        with self._lock:
            fresh, self._fresh = self._fresh, None
        return fresh

    def tell(self, job: str, about: Hashable, message: Message) -> None:
        """Says it to the coordinator, now and whenever there is a new one, until `settled`."""
        with self._lock:
            while len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[about] = job, message
            self._unsent.append(message)
        self._news.set()

    def told(self, about: Hashable) -> bool:
        """Whether that was said and nothing has come of it yet."""
        with self._lock:
            return about in self._kept

    def settled(self, job: str) -> None:
        """The coordinator has decided about the job: what was said of it is history."""
        with self._lock:
            for about in [a for a, (whose, _) in self._kept.items() if whose == job]:
                del self._kept[about]

    def lost(self, reading: Connection) -> None:
        """The main thread has seen the connection end."""
        reading.close()
        with self._lock:
            self._over = reading is self._reading
        self._news.set()

    def end(self) -> None:
        """Lets the thread finish; a last beat tells of the last tasks."""
        self._ended = True
        self._news.set()
        if self.ident is not None:
            self.join(timeout=5.0)
        if not self.is_alive():
            self._bell.close()
            self._ringer.close()

    # -- the thread's side --

    def run(self) -> None:
        due = 0.0
        while not self._ended:
            now = time.monotonic()
            if self._over and self._connection is not None:
                self._drop()
            if self._connection is None and now >= self._next_try:
                self._connect()
            if self._connection is not None:
                self._speak(beat=now >= due)
            if now >= due:
                due = now + INTERVAL
                self._do_chores()
            wait = due if self._connection is not None else min(due, self._next_try)
            self._news.wait(max(0.0, wait - time.monotonic()))
            self._news.clear()
        if self._connection is not None:
            self._speak(beat=True)
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
            self._over = False
            self._unsent = [message for _, message in self._kept.values()]
        with contextlib.suppress(BlockingIOError):
            self._ringer.send(b".")

    def _speak(self, *, beat: bool) -> None:
        connection = self._connection
        assert connection is not None
        with self._lock:
            messages, self._unsent = self._unsent, []
        try:
            for message in [*messages, *([self._beat()] if beat else [])]:
                connection.send(message, timeout=5.0)
        except (Lost, OSError):
            self._drop()

    def _drop(self) -> None:
        assert self._connection is not None
        _shut(self._connection)  # the reader sees it end too
        self._connection.close()
        self._connection, self._over = None, False
        self._later()

    def _later(self) -> None:
        self._next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _do_chores(self) -> None:
        try:
            self._chores()
        except Exception:  # beating must go on
            traceback.print_exc(file=sys.__stderr__)


def _shut(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.socket.shutdown(socket.SHUT_RDWR)

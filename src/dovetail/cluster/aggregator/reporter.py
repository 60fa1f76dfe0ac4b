"""An aggregator's connection to the coordinator. Training never waits for it: while it is lost, messages are dropped.

Connecting does not block either; it is tried again with growing pauses. What the coordinator must know is sent again on
every connection: which job and attempt this is, what the job asks for, and how it ended if it has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable

from dovetail.cluster.transport.messages import Hello, Message
from dovetail.cluster.transport.wire import Connection, Lost

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
CONNECTING = 3.0
"""Seconds that connecting may take."""
Handler = Callable[[], None]


class Reporter:
    """The connection. Its socket is in the aggregator's selector, with the function to call as data."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: tuple[str, int],
        hello: Hello,
        heard: Callable[[Message], None],
    ) -> None:
        self._selector, self._address, self._hello, self._heard = selector, address, hello, heard
        self._connection: Connection | None = None
        self._connecting: socket.socket | None = None
        self._deadline = 0.0
        self._pause, self.next_try = FIRST_PAUSE, 0.0
        self.standing: list[Message] = []
        """Messages that are sent after Hello on every connection."""
        self.sent = 0
        """Number of `standing` messages that were sent on this connection."""

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def caught_up(self) -> bool:
        """Whether everything that the coordinator must know has been sent."""
        return self.connected and self.sent == len(self.standing)

    def must_know(self, message: Message) -> None:
        self.standing.append(message)
        self._catch_up()

    def send(self, message: Message) -> None:
        """Sends a message if there is a connection."""
        if self._connection is not None:
            try:
                self._connection.send(message, timeout=2.0)
            except Lost:
                self._drop()

    def tick(self, now: float) -> None:
        """Called often: starts a connection, or gives up one that takes too long."""
        if self._connecting is not None and now > self._deadline:
            self._give_up()
        if self._connection is None and self._connecting is None and now >= self.next_try:
            self._begin(now)

    def close(self) -> None:
        if self._connecting is not None:
            self._give_up()
        if self._connection is not None:
            self._drop()

    def _begin(self, now: float) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        pending = socket.socket(family, socket.SOCK_STREAM)
        pending.setblocking(False)
        self._connecting, self._deadline = pending, now + CONNECTING
        code = pending.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            self._later()
            pending.close()
            self._connecting = None
            return
        self._selector.register(pending, selectors.EVENT_WRITE, self._finish)

    def _finish(self) -> None:
        pending = self._connecting
        if pending is None:  # given up since it was seen ready
            return
        code = pending.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._give_up()
            return
        self._selector.unregister(pending)
        self._connecting, self._connection = None, Connection(pending)
        self._selector.register(self._connection, selectors.EVENT_READ, self._read)
        self._pause, self.sent = FIRST_PAUSE, 0
        self.send(self._hello)
        self._catch_up()

    def _catch_up(self) -> None:
        while self.sent < len(self.standing) and self._connection is not None:
            self.sent += 1
            self.send(self.standing[self.sent - 1])

    def _read(self) -> None:
        if self._connection is None:
            return
        try:
            messages = self._connection.waiting()
        except Lost:
            self._drop()
            return
        for message in messages:
            self._heard(message)

    def _drop(self) -> None:
        assert self._connection is not None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._connection)
        self._connection.close()
        self._connection, self.sent = None, 0
        self._later()

    def _give_up(self) -> None:
        assert self._connecting is not None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._connecting)
        self._connecting.close()
        self._connecting = None
        self._later()

    def _later(self) -> None:
        self.next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def local_host(towards: tuple[str, int]) -> str:
    """This machine's address in the coordinator's network, on which to listen for executors."""
    family = socket.AF_INET6 if ":" in towards[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # sends nothing: only looks up the route
        try:
            sock.connect(towards)
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def hello_of(*, key: str, job: str, attempt: int, node: str, address: tuple[str, int]) -> Hello:
    return Hello(key=key, role="aggregator", pid=os.getpid(), node=node, job=job, attempt=attempt, address=address)

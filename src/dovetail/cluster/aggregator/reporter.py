"""An aggregator's connection to the coordinator. Training never waits for it: while it is away, news are dropped.

Connecting does not block either; it is tried again, more and more rarely. Whatever the coordinator must know is said
anew on every connection: who we are, what the job asks for, and how it ended if it has.
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
"""Seconds that an attempt may take."""
Handler = Callable[[], None]


class Reporter:
    """Lives in the aggregator's select loop: registered sockets carry a function to call as their data."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: tuple[str, int],
        hello: Hello,
        heard: Callable[[Message], None],
    ) -> None:
        self._selector, self._address, self._hello, self._heard = selector, address, hello, heard
        self._connection: Connection | None = None
        self._attempt: socket.socket | None = None
        self._deadline = 0.0
        self._pause, self.next_try = FIRST_PAUSE, 0.0
        self.standing: list[Message] = []
        """Said after Hello on every connection."""
        self.sent = 0
        """Of `standing`, on this connection."""

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def told(self) -> bool:
        """Whether the coordinator has been sent everything that it must know."""
        return self.connected and self.sent == len(self.standing)

    def must_know(self, message: Message) -> None:
        self.standing.append(message)
        self._catch_up()

    def send(self, message: Message) -> None:
        """If it is there."""
        if self._connection is not None:
            try:
                self._connection.send(message, timeout=2.0)
            except Lost:
                self._drop()

    def tick(self, now: float) -> None:
        """Called often: begins and gives up attempts."""
        if self._attempt is not None and now > self._deadline:
            self._give_up()
        if self._connection is None and self._attempt is None and now >= self.next_try:
            self._begin(now)

    def close(self) -> None:
        if self._attempt is not None:
            self._give_up()
        if self._connection is not None:
            self._drop()

    def _begin(self, now: float) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        attempt = socket.socket(family, socket.SOCK_STREAM)
        attempt.setblocking(False)
        self._attempt, self._deadline = attempt, now + CONNECTING
        code = attempt.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            self._later()
            attempt.close()
            self._attempt = None
            return
        self._selector.register(attempt, selectors.EVENT_WRITE, self._finish)

    def _finish(self) -> None:
        attempt = self._attempt
        if attempt is None:  # given up since it was seen ready
            return
        code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._give_up()
            return
        self._selector.unregister(attempt)
        self._attempt, self._connection = None, Connection(attempt)
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
        assert self._attempt is not None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._attempt)
        self._attempt.close()
        self._attempt = None
        self._later()

    def _later(self) -> None:
        self.next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def local_host(towards: tuple[str, int]) -> str:
    """This machine's address as seen from there: where to listen for those who are there too."""
    family = socket.AF_INET6 if ":" in towards[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # sends nothing: only asks for the way
        try:
            sock.connect(towards)
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def hello_of(*, key: str, job: str, epoch: int, node: str, address: tuple[str, int]) -> Hello:
    return Hello(key=key, role="aggregator", pid=os.getpid(), node=node, job=job, epoch=epoch, address=address)

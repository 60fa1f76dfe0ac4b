"""The members of a job: the executors that serve it, as its aggregator sees them. They join, get messages, are lost."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dovetail.cluster.transport import wire
from dovetail.cluster.transport.messages import Join, Leave, Message, Task, Welcome
from dovetail.cluster.transport.wire import Connection, Lost

if TYPE_CHECKING:
    from dovetail.cluster.job.arena import Arena
    from dovetail.cluster.job.tensor_channel import ChannelHost, ChannelPeer

JOINING = 10.0
"""Seconds in which a new connection has to send Join."""
STUCK = 1.0
"""Seconds after which an executor that does not read counts as lost: our messages are short."""


@dataclass(eq=False)
class Member:
    """One executor, or a connection that has not sent Join yet (device -1)."""

    connection: Connection
    since: float
    device: int = -1
    peer: ChannelPeer | None = None
    """The tensor channel to an executor on another machine."""
    has: int = -1
    """The iteration whose parameters it has got over the channel."""
    taken: Future[None] | None = None
    """The gradients that it will send over the channel."""


class Members:
    """All members. Its sockets are in the aggregator's select loop, each with a function to call as its data."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host: str,
        *,
        key: str,
        job: str,
        attempt: int,
        node: str,
        joined: Callable[[Member], None],
        heard: Callable[[Member, Message], None],
        lost: Callable[[Member], None],
    ) -> None:
        self._selector, self._key, self._job, self._attempt, self._node = selector, key, job, attempt, node
        self._joined, self._heard, self._lost = joined, heard, lost
        self.connected: list[Member] = []
        self._host: ChannelHost | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self.arena: Arena | None = None

    def open(self, arena: Arena) -> None:
        """Lets executors join; those that connected earlier have been waiting."""
        self.arena = arena
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def joined(self) -> list[Member]:
        return [member for member in self.connected if member.device >= 0]

    def send(self, member: Member, *messages: Message) -> bool:
        """False if the member turned out to be lost."""
        if self._delivers(member, b"".join(map(wire.encode, messages))):
            return True
        self.drop(member)
        return False

    def send_all(self, *messages: Message) -> None:
        """Connections that failed while sending are dropped only after every member got the messages, so that news of
        the loss cannot overtake them.
        """
        encoded = b"".join(map(wire.encode, messages))
        for member in [member for member in self.joined if not self._delivers(member, encoded)]:
            self.drop(member)

    def drop(self, member: Member) -> None:
        if member not in self.connected:
            return
        self.connected.remove(member)
        self._hang_up(member)
        if member.device >= 0:
            self._lost(member)

    def _hang_up(self, member: Member) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.connection)
        member.connection.close()
        if member.peer is not None:
            member.peer.close()

    def tick(self, now: float) -> None:
        for member in [m for m in self.connected if m.device < 0 and now - m.since > JOINING]:
            self.drop(member)

    def close(self, reason: str) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()
        members, self.connected = self.connected, []  # none of them counts as lost
        for member in members:
            self.send(member, Leave(reason=reason))
            self._hang_up(member)

    # -- tensors of executors on other machines --

    def prepare(self, member: Member, task: Task) -> Task:
        """Starts to send the parameters if the member's are old, and asks for the gradients."""
        if member.peer is None:
            return task
        assert self.arena is not None
        fresh = member.has != task.iteration
        if fresh:
            member.peer.give(self.arena.outgoing())
            member.has = task.iteration
        member.taken = member.peer.take(self.arena.incoming(task.worker))
        return msgspec.structs.replace(task, fresh=fresh)

    def collect(self, member: Member, worker: int) -> bool:
        """After Done: puts the gradients into the arena. False if the member is lost."""
        if member.peer is None:
            return True
        assert self.arena is not None and member.taken is not None
        try:
            member.peer.fetch(member.taken, self.arena.incoming(worker))
        except Lost:
            self.drop(member)
            return False
        return True

    # -- sockets --

    def _delivers(self, member: Member, encoded: bytes) -> bool:
        try:
            member.connection.send_encoded(encoded, timeout=STUCK)
        except Lost:
            return False
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        member = Member(Connection(sock), time.monotonic())
        self.connected.append(member)
        self._selector.register(member.connection, selectors.EVENT_READ, lambda: self._read(member))

    def _read(self, member: Member) -> None:
        try:
            messages = member.connection.waiting()
        except Lost:
            self.drop(member)
            return
        for message in messages:
            if member not in self.connected:
                return
            if member.device < 0:
                self._first(member, message)
            elif isinstance(message, Leave):
                self.drop(member)
            else:
                self._heard(member, message)

    def _first(self, member: Member, message: Message) -> None:
        if not isinstance(message, Join) or not hmac.compare_digest(message.key.encode(), self._key.encode()):
            self._refuse(member, "expected a Join with the cluster's key")
        elif (message.job, message.attempt) != (self._job, self._attempt):
            self._refuse(member, f"this is job {self._job}, attempt {self._attempt}")
        else:
            for old in [m for m in self.joined if m.device == message.device]:
                self.drop(old)  # it has reconnected before we noticed that it was lost
            welcome = self._welcome(member, message)
            member.device = message.device
            if self.send(member, welcome):
                self._joined(member)

    def _welcome(self, member: Member, join: Join) -> Welcome:
        assert self.arena is not None
        if not self._node or not join.node or join.node == self._node:
            return Welcome(memory=self.arena.name)
        from dovetail.cluster.job.tensor_channel import ChannelHost

        if self._host is None:
            self._host = ChannelHost(self.address[0])
        member.peer = self._host.invite(join.device)
        header = self.arena.described
        return Welcome(memory="", store=self._host.address, channel=member.peer.name, header=header)

    def _refuse(self, member: Member, reason: str) -> None:
        if self.send(member, Leave(reason=reason)):
            self.drop(member)

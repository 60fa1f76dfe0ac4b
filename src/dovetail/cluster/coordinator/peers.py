"""Connections of executors and aggregators to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import traceback
from typing import Protocol

from dovetail.cluster.engines.process import note
from dovetail.cluster.transport import wire
from dovetail.cluster.transport.messages import Hello, Message, Refusal

_MOST_UNREAD = 4 << 20  # bytes that a peer may leave unread before its connection is closed
_HELLO_LIMIT = 10.0  # seconds from a connection to its Hello


class Peer:
    """The coordinator's side of one connection. Sending never waits."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    @property
    def host(self) -> str:
        """The other side's address."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    def send(self, message: Message) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(wire.encode(message))
        if self._writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            self.close()

    def close(self) -> None:
        self._writer.close()


class Listener(Protocol):
    """Receives what peers send. `hello` is the first message of the connection, `peer` its sending side."""

    def hello(self, hello: Hello, peer: Peer) -> str:
        """Called once for each connection with the right key; the reason to refuse it, empty to accept."""
        ...

    def heard(self, hello: Hello, peer: Peer, message: Message) -> None:
        """Called for every later message of an accepted connection."""
        ...

    def lost(self, hello: Hello, peer: Peer) -> None:
        """Called once when an accepted connection has ended, whichever side closed it."""
        ...


async def serve(sock: socket.socket, key: str, listener: Listener) -> asyncio.Server:
    """Accepts connections of peers that know the cluster's key."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        try:
            await _converse(reader, peer, key, listener)
        except (wire.Lost, TimeoutError, asyncio.CancelledError):
            pass
        except Exception:  # a message that fails must not end the coordinator; the peer will connect again
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    return await asyncio.start_server(accepted, sock=sock)


async def _converse(reader: asyncio.StreamReader, peer: Peer, key: str, listener: Listener) -> None:
    hello = await asyncio.wait_for(wire.read(reader), _HELLO_LIMIT)
    if not isinstance(hello, Hello) or not hmac.compare_digest(hello.key.encode(), key.encode()):
        peer.send(Refusal(reason="wrong key"))
        return
    reason = listener.hello(hello, peer)
    if reason:
        note(f"refused {hello.role} {hello.device if hello.role == 'executor' else hello.job}: {reason}")
        peer.send(Refusal(reason=reason))
        return
    try:
        while True:
            listener.heard(hello, peer, await wire.read(reader))
    finally:
        listener.lost(hello, peer)

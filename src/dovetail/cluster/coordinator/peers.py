"""Connections of executors and aggregators to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import sys
import time
import traceback
from typing import Protocol

from dovetail.cluster.transport import wire
from dovetail.cluster.transport.messages import Hello, Message, Refused

_MOST_WAITING = 4 << 20  # bytes that a peer may leave unread before it is taken for stuck
_FIRST_WORD = 10.0  # seconds


class Link:
    """The coordinator's side of one connection: says, and never waits."""

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
        if self._writer.transport.get_write_buffer_size() > _MOST_WAITING:
            self.close()

    def close(self) -> None:
        self._writer.close()


class Listener(Protocol):
    """Who hears what peers say. `peer` is what `hello` gave for the connection."""

    def hello(self, hello: Hello, link: Link) -> str:
        """Empty if welcome, else the reason why not."""
        ...

    def heard(self, hello: Hello, link: Link, message: Message) -> None: ...

    def lost(self, hello: Hello, link: Link) -> None: ...


async def serve(sock: socket.socket, key: str, listener: Listener) -> asyncio.Server:
    """Listens for peers; each has to know the key."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(writer)
        try:
            await _converse(reader, link, key, listener)
        except (wire.Lost, TimeoutError, asyncio.CancelledError):
            pass
        except Exception:  # a peer that we do not understand must not end the others' coordinator; it will come again
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    return await asyncio.start_server(accepted, sock=sock)


async def _converse(reader: asyncio.StreamReader, link: Link, key: str, listener: Listener) -> None:
    hello = await asyncio.wait_for(wire.read(reader), _FIRST_WORD)
    if not isinstance(hello, Hello) or not hmac.compare_digest(hello.key.encode(), key.encode()):
        link.send(Refused(reason="wrong key"))
        return
    reason = listener.hello(hello, link)
    if reason:
        note(f"refused {hello.role} {hello.device if hello.role == 'executor' else hello.job}: {reason}")
        link.send(Refused(reason=reason))
        return
    try:
        while True:
            listener.heard(hello, link, await wire.read(reader))
    finally:
        listener.lost(hello, link)


def note(line: str) -> None:
    """Into the coordinator's log."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {' '.join(line.split())}", file=sys.stderr, flush=True)

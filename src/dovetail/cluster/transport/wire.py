"""Messages on a TCP or Unix connection: four bytes of length, then MessagePack. One round trip takes about 40 µs."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time

import msgspec

from .messages import AnyMessage, Message

_LENGTH = struct.Struct("!I")
MOST_BYTES = 1 << 20
"""Most bytes of a message. Real ones are far smaller: more is a foreign peer or a bug."""
_MOST_READ = 1 << 13  # bytes
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)


class Lost(ConnectionError):
    """The connection is lost, or the other side does not speak our protocol."""


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MOST_BYTES, "tensors do not travel as messages"
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as e:
        raise Lost(f"invalid message: {e}") from None


class Connection:
    """A connection that sends and receives messages with time limits; selectors accept it.

    The socket never blocks: what can be sent or read at once, which is nearly always so, takes one system call.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._received: list[Message] = []
        self._rest = b""  # the beginning of a message that has not arrived completely
        self._invalid = ""  # set by an invalid message, after which nothing can be decoded

    @classmethod
    def to(cls, address: tuple[str, int], *, timeout: float = 10.0) -> Connection:
        sock = socket.create_connection(address, timeout=timeout)
        return cls(sock)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, *messages: Message, timeout: float = 30.0) -> None:
        """Returns when the kernel has taken the messages. A peer that does not read for `timeout` seconds is lost."""
        self.send_encoded(b"".join(map(encode, messages)), timeout=timeout)

    def send_encoded(self, data: bytes, *, timeout: float) -> None:
        deadline = 0.0
        try:
            while True:
                try:
                    sent = self.socket.send(data)
                except BlockingIOError:
                    sent = 0
                if sent == len(data):
                    return
                data = data[sent:]
                deadline = deadline or time.monotonic() + timeout
                if not self._wait(select.POLLOUT, deadline):
                    raise Lost(f"the other side has not read for {timeout:g} s")
        except Lost:
            raise
        except OSError as e:
            raise Lost(str(e)) from None

    def receive(self, *, timeout: float) -> Message | None:
        """The next message; None if none arrives within `timeout` seconds."""
        deadline = 0.0
        while not self._received:
            if self._read():
                continue
            if timeout <= 0:
                return None
            deadline = deadline or time.monotonic() + timeout
            if not self._wait(select.POLLIN, deadline):
                return None
        return self._received.pop(0)

    def waiting(self) -> list[Message]:
        """All messages that have arrived, without waiting. `Lost` is raised only after the last one was returned."""
        try:
            while self._read() == _MOST_READ:
                pass
        except Lost:
            if not self._received:
                raise
        received, self._received = self._received, []
        return received

    def _read(self) -> int:
        """Reads what has arrived, up to a limit. Returns the number of bytes."""
        if self._invalid:
            raise Lost(self._invalid)
        try:
            data = self.socket.recv(_MOST_READ)
        except BlockingIOError:
            return 0
        except OSError as e:
            raise Lost(str(e)) from None
        if not data:
            raise Lost("closed by the other side")
        try:
            self._decode(data)
        except Lost as e:
            self._invalid = str(e)
            raise
        return len(data)

    def _decode(self, data: bytes) -> None:
        whole = self._rest + data if self._rest else data
        at, view = 0, memoryview(whole)
        while len(whole) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(whole, at)
            if size > MOST_BYTES:
                raise Lost(f"a message of {size} bytes")
            stop = at + _LENGTH.size + size
            if len(whole) < stop:
                break
            self._received.append(decode(view[at + _LENGTH.size : stop]))
            at = stop
        self._rest = whole[at:]

    def _wait(self, event: int, deadline: float) -> bool:
        """Waits for the event; False if the deadline passes first."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        poll = select.poll()
        try:
            poll.register(self.socket, event)
            return bool(poll.poll(left * 1e3))
        except (OSError, ValueError) as e:  # another thread has closed it
            raise Lost(str(e)) from None


async def read(reader: asyncio.StreamReader) -> Message:
    """Reads one message from an asyncio stream, as the coordinator does."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST_BYTES:
            raise Lost(f"a message of {size} bytes")
        return decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError) as e:
        raise Lost(str(e)) from None

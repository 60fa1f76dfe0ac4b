"""Messages on a TCP or Unix connection: four bytes of length, then MessagePack. One round trip is about 40 µs."""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec

from .messages import AnyMessage, Message

_LENGTH = struct.Struct("!I")
MOST_BYTES = 1 << 20
"""No message comes near it: more is a stranger or a mistake."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)


class Lost(ConnectionError):
    """The other side is gone, or does not speak our language."""


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MOST_BYTES, "tensors do not travel as messages"
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as e:
        raise Lost(f"a message that makes no sense: {e}") from None


class Connection:
    """A blocking connection for the task path: `send`, and `receive` with a time limit; selectable by `fileno`."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()

    @classmethod
    def to(cls, address: tuple[str, int], *, timeout: float = 10.0) -> Connection:
        sock = socket.create_connection(address, timeout=timeout)
        return cls(sock)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, message: Message, *, timeout: float = 30.0) -> None:
        """Returns when the kernel has it. A peer that does not read for `timeout` seconds is lost."""
        self.socket.settimeout(timeout)
        try:
            self.socket.sendall(encode(message))
        except OSError as e:
            raise Lost(str(e)) from None

    def receive(self, *, timeout: float) -> Message | None:
        """The next message, None if none came in time."""
        while True:
            message = self._take()
            if message is not None:
                return message
            self.socket.settimeout(max(timeout, 0.0))  # 0 does not wait; the least that does is a millisecond
            try:
                data = self.socket.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as e:
                raise Lost(str(e)) from None
            if not data:
                raise Lost("closed by the other side")
            self._buffer += data

    def waiting(self) -> list[Message]:
        """Everything that has arrived, without waiting for more. The last words of one who is gone are heard first."""
        found: list[Message] = []
        try:
            while (message := self.receive(timeout=0)) is not None:
                found.append(message)
        except Lost:
            if not found:
                raise
        return found

    def _take(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > MOST_BYTES:
            raise Lost(f"a message of {size} bytes")
        stop = _LENGTH.size + size
        if len(self._buffer) < stop:
            return None
        body = bytes(self._buffer[_LENGTH.size : stop])
        del self._buffer[:stop]
        return decode(body)


async def read(reader: asyncio.StreamReader) -> Message:
    """The coordinator's side, which is not on any task's path."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST_BYTES:
            raise Lost(f"a message of {size} bytes")
        return decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError) as e:
        raise Lost(str(e)) from None

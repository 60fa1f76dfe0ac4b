"""Messages on a TCP or Unix connection: four bytes of length, then MessagePack. One round trip is about 40 µs."""

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
"""No message comes near it: more is a stranger or a mistake."""
_MOST_READ = 1 << 13  # bytes
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)


class Lost(ConnectionError):
    """The other side is gone, or does not speak our language."""


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MOST_BYTES, "tensors do not travel as messages"
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | memoryview) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as e:
        raise Lost(f"a message that makes no sense: {e}") from None


class Connection:
    """A connection for the task path: `send`, and `receive` with a time limit; selectable by `fileno`.

    The socket never blocks: what can be sent or read at once, which is nearly always so, takes one call of the kernel.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._heard: list[Message] = []
        self._rest = b""  # of a message that has not come as a whole
        self._nonsense = ""  # nothing that comes behind it is understood

    @classmethod
    def to(cls, address: tuple[str, int], *, timeout: float = 10.0) -> Connection:
        sock = socket.create_connection(address, timeout=timeout)
        return cls(sock)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, *messages: Message, timeout: float = 30.0) -> None:
        """Returns when the kernel has them. A peer that does not read for `timeout` seconds is lost."""
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
                    raise Lost(f"does not read for {timeout:g} s")
        except Lost:
            raise
        except OSError as e:
            raise Lost(str(e)) from None

    def receive(self, *, timeout: float) -> Message | None:
        """The next message, None if none came in time."""
        deadline = 0.0
        while not self._heard:
            if self._read():
                continue
            if timeout <= 0:
                return None
            deadline = deadline or time.monotonic() + timeout
            if not self._wait(select.POLLIN, deadline):
                return None
        return self._heard.pop(0)

    def waiting(self) -> list[Message]:
        """Everything that has arrived, without waiting for more. The last words of one who is gone are heard first."""
        try:
            while self._read() == _MOST_READ:
                pass
        except Lost:
            if not self._heard:
                raise
        heard, self._heard = self._heard, []
        return heard

    def _read(self) -> int:
        """Takes in what has come, up to a limit: how many bytes that was."""
        if self._nonsense:
            raise Lost(self._nonsense)
        try:
            data = self.socket.recv(_MOST_READ)
        except BlockingIOError:
            return 0
        except OSError as e:
            raise Lost(str(e)) from None
        if not data:
            raise Lost("closed by the other side")
        try:
            self._understand(data)
        except Lost as e:
            self._nonsense = str(e)
            raise
        return len(data)

    def _understand(self, data: bytes) -> None:
        whole = self._rest + data if self._rest else data
        at, view = 0, memoryview(whole)
        while len(whole) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(whole, at)
            if size > MOST_BYTES:
                raise Lost(f"a message of {size} bytes")
            stop = at + _LENGTH.size + size
            if len(whole) < stop:
                break
            self._heard.append(decode(view[at + _LENGTH.size : stop]))
            at = stop
        self._rest = whole[at:]

    def _wait(self, event: int, deadline: float) -> bool:
        """Whether it can go on before the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        poll = select.poll()
        try:
            poll.register(self.socket, event)
            return bool(poll.poll(left * 1e3))
        except (OSError, ValueError) as e:  # closed meanwhile, by another thread
            raise Lost(str(e)) from None


async def read(reader: asyncio.StreamReader) -> Message:
    """The coordinator's side, which is not on any task's path."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST_BYTES:
            raise Lost(f"a message of {size} bytes")
        return decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError) as e:
        raise Lost(str(e)) from None

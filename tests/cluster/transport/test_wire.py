"""Connections: whole messages in whatever pieces they arrive, and an end to every wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dovetail.cluster.transport.messages import Claim, Leave, Message
from dovetail.cluster.transport.wire import Connection, Lost, encode

LIMIT = 300.0
"""Seconds after which a test counts as hanging."""
Pair = tuple[Connection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Connection(ours), theirs


def test_messages_are_whole_however_they_arrive(pair: Pair) -> None:
    connection, other = pair
    said = [Claim(iteration=i) for i in range(5)]
    data = b"".join(map(encode, said))
    for i in range(0, len(data), 3):
        assert connection.waiting() == [] or i > 0
        other.sendall(data[i : i + 3])
        if message := connection.receive(timeout=0):
            assert message == said.pop(0)
    assert connection.waiting() == said
    assert connection.receive(timeout=0.01) is None


def test_messages_beyond_one_read_are_returned_together(pair: Pair) -> None:
    connection, other = pair
    said = [Leave(reason="x" * 1000)] * 150  # more than 64 KiB
    writer = threading.Thread(target=other.sendall, args=(b"".join(map(encode, said)),))
    writer.start()
    heard: list[Message] = []
    while len(heard) < len(said):
        message = connection.receive(timeout=LIMIT)
        assert message is not None
        heard += [message, *connection.waiting()]
    writer.join()
    assert heard == said


def test_last_messages_are_returned_before_the_connection_counts_as_lost(pair: Pair) -> None:
    connection, other = pair
    other.sendall(encode(Claim(iteration=1)) + encode(Claim(iteration=2)))
    assert connection.receive(timeout=LIMIT) == Claim(iteration=1)  # the other one has been read too
    other.close()
    assert connection.waiting() == [Claim(iteration=2)]
    with pytest.raises(Lost):
        connection.waiting()
    with pytest.raises(Lost):
        connection.send(Claim(iteration=3))


def test_a_peer_is_lost_for_good_after_an_invalid_message_but_earlier_ones_are_returned(pair: Pair) -> None:
    connection, other = pair
    other.sendall(encode(Claim(iteration=1)) + b"\0\0\0\1x" + encode(Claim(iteration=2)))
    assert connection.waiting() == [Claim(iteration=1)]
    for _ in range(2):
        other.sendall(encode(Claim(iteration=3)))
        with pytest.raises(Lost, match="invalid message"):
            connection.waiting()
    too_long = Connection(socket.socket(fileno=other.detach()))
    connection.socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(Lost, match="a message of 4294967295 bytes"):
        too_long.receive(timeout=LIMIT)
    too_long.close()


LONG = Leave(reason="x" * 900_000)
"""More than the kernel keeps for a pair."""


def test_a_peer_that_does_not_read_is_lost_in_time(pair: Pair) -> None:
    began = time.monotonic()
    with pytest.raises(Lost, match=r"has not read for 0\.2 s"):
        pair[0].send(LONG, timeout=0.2)
    assert time.monotonic() - began >= 0.2


def test_a_peer_that_is_slow_is_not_lost(pair: Pair) -> None:
    heard: list[object] = []
    thread = threading.Thread(target=lambda: heard.append(Connection(pair[1]).receive(timeout=LIMIT)))
    thread.start()
    pair[0].send(LONG, timeout=LIMIT)
    thread.join()
    assert heard == [LONG]

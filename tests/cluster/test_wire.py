"""Connections of the task path: whole messages whatever the pieces, and an end to every wait."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from dovetail.cluster.messages import Claim, Leave
from dovetail.cluster.wire import Connection, Lost, encode


def pair() -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair()
    return Connection(ours), theirs


def test_messages_are_whole_however_they_arrive() -> None:
    connection, other = pair()
    said = [Claim(iteration=i) for i in range(5)]
    data = b"".join(map(encode, said))
    for i in range(0, len(data), 3):
        assert connection.waiting() == [] or i > 0
        other.sendall(data[i : i + 3])
        if message := connection.receive(timeout=0):
            assert message == said.pop(0)
    assert connection.waiting() == said
    assert connection.receive(timeout=0.01) is None


def test_more_than_one_read_takes_is_heard_at_once() -> None:
    connection, other = pair()
    said = [Leave(reason="x" * 1000)] * 150  # more than 64 KiB
    writer = threading.Thread(target=other.sendall, args=(b"".join(map(encode, said)),))
    writer.start()
    heard = []
    while len(heard) < len(said):
        message = connection.receive(timeout=5)
        assert message is not None
        heard += [message, *connection.waiting()]
    writer.join()
    assert heard == said


def test_last_words_are_heard_before_the_end() -> None:
    connection, other = pair()
    other.sendall(encode(Claim(iteration=1)) + encode(Claim(iteration=2)))
    assert connection.receive(timeout=1) == Claim(iteration=1)  # the other one has been read too
    other.close()
    assert connection.waiting() == [Claim(iteration=2)]
    with pytest.raises(Lost):
        connection.waiting()
    with pytest.raises(Lost):
        connection.send(Claim(iteration=3))


def test_a_peer_that_does_not_read_is_lost_in_time_and_one_that_is_slow_is_not() -> None:
    connection, other = pair()
    long = Leave(reason="x" * 900_000)  # more than the kernel keeps for a pair
    began = time.monotonic()
    with pytest.raises(Lost, match=r"does not read for 0\.2 s"):
        connection.send(long, timeout=0.2)
    assert time.monotonic() - began >= 0.2
    connection, other = pair()
    reader, heard = Connection(other), []
    thread = threading.Thread(target=lambda: heard.append(reader.receive(timeout=10)))
    thread.start()
    connection.send(long, timeout=10)
    thread.join()
    assert heard == [long]

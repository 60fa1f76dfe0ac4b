"""Tensors between machines: two real processes that share no memory, over loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dovetail.cluster.job.tensor_channel import ChannelHost, ChannelPeer
from dovetail.cluster.transport.wire import Lost
from tests.paths import ROOT

from .other_machine import LIMIT, tensors


@contextmanager
def other(peer: ChannelPeer, host: ChannelHost, tasks: int, end: str = "well") -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "tests.cluster.job.other_machine",
        str(host.address[1]),
        peer.name,
        str(tasks),
        end,
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        if end == "well":
            assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        peer.close()


def test_parameters_and_gradients_arrive_bit_for_bit_and_a_dead_machine_is_noticed() -> None:
    host = ChannelHost("127.0.0.1", timeout=LIMIT)
    first, second = host.invite(3), host.invite(3)  # the same device again: another name, another connection
    assert first.name != second.name
    with other(first, host, 3), other(second, host, 1, "die"):
        for iteration in range(3):
            into = tensors(-7.0)
            first.give(tensors(float(iteration)))
            taken = first.take(into)
            first.fetch(taken, into)
            assert all(torch.equal(a, 10 * b) for a, b in zip(into, tensors(float(iteration)), strict=True))
        into = tensors(-7.0)
        second.give(tensors(1.0))
        second.fetch(second.take(into), into)
        lost = tensors(-7.0)
        began = time.monotonic()
        with pytest.raises(Lost):
            second.fetch(second.take(lost), lost)
        assert time.monotonic() - began < LIMIT / 2, "a closed connection is noticed before the time-out"
        assert all(torch.equal(a, b) for a, b in zip(lost, tensors(-7.0), strict=True)), "nothing half-written"


def test_a_machine_that_hangs_or_never_connects_is_lost_after_the_time_out() -> None:
    host = ChannelHost("127.0.0.1", timeout=3.0)
    absent = host.invite(0)
    into = tensors(-7.0)
    absent.give(into)
    with pytest.raises(Lost, match="did not connect"):
        absent.fetch(absent.take(into), into, timeout=LIMIT)
    absent.close()
    with pytest.raises(Lost, match="closed"):
        closed(absent)
    patient = ChannelHost("127.0.0.1", timeout=LIMIT)
    peer = patient.invite(1)
    with other(peer, patient, 0, "hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"  # they have connected
        with pytest.raises(Lost, match="did not arrive"):
            peer.fetch(peer.take(into), into, timeout=0.2)


def closed(peer: ChannelPeer) -> None:
    """Uses a peer after `close`."""
    into = tensors(0.0)
    peer.fetch(peer.take(into), into)


def test_the_store_listens_on_its_address_only() -> None:
    host = ChannelHost("127.0.0.1")
    port = f"{host.address[1]:04X}"
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]
        if line.split()[1].endswith(f":{port}") and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F:{port}"]

"""Rate-limited networks: what crosses them is counted, and nothing of them stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from dovetail.core.errors import Error
from dovetail.emulate.launch import launch
from dovetail.emulate.shaped_network import NAMESPACES, PREFIX, SEND_BUFFER, available, bits_per_second, clean, shaped

reason = available()
Test = TypeVar("Test", bound=Callable[..., None])


def marked(test: Test) -> Test:
    """Needs network namespaces."""
    made: Test = pytest.mark.root(pytest.mark.skipif(reason is not None, reason=str(reason))(test))
    return made


def names_of(pid: int) -> list[str]:
    return [p.name for p in NAMESPACES.glob(f"{PREFIX}-{pid}-*")] if NAMESPACES.is_dir() else []


def links() -> list[str]:
    return sorted(p.name for p in Path("/sys/class/net").iterdir())


@pytest.fixture
def dead_pid() -> Iterator[int]:
    """A process that has ended but is not reaped, so that its number is nobody else's."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


@pytest.mark.parametrize(
    ("text", "expected"), [("1gbit", 1e9), ("300mbit", 3e8), ("2.5Gbit", 2.5e9), ("800kbit", 8e5), (" 4gbit ", 4e9)]
)
def test_rates_mean_what_they_say(text: str, expected: float) -> None:
    assert bits_per_second(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "1", "0gbit", "-1gbit", "1 gbit", "1gbps", "1gbit; reboot", "nanmbit"])
def test_a_wrong_rate_is_one_line_and_creates_nothing(text: str) -> None:
    before = names_of(os.getpid())
    with (
        pytest.raises(Error, match=r"^rate: expected a number with kbit, mbit or gbit .*, got ") as caught,
        shaped(2, rate=text),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert names_of(os.getpid()) == before


def test_other_wrong_options_are_one_line_too() -> None:
    with pytest.raises(Error, match=r"^ranks: expected 1 to 250, got 0$"), shaped(0):
        pass
    with pytest.raises(Error, match=r"^burst: expected a size in kb or mb"), shaped(2, burst="lots"):
        pass
    with pytest.raises(Error, match=r"^queue_seconds: expected more than 0"), shaped(2, queue_seconds=0):
        pass
    with pytest.raises(Error, match=r"^in_flight: expected at least 4096 bytes"), shaped(2, in_flight=1):
        pass


def test_what_is_missing_is_one_sentence() -> None:
    assert available(euid=1000) == "a shaped network needs root"
    if sys.platform == "linux":
        expected = "a shaped network needs `ip` and `tc`: apt-get install iproute2"
        assert available(euid=0, find=lambda name: None) == expected
        assert available(euid=0, find=lambda name: "/sbin/ip" if name == "ip" else None) == expected


@marked
def test_a_network_lives_as_long_as_its_block_and_outside_the_machine_s_own_namespace() -> None:
    before = links()
    with shaped(3, rate="300mbit") as network:
        assert len(names_of(os.getpid())) == 4  # three ranks and the bridge
        assert links() == before
        assert network.ranks == 3
        shown = subprocess.run(
            ["tc", "-n", network.namespaces[1], "qdisc", "show"], capture_output=True, text=True, timeout=20
        ).stdout
        assert "tbf" in shown and "rate 300Mbit" in shown
        assert clean() == []  # a living owner's network stays
        assert len(names_of(os.getpid())) == 4
    assert names_of(os.getpid()) == []
    assert links() == before


@marked
def test_what_a_connection_may_have_on_its_way_is_set_for_its_ranks_alone() -> None:
    def buffers(*inside: str) -> list[str]:
        return subprocess.run(
            [*inside, "cat", SEND_BUFFER], capture_output=True, text=True, check=True, timeout=20
        ).stdout.split()

    before = buffers()
    with shaped(1, in_flight=50_000) as network:
        assert buffers("ip", "netns", "exec", network.namespaces[0]) == ["4096", "50000", "50000"]
        assert buffers() == before


@marked
def test_an_exception_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), shaped(2):
        raise ZeroDivisionError
    assert names_of(os.getpid()) == []


@marked
def test_two_networks_of_one_owner_do_not_meet() -> None:
    with shaped(2) as one:
        with shaped(2) as two:
            assert not set(one.namespaces) & set(two.namespaces)
        assert all((NAMESPACES / name).exists() for name in one.namespaces)


@marked
def test_clean_removes_a_dead_owner_s_and_an_impostor_s_but_nobody_else_s(dead_pid: int) -> None:
    ours = [f"{PREFIX}-{dead_pid}-12345-abcdef-r0", f"{PREFIX}-{dead_pid}-12345-abcdef-bridge"]
    recycled = f"{PREFIX}-{os.getpid()}-1-abcdef-r0"  # our process id, but another start: an earlier process
    stranger = f"dovetail-other-{dead_pid}"
    for name in [*ours, recycled, stranger]:
        subprocess.run(["ip", "netns", "add", name], check=True, timeout=20)
    try:
        assert set(clean()) >= {*ours, recycled}
        assert not any((NAMESPACES / name).exists() for name in [*ours, recycled])
        assert (NAMESPACES / stranger).exists()
    finally:
        subprocess.run(["ip", "netns", "del", stranger], check=True, timeout=20)


OWNER = """
from dovetail.emulate.launch import launch
from dovetail.emulate.shaped_network import shaped
with shaped(2) as network:
    code = "import os, time; print(os.getpid()); time.sleep(60)"
    launch(["-c", code], ranks=2, network=network, timeout=60, on_line=lambda rank, line: print(line, flush=True))
"""


@marked
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_owner_s_end_leaves_no_rank_and_no_namespace(number: signal.Signals) -> None:
    from .test_launch import alive, within  # here, as this file is also what the ranks run

    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()) for _ in range(2)]
        assert len(names_of(owner.pid)) == 3
        owner.send_signal(number)
        owner.wait(30)
        if number == signal.SIGKILL:  # nobody could clean up: the next start does
            assert len(names_of(owner.pid)) == 3
            with shaped(2):
                pass
        assert names_of(owner.pid) == []
    assert within(10, lambda: not any(alive(pid) for pid in pids))


@marked
def test_bytes_on_the_wire_are_those_of_a_ring_all_reduce() -> None:
    ranks, size = 4, 4 * 2**20
    with shaped(ranks, rate="1gbit") as network:
        (first, *_) = launch([__file__, str(size)], ranks=ranks, network=network, timeout=120)
        sent = network.sent_bytes()
    assert first.report == ranks * (ranks + 1) / 2  # the sum came out right
    expected = 2 * (ranks - 1) / ranks * size
    for per_rank in sent:
        assert expected < per_rank < 1.05 * expected  # headers, acknowledgements and the rendezvous


def rank_main(size: int) -> None:
    import torch
    import torch.distributed as dist

    from dovetail.emulate.channel import leave
    from dovetail.emulate.launch import report

    dist.init_process_group("gloo")
    tensor = torch.full((size // 4,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    report(float(tensor[-1]))
    leave()


if __name__ == "__main__":
    rank_main(int(sys.argv[1]))

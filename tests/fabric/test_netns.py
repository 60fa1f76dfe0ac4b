"""Namespaces and devices are made and asked without a further process, thread or open file."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import netns

pytestmark = pytest.mark.root


@pytest.fixture
def names() -> Iterator[list[str]]:
    prefix = f"{netns.PREFIX}n{os.getpid()}-"
    made = [f"{prefix}{i}" for i in range(3)]
    netns.create(made)
    try:
        yield made
    finally:
        netns.remove(prefix)


def held() -> tuple[int, int, str]:
    """Open files, threads and children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), children


def here() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


def test_a_thread_makes_namespaces_enters_them_and_comes_back(names: list[str]) -> None:
    own, before = here(), held()
    seen = set()
    for name in names:
        with netns.inside(name):
            seen.add(here())
            assert not netns.is_running("lo")
            netns.set_up(1, True)
            assert netns.is_running("lo")
    with pytest.raises(ZeroDivisionError), netns.inside(names[0]):
        raise ZeroDivisionError
    assert here() == own and len(seen | {own}) == 4
    assert held() == before


def test_namespaces_made_by_another_thread_are_not_those_of_the_first(names: list[str]) -> None:
    more = [f"{names[0]}{i}" for i in range(2)]
    maker = threading.Thread(target=netns.create, args=(more,))
    maker.start()
    maker.join(30)
    inodes = {(netns.WHERE / name).stat().st_ino for name in (*names, *more)}
    assert len(inodes | {here()}) == 6


def test_what_the_kernel_refuses_is_one_line(names: list[str]) -> None:
    with netns.inside(names[0]), pytest.raises(Error, match=r"^netlink: no such device$"):
        netns.set_up(4711, True)
    with pytest.raises(FileNotFoundError), netns.inside("dvf-nobody"):
        pass


def test_devices_can_be_changed_while_an_event_loop_is_running(names: list[str]) -> None:
    async def ask() -> bool:
        with netns.inside(names[0]):
            netns.set_up(1, True)
            return netns.is_running("lo")

    assert asyncio.run(ask())

"""Network namespaces and their devices: making, entering and removing namespaces, the state and offloads of devices.

Everything a fabric makes lives in namespaces whose names begin with PREFIX and its run id. Nothing is ever configured
in the machine's own namespace, and `remove` touches nothing whose name does not begin so.

pyroute2 speaks netlink from the calling thread. Its namespace objects would fork a process each, so a thread enters a
namespace first (`inside`) and then opens a plain netlink socket, which stays in that namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes as C
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dovetail.core.errors import Error

from .extra import pyroute2

PREFIX = "dvf-"
WHERE = Path("/run/netns")
MAX_SHAPED_RATE = 2.0**32 - 1
"""Bytes per second (34 Gbit/s): pyroute2 writes the rate of a token bucket as 32 bits."""
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_UP_AND_RUNNING = 0x41  # IFF_UP and IFF_RUNNING
_OFFLOADS = {
    "tx": "tx-checksumming",
    "tso": "tcp-segmentation-offload",
    "gso": "generic-segmentation-offload",
    "gro": "generic-receive-offload",
}
_libc = C.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread is in namespace `name` for the block. Sockets made inside stay there."""
    with _coming_back():
        there = os.open(WHERE / name, os.O_RDONLY)
        try:
            pyroute2.netns.setns(there)
        finally:
            os.close(there)
        yield


@contextlib.contextmanager
def _coming_back() -> Iterator[None]:
    """Whatever namespaces the block enters, this thread is back in its own afterwards."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        try:
            pyroute2.netns.setns(before)
        finally:
            os.close(before)


def create(names: Iterable[str]) -> None:
    """Makes namespaces. pyroute2 forks a process for each one; this thread makes them itself, and comes back."""
    with _coming_back():
        for name in names:
            if _libc.unshare(_CLONE_NEWNET):
                raise OSError(C.get_errno(), f"unshare: {os.strerror(C.get_errno())}")
            pyroute2.netns.attach(str(WHERE / name), "thread-self")  # the thread's: /proc/self is the first thread


@contextlib.contextmanager
def netlink() -> Iterator[Any]:
    """A pyroute2.IPRoute in the namespace that this thread is in; what the kernel refuses is one line.

    It runs an event loop of its own for every request. A loop that may be running in this thread (a notebook's, a
    browser driver's) must not be taken for it, and waits, as for any other system call.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with pyroute2.IPRoute() as made:
            yield made
    except pyroute2.NetlinkError as e:
        raise Error(f"netlink: {e.args[1].lower()}") from None
    finally:
        asyncio._set_running_loop(loop)


def sysctl(path: str, value: str) -> None:
    """Sets a network setting of the namespace this thread is in, where the kernel has it."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net", path).write_text(value)


def set_up(ifindex: int, up: bool) -> None:
    """Takes a device of this namespace up or down."""
    with netlink() as route:
        route.link("set", index=ifindex, state="up" if up else "down")


def is_running(device: str) -> bool:
    """Whether a device of this namespace is up and has carrier.

    By a plain ioctl, which takes microseconds: a fabric's links are all asked again and again, and pyroute2 takes some
    milliseconds to read what the kernel has to say about a device.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        answer = fcntl.ioctl(s, _SIOCGIFFLAGS, struct.pack("<16s24x", device.encode()))
    flags: int = struct.unpack_from("<H", answer, 16)[0]
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def shape(route: Any, ifindex: int, rate: float, mtu: int) -> None:
    """Limits what leaves by a device to `rate` bytes per second; a packet waits at most 20 ms in its queue."""
    rate = min(rate, MAX_SHAPED_RATE)
    burst = max(16_000, mtu + 100, int(rate / 250))
    route.tc("replace", "tbf", index=ifindex, handle="1:", rate=f"{int(rate * 8)}bit", burst=burst, latency="20ms")


def offload(device: str, **features: bool) -> None:
    """As `ethtool -K`: offload("eth0", tx=False, tso=False, gro=True)."""
    tool = pyroute2.ethtool.ioctl.IoctlEthtool(device)
    with contextlib.closing(tool):
        for feature, on in features.items():
            tool.set_offload_flag(_OFFLOADS[feature], on)


def named(prefix: str) -> list[str]:
    """Namespaces whose names begin with `prefix`."""
    assert prefix.startswith(PREFIX)
    return sorted(p.name for p in WHERE.glob(f"{prefix}*")) if WHERE.exists() else []


def processes_in(names: list[str]) -> list[int]:
    """Processes that live in any of these namespaces."""
    inodes = set()
    for name in names:
        with contextlib.suppress(OSError):
            inodes.add((WHERE / name).stat().st_ino)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns" / "net").stat().st_ino in inodes:
                    found.append(int(entry.name))
    return found


def remove(prefix: str) -> int:
    """Ends what runs in the namespaces that begin with `prefix`, then removes them; returns how many there were."""
    names = named(prefix)
    if not names:
        return 0
    for _ in range(50):
        alive = [p for p in processes_in(names) if p != os.getpid()]
        if not alive:
            break
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it at the same time
            pyroute2.netns.remove(str(WHERE / name))
    return len(names)

"""Network namespaces and their devices, by system calls: entering, link state, addresses, offloads.

Everything a fabric makes lives in namespaces whose names begin with PREFIX and its run id. Nothing is ever configured
in the machine's own namespace, and `remove` touches nothing whose name does not begin so.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import fcntl
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from dovetail.core.errors import Error

PREFIX = "dvf-"
WHERE = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8946, 0x8913, 0x8914, 0x8916, 0x891C
_ETHTOOL = {"tx": 0x17, "sg": 0x19, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}
_libc = C.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread is in namespace `name` for the block. Sockets made inside stay there."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(WHERE / name, os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET):
        code = C.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def batch(lines: list[str], *, timeout: float = 120) -> None:
    """Many `ip` commands in one process."""
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
        preexec_fn=_die_with_parent,  # or it would go on building after a kill -9 of ours
    )
    if done.returncode:
        raise Error(f"ip: {(done.stderr.strip() or 'failed').splitlines()[0]}")


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def sysctl(path: str, value: str) -> None:
    """Sets a network setting of the namespace this thread is in, where the kernel has it."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net", path).write_text(value)


def _name(device: str) -> bytes:
    return device.encode().ljust(16, b"\0")


def set_up(device: str, up: bool) -> None:
    """Takes a device of this namespace up or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        raw = fcntl.ioctl(s, _SIOCGIFFLAGS, _name(device) + bytes(24))
        flags = struct.unpack_from("<H", raw, 16)[0]
        fcntl.ioctl(s, _SIOCSIFFLAGS, _name(device) + struct.pack("<H", flags | 1 if up else flags & ~1) + bytes(22))


def is_up(device: str) -> bool:
    """Whether the device is up and has carrier."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        flags = struct.unpack_from("<H", fcntl.ioctl(s, _SIOCGIFFLAGS, _name(device) + bytes(24)), 16)[0]
    return bool(flags & 0x41 == 0x41)  # IFF_UP and IFF_RUNNING


def add_addresses(device: str, v4: str, v6: str, prefix4: int, prefix6: int) -> None:
    mask = socket.inet_aton(str(".".join(str((0xFFFFFFFF << (32 - prefix4) >> s) & 255) for s in (24, 16, 8, 0))))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for request, value in ((_SIOCSIFADDR, socket.inet_aton(v4)), (_SIOCSIFNETMASK, mask)):
            fcntl.ioctl(s, request, _name(device) + struct.pack("<HH4s", socket.AF_INET, 0, value) + bytes(16))
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s:
        index = socket.if_nametoindex(device)
        fcntl.ioctl(s, _SIOCSIFADDR, struct.pack("<16sIi", socket.inet_pton(socket.AF_INET6, v6), prefix6, index))


def offload(device: str, **features: bool) -> None:
    """ethtool -K by system call: offload("eth0", tx=False, tso=False, gro=True)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for feature, on in features.items():
            value = C.create_string_buffer(struct.pack("<II", _ETHTOOL[feature], on))
            fcntl.ioctl(s, _SIOCETHTOOL, struct.pack("<16sQ16x", device.encode(), C.addressof(value)))


def named(prefix: str) -> list[str]:
    """Namespaces whose names begin so."""
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
    batch([f"netns del {name}" for name in names])
    return len(names)

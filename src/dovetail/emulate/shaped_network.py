"""A rate-limited network on one machine: one network namespace per rank, joined by a bridge in a namespace of its own.

Every link is a veth pair whose two ends live in namespaces of ours, with a token bucket (`tbf`) on both: what a rank
sends is limited at its own end, what it receives at the bridge's. Nothing of it, no link, address or route, ever
appears in the machine's own namespace. It is made by `ip` and `tc`, so that a demonstration needs no further package.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dovetail.core.errors import Error, first_line
from dovetail.core.network import bits_per_second as bits_per_second

NAMESPACES = Path("/run/netns")  # where `ip netns` keeps its names
PREFIX = "dovetail-net"
SUBNET = "198.18.0"  # reserved for benchmarks (RFC 2544); 250 ranks fit
MAX_RANKS = 250
SEND_BUFFER = "/proc/sys/net/ipv4/tcp_wmem"  # bytes, of the reader's namespace: minimum, default, maximum
TIMEOUT = 20.0  # seconds for one call of `ip` or `tc`; they take milliseconds

# dovetail-net-<pid>-<start of that process, in clock ticks since boot>-<network>-<member>
_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]+-(?:r\d+|bridge)")
_SIZE = re.compile(r"[1-9]\d*(?:kb|mb)", re.IGNORECASE)
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


@dataclass(frozen=True)
class ShapedNetwork:
    """A network that is up: where each rank lives, and what it has sent so far."""

    namespaces: tuple[str, ...]
    """One per rank."""
    addresses: tuple[str, ...]
    rate: str
    interface: str = "eth0"
    """The rank's end of its link, of the same name in every namespace."""

    @property
    def ranks(self) -> int:
        return len(self.namespaces)

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes each rank has put on its wire since the network came up, with all headers."""
        return tuple(_sent(name, self.interface) for name in self.namespaces)


def available(*, euid: int | None = None, find: Callable[[str], str | None] = shutil.which) -> str | None:
    """None where a shaped network can run, else what is missing, as one sentence."""
    if sys.platform != "linux":
        return "a shaped network needs Linux"
    if (os.geteuid() if euid is None else euid) != 0:
        return "a shaped network needs root"
    if not (find("ip") and find("tc")):
        return "a shaped network needs `ip` and `tc`: apt-get install iproute2"
    held = _effective_capabilities()
    if missing := [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        return f"a shaped network needs {' and '.join(missing)}: start the container with --privileged"
    return None


@contextlib.contextmanager
def shaped(
    ranks: int,
    *,
    rate: str = "1gbit",
    burst: str = "256kb",
    queue_seconds: float = 0.2,
    in_flight: int | None = None,
) -> Iterator[ShapedNetwork]:
    """A network of `ranks` links of `rate` in each direction, for as long as the block runs.

    First removes what owners that no longer live have left behind, then creates the namespaces and links. `burst` is
    what a link may send at once after a pause; `queue_seconds` is how long a packet may wait before the link drops it;
    `in_flight` are the bytes that a connection may have on its way, by default as many as the system allows.
    The network vanishes when the block ends, whether normally, by an exception, by Ctrl-C or by SIGTERM. After a
    `kill -9` the next start (or `clean()`) removes it.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise Error(f"ranks: expected 1 to {MAX_RANKS}, got {ranks}")
    bits_per_second(rate)
    if not _SIZE.fullmatch(burst.strip()):
        raise Error(f"burst: expected a size in kb or mb such as '256kb', got {burst!r}")
    if not queue_seconds > 0:
        raise Error(f"queue_seconds: expected more than 0, got {queue_seconds}")
    if in_flight is not None and in_flight < 4096:
        raise Error(f"in_flight: expected at least 4096 bytes, got {in_flight}")
    if reason := available():
        raise Error(reason)
    clean()
    run = f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(3)}"
    network = ShapedNetwork(
        namespaces=tuple(f"{run}-r{i}" for i in range(ranks)),
        addresses=tuple(f"{SUBNET}.{i + 1}" for i in range(ranks)),
        rate=rate.strip(),
    )
    limit = f"rate {network.rate} burst {burst.strip()} latency {queue_seconds * 1e3:g}ms"
    with sigterm_raises():
        try:
            _create(network, f"{run}-bridge", limit)
            if in_flight is not None:
                buffer = f"echo 4096 {in_flight} {in_flight} > {SEND_BUFFER}"
                _run("ip", *(f'netns exec {name} sh -c "{buffer}"' for name in network.namespaces))
            yield network
        finally:
            _delete([*network.namespaces, f"{run}-bridge"])


def clean() -> list[str]:
    """Removes the namespaces of owners that no longer live; returns their names. Those of a living owner stay."""
    dead = []
    for path in sorted(NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        # A process id may come again; together with its start it does not.
        if match and _start_of(int(match["pid"])) != int(match["start"]):
            dead.append(path.name)
    _delete(dead)
    return dead


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt, so that `finally` runs."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not ours:  # somebody else decides what SIGTERM does, or signals cannot be set here
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _create(network: ShapedNetwork, bridge: str, limit: str) -> None:
    eth = network.interface
    _run("ip", f"netns add {bridge}", *(f"netns add {name}" for name in network.namespaces))
    _run(
        f"ip -n {bridge}",
        "link add name bridge type bridge stp_state 0",
        "link set bridge up",
        *(
            line
            for i, name in enumerate(network.namespaces)
            for line in (
                f"link add name port{i} type veth peer name {eth} netns {name}",
                f"link set port{i} master bridge",
                f"link set port{i} up",
            )
        ),
    )
    _run(f"tc -n {bridge}", *(f"qdisc add dev port{i} root tbf {limit}" for i in range(network.ranks)))
    for name, address in zip(network.namespaces, network.addresses, strict=True):
        _run(f"ip -n {name}", "link set lo up", f"addr add {address}/24 dev {eth}", f"link set {eth} up")
        _run(f"tc -n {name}", f"qdisc add dev {eth} root tbf {limit}")


def _delete(names: list[str]) -> None:
    """Removes namespaces, and with them their links; raises an Error if one stays."""
    present = [name for name in names if (NAMESPACES / name).exists()]
    if present:
        with contextlib.suppress(Error):  # somebody else may be cleaning up at the same time
            _run("ip -force", *(f"netns del {name}" for name in present))
    if left := [name for name in present if (NAMESPACES / name).exists()]:
        raise Error(f"could not remove the network namespaces {', '.join(left)}: try `ip netns del`")


def _sent(namespace: str, interface: str) -> int:
    shown = json.loads(_run(f"ip -n {namespace} -s -j", f"link show dev {interface}"))
    return int(shown[0]["stats64"]["tx"]["bytes"])


def _run(command: str, *lines: str) -> str:
    """Gives `lines` to `ip` or `tc` as one batch; returns what it printed."""
    try:
        # A session of its own: Ctrl-C at the terminal reaches us, and we clean up; it must not cut a batch in two.
        done = subprocess.run(
            [*command.split(), "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise Error(f"`{command}` did not end within {TIMEOUT:g} s") from None
    except OSError as e:
        raise Error(f"`{command}` cannot run: {(e.strerror or str(e)).lower()}") from None
    if done.returncode != 0:
        raise Error(f"`{command}` failed: {first_line(done.stderr) or 'no message'}")
    return done.stdout


def _start_of(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return 0 if fields[0] in "ZX" else int(fields[19])


def _effective_capabilities() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)

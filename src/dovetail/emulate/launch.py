"""One Python process per rank on this machine, on loopback or each in its namespace of a shaped network.

A rank hands a result back with `report(value)`: the value is JSON, and the caller finds it in `RankResult.report`. In
the child, the environment variable `DOVETAIL_REPORT` names the file that carries it.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dovetail.core.errors import Error
from dovetail.core.files import write_text
from dovetail.core.processes import dying_with_us
from dovetail.core.scratch import scratch

from .shaped_network import ShapedNetwork, sigterm_raises

GRACE = 3.0  # seconds between SIGTERM and SIGKILL
REPORT = "DOVETAIL_REPORT"
KEPT_LINES = 10_000  # per rank and stream; the oldest are dropped

_ports = itertools.cycle(range(20000, 30000))


@dataclass(frozen=True)
class RankResult:
    """What one rank did."""

    rank: int
    code: int
    """Exit code; negative for the signal that ended it."""
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    report: Any = None
    """What the rank gave to `report()`, None if nothing."""


class LaunchError(Error):
    """A rank failed or time ran out. One line; `results` holds everything the ranks wrote until then."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


def report(value: Any) -> None:
    """Hands a JSON value to the launcher of this rank; the last call counts. Without a launcher, prints it."""
    text = json.dumps(value)
    path = os.environ.get(REPORT)
    if path is None:
        print(text, flush=True)
    else:
        write_text(path, text)


def launch(
    argv: list[str],
    *,
    ranks: int,
    network: ShapedNetwork | None = None,
    timeout: float,
    env: dict[str, str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    inherit: bool = False,
) -> list[RankResult]:
    """Runs `python *argv` once per rank, as torchrun would on one machine, and returns when all have ended.

    Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and one thread; with a
    `network` it runs in its namespace there, else on loopback. Lines of either output stream go to `on_line(rank,
    line)` as they come; with `inherit` the ranks write to the caller's own output and error instead. When a rank fails,
    when `timeout` seconds have passed, on Ctrl-C and on SIGTERM, all ranks are ended: by SIGTERM, and by SIGKILL if
    they have not ended GRACE seconds later. If this process is killed, the kernel kills the ranks.
    """
    if ranks < 1:
        raise Error(f"ranks: expected at least 1, got {ranks}")
    if network is not None and network.ranks < ranks:
        raise Error(f"ranks: expected at most the network's {network.ranks}, got {ranks}")
    if not timeout > 0:
        raise Error(f"timeout: expected more than 0 seconds, got {timeout}")
    with scratch("launch") as folder, sigterm_raises(), held_port() as port, _RankProcesses(inherit) as running:
        # In a namespace every port is free; a new one each time, as connections of the last launch linger.
        shared = _shared_environment(ranks, network, next(_ports) if network else port) | (env or {})
        for rank in range(ranks):
            inside = ["ip", "netns", "exec", network.namespaces[rank]] if network else []
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), REPORT: str(Path(folder, f"{rank}.json"))}
            running.start(rank, [*inside, sys.executable, *argv], os.environ | shared | own)
        problem = running.watch(time.monotonic() + timeout, timeout, on_line)
        running.end(on_line)
        results = [p.result(Path(folder, f"{p.rank}.json")) for p in running.processes]
    if problem:
        rank_failed, what = problem
        said = next((line.strip() for line in reversed(results[rank_failed].stderr) if line.strip()), "")
        raise LaunchError(f"{what}: {said}" if said else what, results)
    return results


@dataclass
class _RankProcess:
    """One rank while it runs."""

    rank: int
    popen: subprocess.Popen[bytes]
    exited: int
    """A file descriptor that becomes readable when the process ends."""
    lines: dict[str, list[str]] = field(default_factory=lambda: {"stdout": [], "stderr": []})

    def result(self, path: Path) -> RankResult:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        out, err = tuple(self.lines["stdout"]), tuple(self.lines["stderr"])
        return RankResult(rank=self.rank, code=self.popen.returncode, stdout=out, stderr=err, report=value)


class _OutputPipe:
    """Turns what comes out of a pipe into lines."""

    def __init__(self, process: _RankProcess, name: str, pipe: IO[bytes]) -> None:
        self.process, self.name, self.pipe = process, name, pipe
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def read(self) -> tuple[list[str], bool]:
        """Complete lines that are there now, and whether more can come."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return [], True
        *lines, self._rest = (self._rest + self._decoder.decode(data, final=not data)).split("\n")
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest], ""
        kept = self.process.lines[self.name]
        kept.extend(lines)
        del kept[:-KEPT_LINES]
        return lines, bool(data)


class _RankProcesses:
    """The ranks of one launch. Leaving the block, for whatever reason, leaves no process and no open pipe."""

    def __init__(self, inherit: bool) -> None:
        self.processes: list[_RankProcess] = []
        self._output = None if inherit else subprocess.PIPE
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.end(None)
        finally:
            self._selector.close()
            for process in self.processes:
                os.close(process.exited)
                for pipe in (process.popen.stdout, process.popen.stderr):
                    if pipe is not None:
                        pipe.close()

    def start(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        popen = subprocess.Popen(
            dying_with_us(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # so that signals reach the rank with everything it starts, and Ctrl-C only us
        )
        process = _RankProcess(rank, popen, os.pidfd_open(popen.pid))
        self.processes.append(process)
        self._selector.register(process.exited, selectors.EVENT_READ, process)
        for name, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, _OutputPipe(process, name, pipe))

    def watch(
        self, deadline: float, timeout: float, on_line: Callable[[int, str], None] | None
    ) -> tuple[int, str] | None:
        """Waits until all ranks have ended well, or for the first problem: (rank, what happened)."""
        while running := [p for p in self.processes if p.popen.returncode is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                who = ", ".join(str(p.rank) for p in running)
                return running[0].rank, f"rank {who} did not end within {timeout:g} s"
            for process in self._handle(left, on_line):
                if process.popen.returncode != 0:
                    return process.rank, f"rank {process.rank} {_ending(process.popen.returncode)}"
        return None

    def end(self, on_line: Callable[[int, str], None] | None) -> None:
        """Ends what still runs, SIGTERM first, and reads what was still in the pipes."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while any(p.popen.returncode is None for p in self.processes) and time.monotonic() < deadline:
            self._handle(deadline - time.monotonic(), on_line)
        self._signal(signal.SIGKILL)
        while any(p.popen.returncode is None for p in self.processes) and time.monotonic() < deadline + GRACE:
            self._handle(deadline + GRACE - time.monotonic(), on_line)
        # What is in the pipes now is all there is. The deadline is for processes that left the rank's session and still
        # hold the other end of a pipe.
        while self._selector.select(0) and time.monotonic() < deadline + 2 * GRACE:
            self._handle(0, on_line)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.popen.returncode is None:
                _signal_group(process.popen.pid, number)

    def _handle(self, seconds: float, on_line: Callable[[int, str], None] | None) -> list[_RankProcess]:
        """Handles what happens next within `seconds`: lines of output, and ranks that ended, which it returns."""
        ended = []
        for key, _ in self._selector.select(max(seconds, 0)):
            if isinstance(key.data, _RankProcess):
                self._selector.unregister(key.fileobj)
                # Processes that the rank had started end with it: now, before its id is free for others.
                _signal_group(key.data.popen.pid, signal.SIGKILL)
                key.data.popen.wait()
                ended.append(key.data)
                continue
            lines, more = key.data.read()
            if not more:
                self._selector.unregister(key.fileobj)
            for line in lines if on_line else ():
                assert on_line is not None
                on_line(key.data.process.rank, line)
        return ended


def _shared_environment(ranks: int, network: ShapedNetwork | None, port: int) -> dict[str, str]:
    # A namespace has no name service; torch would warn of that once per connection.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if network and "TORCH_CPP_LOG_LEVEL" not in os.environ else {}
    return quiet | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": network.addresses[0] if network else "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": network.interface if network else "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # Restarted gloo groups find stale keys in a store they share with the launcher.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A loopback port that the kernel gives to no other process, unless that asks for it by number and listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"

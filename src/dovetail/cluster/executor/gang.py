"""One rank of a gang job: a process that has the device to itself, except in the gaps that it announces.

It sees exactly the environment that it was given, plus DOVETAIL_GAP, the file in which it announces gaps. It leads a
process group and dies with the executor. When it ends, or is ended, every process that it started is killed too, also
outside the group: they are found by DOVETAIL_GAP in their environment. Its output goes to the job's log, line by line.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

from dovetail.cluster.output import Log
from dovetail.cluster.transport.messages import RankEnded, StartRank
from dovetail.core.processes import die_with_parent
from dovetail.planning.sharing.dispatch import Resident
from dovetail.train.burst.gap_board import VARIABLE, SharedGap

from .gaps import TOLERANCE, LastBackgroundTask, Promise
from .tenant import empty_shape

TAIL_LINES, LINE_BYTES = 20, 4000


class Rank(Resident):
    """It never offers a task; background tasks may have the device while it announces that it is idle."""

    def __init__(self, start: StartRank, home: Path, device: int, last_background: LastBackgroundTask) -> None:
        super().__init__(-1, empty_shape(), (device,), start.priority)
        self.start, self.last_background = start, last_background
        self._gap_file = gap_file_of(home, device, start)
        self.gap = open_gap(self._gap_file)
        self.promise = Promise(start.bound, time.monotonic())
        self.foreground = start.foreground
        self.since = time.monotonic()
        self.log = Log(Path(start.folder) / "log.txt")
        self._last: deque[bytes] = deque(maxlen=TAIL_LINES)
        try:
            self._process, pipe = _spawn(start, self._gap_file)
        except (OSError, subprocess.SubprocessError):
            self._release()
            raise
        self.exited = os.pidfd_open(self._process.pid)
        """A pidfd, readable when the process has ended."""
        self._pump = threading.Thread(target=self._copy, args=(pipe,), daemon=True, name="output of a rank")
        self._pump.start()

    @property
    def job(self) -> str:
        return self.start.job

    def spares(self, device: int, now: float, seconds: float) -> bool:
        return self.promise.allows(now, seconds, self.gap.until - now)

    def background_task_ended(self, now: float) -> None:
        """Charges the delay of a task that ran in a gap: the time that it ran on after the gap had ended."""
        back = self.gap.since if self.gap.until == 0.0 else now
        delay = self.last_background.overlap(back, now)
        if delay > 0:
            self.promise.delayed(now, delay)
        if delay <= TOLERANCE:
            self.promise.clean(now)

    def end(self) -> RankEnded:
        """Kills what is left of its processes and reports how it ended. Call when `exited`, or to end it now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        sweep(str(self._gap_file))
        self._pump.join(timeout=2.0)  # the pipe has no writer left
        os.close(self.exited)
        self._release()
        tail = b"\n".join(self._last).decode("utf-8", "replace")
        return RankEnded(job=self.job, attempt=self.start.attempt, worker=self.start.worker, code=code, tail=tail)

    def _release(self) -> None:
        self.log.close()
        self.gap.close()
        self._gap_file.unlink(missing_ok=True)

    def _copy(self, pipe: int) -> None:
        """Copies whole lines to the log, on a thread of its own: a rank never waits for a task of this process."""
        label = f"rank {self.start.worker}: ".encode()
        rest = b""
        with os.fdopen(pipe, "rb", buffering=0) as out:
            while data := out.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                self._note(label, lines)
        if rest:
            self._note(label, [rest])

    def _note(self, label: bytes, lines: list[bytes]) -> None:
        self._last.extend(line[:LINE_BYTES] for line in lines[-TAIL_LINES:])
        if lines:
            self.log.write(b"".join(label + line + b"\n" for line in lines))


def gap_file_of(home: Path, device: int, start: StartRank) -> Path:
    """The file behind DOVETAIL_GAP."""
    return home / "executors" / f"{device}.{start.job}.{start.attempt}.{start.worker}.gap"


def open_gap(path: Path) -> SharedGap:
    """A new gap file that says busy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(SharedGap.BYTES))
    return SharedGap(path)


def _spawn(start: StartRank, gap_file: Path) -> tuple[subprocess.Popen[bytes], int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    environment = {"RANK": str(start.worker)} | start.environment | {VARIABLE: str(gap_file)}
    try:
        process = subprocess.Popen(
            start.argv,
            env=environment,
            cwd=start.folder,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            process_group=0,
            preexec_fn=functools.partial(die_with_parent, parent=os.getpid()),
        )
    except (OSError, subprocess.SubprocessError):
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, reading


def sweep(gap_file: str) -> list[int]:
    """Kills every process that belongs to a rank: the path in its DOVETAIL_GAP begins with `gap_file`.

    At an executor's start "HOME/executors/DEVICE." finds the processes of an earlier executor that was killed.
    """
    found = []
    mark = f"{VARIABLE}={gap_file}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                environment = Path(entry.path, "environ").read_bytes().split(b"\0")
                if any(variable.startswith(mark) for variable in environment):
                    os.kill(int(entry.name), signal.SIGKILL)
                    found.append(int(entry.name))
    return found

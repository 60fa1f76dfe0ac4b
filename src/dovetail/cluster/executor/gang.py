"""One rank of a gang job: a process of its own that has the device, but for the gaps that it announces.

It sees exactly the environment that it was given, and where to write its gaps. It leads a process group, dies with the
executor, and when it ends, or is ended, everything that it started goes too, wherever it has hidden: whoever carries
its DOVETAIL_GAP in the environment. Its output goes to the job's log, line by line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from dovetail.cluster.output import Log
from dovetail.cluster.transport.messages import RankEnded, StartRank
from dovetail.planning.sharing.dispatch import Resident
from dovetail.train.burst.gap_board import VARIABLE, Word

from .gaps import TOLERANCE, Filled, Promise
from .residents import empty_shape

TAIL_LINES, LINE_BYTES = 20, 4000
_libc = ctypes.CDLL(None, use_errno=True)  # bound before any fork
_PR_SET_PDEATHSIG = 1


class Rank(Resident):
    """While it runs it never offers a task; others may have the device while it announces that it is idle."""

    def __init__(self, start: StartRank, home: Path, device: int, filled: Filled) -> None:
        super().__init__(-1, empty_shape(), (device,), start.rank)
        self.start, self.filled = start, filled
        self._gap_file = word_file(home, device, start)
        self.word = open_word(self._gap_file)
        self.promise = Promise(start.bound, time.monotonic())
        self.foreground = start.foreground
        self.since = time.monotonic()
        self.log = Log(Path(start.folder) / "log.txt")
        self._last: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._fillers = filled.count
        try:
            self._process, pipe = _spawn(start, self._gap_file)
        except (OSError, subprocess.SubprocessError):
            self._let_go()
            raise
        self.exited = os.pidfd_open(self._process.pid)
        """Readable when it has ended."""
        self._pump = threading.Thread(target=self._copy, args=(pipe,), daemon=True, name="output of a rank")
        self._pump.start()

    @property
    def job(self) -> str:
        return self.start.job

    def spares(self, device: int, now: float, seconds: float) -> bool:
        return self.promise.allows(now, seconds, self.word.until - now)

    def filler_ended(self, now: float) -> None:
        """Counts what a task that ran in a gap cost: the time that it ran on after the rank had come back."""
        self._fillers = self.filled.count
        back = self.word.since if self.word.until == 0.0 else now
        lost = self.filled.overlap(back, now)
        if lost > 0:
            self.promise.delayed(now, lost)
        if lost <= TOLERANCE:
            self.promise.clean(now)

    def end(self) -> RankEnded:
        """Ends what is left of it, all of it, and says how it went. Call when `exited`, or to end it now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        sweep(str(self._gap_file))
        self._pump.join(timeout=2.0)  # the pipe has no writer any more
        os.close(self.exited)
        self._let_go()
        tail = b"\n".join(self._last).decode("utf-8", "replace")
        return RankEnded(job=self.job, epoch=self.start.epoch, worker=self.start.worker, code=code, tail=tail)

    def _let_go(self) -> None:
        self.log.close()
        self.word.close()
        self._gap_file.unlink(missing_ok=True)

    def _copy(self, pipe: int) -> None:
        """Whole lines to the log. A thread of its own, so that a rank never waits because a task runs here."""
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


def word_file(home: Path, device: int, start: StartRank) -> Path:
    """The file behind DOVETAIL_GAP."""
    return home / "executors" / f"{device}.{start.job}.{start.epoch}.{start.worker}.gap"


def open_word(path: Path) -> Word:
    """A new gap word: busy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(Word.BYTES))
    return Word(path)


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
            preexec_fn=_die_with(os.getpid()),
        )
    except (OSError, subprocess.SubprocessError):
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, reading


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        """In the child, between fork and exec: nothing that could wait for a lock of another thread."""
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def sweep(gap_file: str) -> list[int]:
    """Ends every process whose environment says that it belongs to a rank: its gap file begins with `gap_file`.

    At an executor's start "HOME/executors/DEVICE." finds what one that was killed has left.
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

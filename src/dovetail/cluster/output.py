"""Output of jobs: what a job's code prints while its task runs goes to that job's log and to no other.

The standard streams are redirected by descriptor, which includes what C libraries print. That costs a few microseconds
per task. Logs are bounded: one that has grown too long keeps its last quarter.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

LIMIT_BYTES = 8 * 2**20


class Log:
    """A job's log.txt, to which several processes append."""

    def __init__(self, path: Path, *, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        path.parent.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """Best effort: a full disk does not stop training."""
        with contextlib.suppress(OSError):
            os.write(self.handle, data)

    def trim(self) -> None:
        """Cuts a log that is too long. Any thread may call it, often: it is cheap where there is nothing to do."""
        with contextlib.suppress(OSError):  # it may have been closed meanwhile
            if os.fstat(self.handle).st_size <= self._limit:
                return
            # Another process that has the file open may trim it at the same time.
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                size = os.fstat(self.handle).st_size
                if size > self._limit:
                    kept = os.pread(self.handle, self._limit // 4, size - self._limit // 4).partition(b"\n")[2]
                    os.ftruncate(self.handle, 0)
                    self.write(b"[dovetail: earlier output was dropped]\n" + kept)
            finally:
                fcntl.flock(self.handle, fcntl.LOCK_UN)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class LogHandler(logging.Handler):
    """Writes a process's log records to the job's log, to which executors write too."""

    def __init__(self, path: Path, process: str) -> None:
        super().__init__()
        self._log = Log(path)
        self.setFormatter(logging.Formatter(f"%(asctime)s {process}: %(message)s", "%Y-%m-%dT%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write((self.format(record) + "\n").encode())


class Streams:
    """This process's own standard streams, which it lends to a job while the job's code runs."""

    def __init__(self) -> None:
        self._own = (os.dup(1), os.dup(2))
        self._objects: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)

    def lend(self, log: Log) -> None:
        os.dup2(log.handle, 1)
        os.dup2(log.handle, 2)

    def take_back(self) -> None:
        """Restores them, whatever the job did: closed or replaced them, or left text in their buffers."""
        for mine, now in zip(self._objects, (sys.stdout, sys.stderr), strict=True):
            with contextlib.suppress(Exception):
                mine.flush()
            if now is not mine:
                with contextlib.suppress(Exception):
                    now.flush()
        os.dup2(self._own[0], 1)
        os.dup2(self._own[1], 2)
        if self._objects[0].closed or self._objects[1].closed:
            self._objects = (
                open(1, "w", buffering=1, closefd=False),  # noqa: SIM115
                open(2, "w", buffering=1, closefd=False),  # noqa: SIM115
            )
        if sys.stdout is not self._objects[0] or sys.stderr is not self._objects[1]:
            sys.stdout, sys.stderr = self._objects

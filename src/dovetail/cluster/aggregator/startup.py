"""How an aggregator begins: what was submitted, where to go on from, and being the only one."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.cluster.job.objects import JobError
from dovetail.cluster.output import Log
from dovetail.core.errors import Error

from . import checkpoint

log = logging.getLogger("dovetail")


def newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole."""
    for _, path in checkpoint.found(folder):
        try:
            return checkpoint.read(path)
        except checkpoint.Damaged as e:
            log.warning("%s", e)
    return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No two starts of a job at once: an earlier one that is still ending is waited for, a little."""
    handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        limit = time.monotonic() + 30.0
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > limit:
                    raise Error("an earlier start of the job does not end") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """An Error if the block takes longer; a signal, since it may be an endless loop in the job's code."""

    def ring(*_: object) -> None:
        raise JobError(f"{what} took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class ToLog(logging.Handler):
    """The job's log, which executors write to as well."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._log = Log(path)
        self.setFormatter(logging.Formatter("%(asctime)s aggregator: %(message)s", "%Y-%m-%dT%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write((self.format(record) + "\n").encode())

"""What an executor counts of itself for its heartbeats, and the file that says what it ran if it is killed."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from pathlib import Path
from statistics import median

RUNNING_BYTES = 128
_KEPT = 255  # newest overheads, of which the median is reported
_REMEMBERED = 60.0  # seconds for which a job whose lease has ended is still in heartbeats


class RunningFile:
    """A small mapped file with the running job's id: if the executor dies, that job gets the strike."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(handle, RUNNING_BYTES)
            self._map = mmap.mmap(handle, RUNNING_BYTES)
        finally:
            os.close(handle)
        self._empty = bytes(RUNNING_BYTES)
        self.clear()

    def write(self, job: str) -> None:
        self._map[:] = job.encode()[:RUNNING_BYTES].ljust(RUNNING_BYTES, b"\0")

    def clear(self) -> None:
        self._map[:] = self._empty


class TaskStatistics:
    """Written by the main thread, read by the heartbeat thread."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.running, self.since = "", 0.0
        self.busy: dict[str, float] = {}
        self.tasks: dict[str, int] = {}
        self._overheads: deque[float] = deque(maxlen=_KEPT)
        self._total = 0.0
        self._removed: dict[str, float] = {}

    def start(self, job: str, now: float) -> None:
        self.since, self.running = now, job

    def stop(self, job: str, start: float, stop: float, overhead: float) -> None:
        """Counts a task that has ended. `overhead`: seconds for which it could have run and did not."""
        self.running = ""
        self.busy[job] = self.busy.get(job, 0.0) + stop - start
        self.tasks[job] = self.tasks.get(job, 0) + 1
        self._total += stop - start
        self._overheads.append(overhead)

    def removed(self, job: str) -> None:
        """The job's lease has ended: a minute later its figures are dropped."""
        now = time.monotonic()
        self._removed[job] = now
        for old in [j for j, at in self._removed.items() if now - at > _REMEMBERED]:
            del self._removed[old]
            self.busy.pop(old, None)
            self.tasks.pop(old, None)

    def returned(self, job: str) -> None:
        """The job has a lease again: its figures stay."""
        self._removed.pop(job, None)

    @property
    def overhead(self) -> float:
        """Median seconds over the last tasks."""
        recent = list(self._overheads)
        return median(recent) if recent else 0.0

    def idle(self, now: float) -> float:
        """Seconds with no task since the start."""
        running = now - self.since if self.running else 0.0
        return max(0.0, now - self.began - self._total - running)

"""What an executor counts of itself, for its beats and for whoever asks what it was doing when it died."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from pathlib import Path
from statistics import median

RUNNING_BYTES = 128
_KEPT = 255  # overheads that the median is of
_REMEMBERED = 60.0  # seconds for which a job that has left is still counted in beats


class Running:
    """The running job's id in a small mapped file, so that a death can be laid at somebody's door."""

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


def blamed(path: Path) -> str:
    """The job that an executor was running when it died, empty if none."""
    try:
        return path.read_bytes().rstrip(b"\0").decode("utf-8", "replace")
    except OSError:
        return ""


class Tally:
    """Written by the main thread, read by the beating one."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.running, self.since = "", 0.0
        self.busy: dict[str, float] = {}
        self.tasks: dict[str, int] = {}
        self._overheads: deque[float] = deque(maxlen=_KEPT)
        self._total = 0.0
        self._left: dict[str, float] = {}

    def start(self, job: str, now: float) -> None:
        self.since, self.running = now, job

    def stop(self, job: str, start: float, stop: float, overhead: float) -> None:
        """A task has ended."""
        self.running = ""
        self.busy[job] = self.busy.get(job, 0.0) + stop - start
        self.tasks[job] = self.tasks.get(job, 0) + 1
        self._total += stop - start
        self._overheads.append(overhead)

    def left(self, job: str) -> None:
        """The job is gone: after a minute of beats its figures may go too."""
        now = time.monotonic()
        self._left[job] = now
        for gone in [j for j, at in self._left.items() if now - at > _REMEMBERED]:
            del self._left[gone]
            self.busy.pop(gone, None)
            self.tasks.pop(gone, None)

    def returned(self, job: str) -> None:
        self._left.pop(job, None)

    @property
    def overhead(self) -> float:
        """Median of the last tasks."""
        recent = list(self._overheads)
        return median(recent) if recent else 0.0

    def idle(self, now: float) -> float:
        """Seconds with no task since the start."""
        running = now - self.since if self.running else 0.0
        return max(0.0, now - self.began - self._total - running)

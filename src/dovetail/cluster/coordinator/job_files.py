"""Files that the coordinator writes and reads in a job's folder, and the size of logs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from dovetail.cluster.home import Home
from dovetail.cluster.job.submission import Submission, to_file
from dovetail.core.files import write_text

MOST_LOG = 16 << 20
"""Bytes of a process's log; the last half is kept beside it when it is shortened."""


def write(home: Home, job: int, submission: Submission) -> None:
    """Writes the job file and the submission where they do not exist yet."""
    folder = home.job(job)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("job.py", submission.text), ("submission.json", to_file(submission))):
        if not (folder / name).exists():
            write_text(folder / name, text)


def log(home: Home, job: int, line: str) -> None:
    """Adds a line of the cluster's own to the job's log."""
    folder = home.job(job)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} dovetail: {' '.join(line.split())}\n")


def read_log(home: Home, job: int, *, offset: int, limit: int) -> tuple[str, int]:
    """At most `limit` bytes of the job's log and the offset after them; a negative offset: the last `limit` bytes.

    If the log has been shortened since and ends before `offset`, it is read from its beginning.
    """
    try:
        with (home.job(job) / "log.txt").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            at = max(0, size - limit) if offset < 0 else 0 if offset > size else offset
            file.seek(at)
            data = file.read(limit)
    except OSError:
        return "", 0
    if len(data) == limit and (cut := _incomplete(data)):
        data = data[:-cut]
    return data.decode("utf-8", errors="replace"), at + len(data)


def _incomplete(data: bytes) -> int:
    """Bytes at the end that begin a character whose rest is in the next piece."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def shorten(paths: Iterable[Path], *, most: int = MOST_LOG) -> None:
    """Shortens logs of more than `most` bytes: their end goes to NAME.1, and the log begins anew.

    The file itself stays, since its writers hold it open (to append).
    """
    for path in paths:
        with contextlib.suppress(OSError):
            if path.stat().st_size <= most:
                continue
            with path.open("r+b") as file:
                file.seek(-most // 2, os.SEEK_END)
                (path.parent / f"{path.name}.1").write_bytes(file.read(most // 2))
                file.truncate(0)

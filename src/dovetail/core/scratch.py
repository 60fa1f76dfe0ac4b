"""Temporary folders that do not outlive their owner for long, even one that was killed.

The owner holds a lock on a file inside its folder; the kernel lets go of it whenever the owner ends, by whatever means.
So a process that makes a new folder recognises those of dead owners, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".owner"
_YOUNG = 60.0  # seconds in which a folder may still be without its lock


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder named after its purpose; removed at the end, or when the next one of that name is made."""
    prefix = f"dovetail-{name}-"
    _sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with (folder / _LOCK).open("w") as lock:  # not inherited by children: it ends with this process
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write("held")  # an empty file is one that its owner has not locked yet
            lock.flush()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody else's, or removed in this moment
            if folder.stat().st_uid == os.getuid() and not folder.is_symlink() and _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_size:
                return True
    except FileNotFoundError:
        pass
    except BlockingIOError:
        return False
    return time.time() - folder.stat().st_mtime > _YOUNG

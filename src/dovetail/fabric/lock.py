"""One lock per fabric: whoever reads its tables or its description to write them changed holds the lock meanwhile.

The lock is the kernel's (flock) on a file beside the fabric's description. It ends with the process that holds it,
however that process ends. The file holds its owner's process id for the error message of whoever waits in vain.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dovetail.core.errors import Error

RUN = Path("/run/dovetail/fabric")
"""Descriptions (NAME.json) and locks (NAME.lock) of the fabrics of this machine."""
PATIENCE = 30.0
"""Seconds that a change waits for the one before it, which takes well below one second on an idle machine."""


class FabricLock:
    """The lock of one fabric; a thread that holds it may take it again.

    Without a name it is a lock among the threads of this process: for tables that no other process can find.
    """

    def __init__(self, name: str | None, *, patience: float = PATIENCE) -> None:
        self.name, self.patience = name, patience
        self._thread = threading.RLock()
        self._inside = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        end = time.monotonic() + self.patience
        if not self._thread.acquire(timeout=self.patience):
            raise self._refused()
        try:
            if self._inside or not self.name:
                yield
                return
            descriptor = self._open(end)
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
                self._tidy()
                os.close(descriptor)
        finally:
            self._thread.release()

    @property
    def _path(self) -> Path:
        return RUN / f"{self.name}.lock"

    def _open(self, end: float) -> int:
        while True:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                return self._try()
            if time.monotonic() > end:
                raise self._refused()
            time.sleep(0.01)

    def _try(self) -> int:
        RUN.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino != self._path.stat().st_ino:
                raise FileNotFoundError  # its last holder removed it, and somebody may hold the lock of a new file
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _refused(self) -> Error:
        try:
            owner = self._path.read_text() or "another process"
        except OSError:
            owner = "another process"
        return Error(f"fabric {self.name!r}: process {owner} has been changing it for {self.patience:g} s; try again")

    def _tidy(self) -> None:
        """The lock of a fabric that has no description goes with its last holder, and so do empty folders."""
        if not (RUN / f"{self.name}.json").exists():
            self._path.unlink(missing_ok=True)
            for folder in (RUN, RUN.parent):
                with contextlib.suppress(OSError):
                    folder.rmdir()

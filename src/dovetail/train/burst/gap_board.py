"""Idle gaps of a rank, told to whoever shares its device.

Where a plan leaves a rank out of a stage, its device is idle until samples or gradients come back to it. The rank
notes how long that took the last times and, next time, writes into a small shared file until when it will be away; it
writes that it is busy as soon as it computes again. The environment variable DOVETAIL_GAP names the file; without it
nothing of this exists.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Hashable
from pathlib import Path
from typing import ClassVar

from dovetail.planning.sharing.dispatch import SMOOTHING

VARIABLE = "DOVETAIL_GAP"


class Word:
    """Two float64 of time.monotonic() in a mapped file: idle until when (0 is busy), and when that was written."""

    BYTES: ClassVar[int] = 16

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.BYTES)
        self._cells = memoryview(self._map).cast("d")

    @property
    def until(self) -> float:
        return float(self._cells[0])

    @property
    def since(self) -> float:
        return float(self._cells[1])

    def write(self, until: float, now: float) -> None:
        self._cells[0], self._cells[1] = until, now

    def close(self) -> None:
        self._cells.release()
        self._map.close()


class Gaps:
    """One rank's side. `begin` names the gap, since each place in the step has its own length."""

    def __init__(self, path: str | Path) -> None:
        self._word = Word(path)
        self._learnt: dict[Hashable, float] = {}
        self._open: tuple[Hashable, float] | None = None

    def begin(self, place: Hashable) -> None:
        """The device is idle from now on. A gap that is open already goes on: it is one."""
        if self._open is not None:
            return
        now = time.monotonic()
        self._open = place, now
        if place in self._learnt:
            self._word.write(now + self._learnt[place], now)

    def end(self) -> None:
        """The rank computes again."""
        if self._open is None:
            return
        now = time.monotonic()
        self._word.write(0.0, now)
        (place, start), self._open = self._open, None
        before = self._learnt.get(place, now - start)
        self._learnt[place] = before + SMOOTHING * (now - start - before)


def announced() -> Gaps | None:
    """What the environment asks for; a file that cannot be mapped is as good as none."""
    path = os.environ.get(VARIABLE)
    try:
        return Gaps(path) if path else None
    except (OSError, ValueError):
        return None

"""Idle gaps of a rank, announced to background tasks that share its device.

Where a plan leaves a rank out of a stage, its device is idle until samples or gradients come back to it. The rank
learns how long each gap lasts and, from its second time on, writes into a small shared file until when the device will
be idle; it writes that the device is busy as soon as it computes again. The environment variable DOVETAIL_GAP names the
file; without it nothing is announced.
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


class SharedGap:
    """One device's current gap in a mapped file: two float64 in seconds of time.monotonic()."""

    BYTES: ClassVar[int] = 16

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.BYTES)
        self._cells = memoryview(self._map).cast("d")

    @property
    def until(self) -> float:
        """When the gap is expected to end; 0 while the device is busy."""
        return float(self._cells[0])

    @property
    def since(self) -> float:
        """When the entry was written."""
        return float(self._cells[1])

    def write(self, until: float, now: float) -> None:
        self._cells[0], self._cells[1] = until, now

    def close(self) -> None:
        self._cells.release()
        self._map.close()


class GapBoard:
    """Announces one rank's gaps. `begin` names the gap: each place in the step has gaps of its own length."""

    def __init__(self, path: str | Path) -> None:
        self._shared = SharedGap(path)
        self._learnt: dict[Hashable, float] = {}
        self._open: tuple[Hashable, float] | None = None

    def begin(self, place: Hashable) -> None:
        """The device is idle from now on. A gap that is already open just goes on."""
        if self._open is not None:
            return
        now = time.monotonic()
        self._open = place, now
        if place in self._learnt:
            self._shared.write(now + self._learnt[place], now)

    def end(self) -> None:
        """The rank computes again: ends the gap, if one is open, and learns its length."""
        if self._open is None:
            return
        now = time.monotonic()
        self._shared.write(0.0, now)
        (place, start), self._open = self._open, None
        before = self._learnt.get(place, now - start)
        self._learnt[place] = before + SMOOTHING * (now - start - before)


def announced() -> GapBoard | None:
    """The board that the environment asks for, or None; a file that cannot be mapped counts as none."""
    path = os.environ.get(VARIABLE)
    try:
        return GapBoard(path) if path else None
    except (OSError, ValueError):
        return None

"""Time stamps that never wait for the device.

Waiting for an accelerator at every stamp would serialise what should overlap and inflate the very times in question.
So a stamp on an accelerator is an event recorded in the current stream of that device, and becomes a number only after
the pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class Clock:
    """Stamps for one device: `stamp()` as often as needed, then `seconds(stamps)` once the work is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: tuple[float, Any] | None = None
        """A time of the host, and the stamp of the same moment."""

    def stamp(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds from the first stamp to each. On an accelerator the host waits until the last one is over."""
        if not stamps:
            return []
        first = stamps[0]
        if self._device.type == "cpu":
            return [stamp - first for stamp in stamps]
        for stamp in reversed(stamps):  # the last one first: then the others are over, mostly
            if not stamp.query():
                stamp.synchronize()
        return [0.0, *(first.elapsed_time(stamp) / 1000 for stamp in stamps[1:])]  # events tell milliseconds

    def set_zero(self) -> None:
        """Compares an accelerator's clock with that of the host, which waits for it. See `times`."""
        if self._device.type != "cpu":
            stamp = self.stamp()
            stamp.synchronize()
            self._zero = time.perf_counter(), stamp

    def times(self, stamps: Sequence[Any]) -> list[float]:
        """When the stamps were, by time.perf_counter(). On an accelerator the host waits until the last one is over.

        What is a time of the host already stays.
        """
        if self._device.type == "cpu":
            return list(stamps)
        if self._zero is None:
            self.set_zero()
        assert self._zero is not None
        began, zero = self._zero
        events = [stamp for stamp in stamps if not isinstance(stamp, float)]
        after = iter(self.seconds([zero, *events])[1:])
        return [stamp if isinstance(stamp, float) else began + next(after) for stamp in stamps]

"""Time stamps that never wait for the device.

Waiting for an accelerator at every stamp would serialise what should overlap and inflate the very times in question.
So a stamp on an accelerator is an event recorded in its stream, and becomes a number only after the pass.
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

    def stamp(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        # Not tested on the hardware at hand: needs an accelerator.
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds from the first stamp to each. On an accelerator this waits for the device, once."""
        if not stamps:
            return []
        first = stamps[0]
        if self._device.type == "cpu":
            return [stamp - first for stamp in stamps]
        # Not tested on the hardware at hand. Events tell milliseconds.
        torch.accelerator.synchronize(self._device)
        return [0.0, *(first.elapsed_time(stamp) / 1000 for stamp in stamps[1:])]

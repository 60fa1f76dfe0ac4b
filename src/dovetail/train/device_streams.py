"""Order among an accelerator's streams, and numbers that go to a device or come from it.

A call on an accelerator returns before its work is done; work runs in the order of the calls of one device stream only.
What one device stream does with memory that another one uses must be ordered by an event, and memory that was made for
one device stream and is used in another must be marked, or it is reused too early. The device stream that counts is the
current one of the *tensor's* device, which need not be the current device. On the CPU work is done when a call returns:
there nothing below does anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def is_queued(device: torch.device) -> bool:
    """Whether calls on this device return before their work is done."""
    return device.type not in ("cpu", "meta")


def current(device: torch.device) -> torch.Stream | None:
    """The stream in which this thread's calls on the device queue their work; None on the CPU."""
    return torch.accelerator.current_stream(device) if is_queued(device) else None


def new(device: torch.device) -> torch.Stream | None:
    """A stream of the device beside the current one; None on the CPU."""
    return torch.Stream(device) if is_queued(device) else None


def mark(device: torch.device) -> torch.Event | None:
    """An event behind everything that this thread has queued in the device's current stream; None on the CPU."""
    if not is_queued(device):
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def follow(event: torch.Event | None, device: torch.device) -> None:
    """What is queued in the device's current stream from now on comes after the event. The host does not wait."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


class StreamSet:
    """An accelerator's streams that fill one buffer together, as branches of a model do that have their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.Stream] = []

    def add_current(self) -> bool:
        """Adds the device's current stream; whether it was not there yet. False on the CPU."""
        here = current(self._device)
        if here is None or here in self._streams:
            return False
        self._streams.append(here)
        return True

    def join(self) -> None:
        """Lets the device's current stream come after what all of these have queued so far, and forgets them."""
        if (here := current(self._device)) is not None:
            for stream in self._streams:
                if stream != here:
                    here.wait_stream(stream)
            self._streams.clear()


def hold_for(stream: torch.Stream | None, tensors: Iterable[torch.Tensor | None]) -> None:
    """Says that `stream` uses these tensors: the memory of one that is dropped stays until it is through with it."""
    if stream is not None:
        for tensor in tensors:
            if tensor is not None and is_queued(tensor.device) and not tensor.is_sparse:
                tensor.record_stream(stream)


def hold_here(tensors: Iterable[torch.Tensor | None]) -> None:
    """The same for the current stream of each tensor's device."""
    for tensor in tensors:
        if tensor is not None and is_queued(tensor.device):
            hold_for(current(tensor.device), [tensor])


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host as a tensor on the device. The host does not wait for the device, as torch.tensor does."""
    if not is_queued(device):
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)

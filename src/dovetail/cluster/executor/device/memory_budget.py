"""Which jobs have their tensors on a device whose memory does not suffice for all of them.

A job's parameters and optimiser are with its aggregator, on the host. What it has on the device is a copy, which can be
dropped between two tasks and made again: a job whose task is to run evicts the others, the one that ran least recently
first, until the memory that it needs is free. Memory is counted as torch counts it: bytes of live tensors, whoever made
them. This module only decides; it does not know torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Occupant(Protocol):
    """A job that has tensors on the device."""

    def evict(self) -> None:
        """Frees the job's tensors on the device; its next task brings them back."""
        ...


class MemoryBudget:
    """The memory of one device that its jobs may use together."""

    def __init__(self, limit: int, allocated: Callable[[], int]) -> None:
        """`limit`: bytes. `allocated`: returns the bytes of all live tensors on the device."""
        self.limit = limit
        self._allocated = allocated
        self._occupants: list[Occupant] = []  # the least recently used first
        self.evictions = 0
        """Number of evictions so far."""

    @property
    def free(self) -> int:
        """Bytes that are left; below 0 if jobs have taken more than there is."""
        return self.limit - self._allocated()

    def make_room(self, own: Occupant | None, need: int) -> bool:
        """Evicts other jobs than `own` until `need` more bytes are free. False if even then they are not."""
        for other in [o for o in self._occupants if o is not own]:
            if self.free >= need:
                return True
            self._occupants.remove(other)
            self.evictions += 1
            other.evict()
        return self.free >= need

    def used(self, own: Occupant) -> None:
        """The job has its tensors on the device and uses them now."""
        self.left(own)
        self._occupants.append(own)

    def left(self, own: Occupant) -> None:
        """The job has no tensors on the device any more. No error if it had none."""
        if own in self._occupants:
            self._occupants.remove(own)

"""Backfilling with a reservation (EASY): whoever is first in the queue is not kept waiting by those that pass it.

Gangs only: each device has one holder, and any free devices will do, so that counting them is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reservation:
    """Of the first job in the queue."""

    time: float
    """When enough devices are predicted to be free for it."""
    spare: int
    """Devices that will be free then beyond those it needs."""


def reserve(width: int, free: int, running: Sequence[tuple[float, int]]) -> Reservation:
    """For a job of `width` devices that does not fit the `free` ones. `running` has (predicted end, devices)."""
    assert width > free, "a job that fits needs no reservation"
    time = float("inf")  # it can never run: nobody needs to wait for it
    for end, devices in sorted(running):
        if end > time:
            break
        free += devices
        if free >= width:
            time = end
    return Reservation(time, max(0, free - width))


def may_pass(reservation: Reservation, width: int, end: float) -> bool:
    """Whether a job of `width` devices that would end at `end` leaves the reservation as it is."""
    return end <= reservation.time or width <= reservation.spare

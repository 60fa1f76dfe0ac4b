"""Orders: which job is admitted first, and whose ready task an idle device takes first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Literal

from dovetail.core.job import Shape

Order = Literal["fifo", "srpt", "srsf", "las", "cp", "queues", "turns"]
Precedence = tuple[bool, float, float, int]
"""Smaller goes first: background last, then the order's own figure, then arrival."""


class Standing:
    """A job's progress and attained service, by which orders compare it; outlives its leases. Updated at iteration
    boundaries."""

    __slots__ = ("arrival", "attained", "background", "done", "rounds", "serial", "shape", "slice_end", "total", "turn")

    def __init__(self, *, serial: int, arrival: float, total: float, shape: Shape, background: bool = False) -> None:
        self.serial, self.arrival, self.background = serial, arrival, background
        self.total, self.done = total, 0.0  # iterations
        self.rounds = 0  # iterations that ran, whatever their width
        self.attained = 0.0  # device-seconds that its tasks took; under gangs, that it held
        self.turn = arrival  # when its last time slice ended
        self.slice_end = float("-inf")  # end of the time slice it is in; minus infinity while it waits
        self.shape = shape


def precedence(order: Order, s: Standing, *, thresholds: tuple[float, ...] = (), now: float = 0.0) -> Precedence:
    """The sort key of a job under an order: the smaller, the earlier.

    fifo: older first, so that newer jobs only fill gaps. srpt: least remaining device-seconds in tasks; srsf: the same
    in device-seconds that a gang holds, its time off the devices included. las: least attained device-seconds, which
    is fair. cp: longest remaining critical path. queues: attained service in classes, FIFO within a class (Tiresias).
    turns: the job whose last slice ended longest ago; a slice under way is not cut short (Gandiva).
    """
    left = (s.total - s.done) / s.shape.progress  # iterations of its present width
    if order == "fifo":
        figure = 0.0
    elif order == "srpt":
        figure = left * s.shape.work
    elif order == "srsf":
        figure = left * s.shape.held
    elif order == "las":
        figure = s.attained
    elif order == "cp":
        figure = -left * s.shape.period
    elif order == "queues":
        figure = float(bisect_right(thresholds, s.attained))
    elif s.slice_end == float("-inf"):
        figure = s.turn
    else:
        figure = float("-inf") if now < s.slice_end - 1e-9 else now
    return s.background, figure, s.arrival, s.serial


def classes(service: Iterable[float]) -> tuple[float, float]:
    """Thresholds of attained service, in device-seconds: the median and the ninth decile of whole jobs' service.

    Fixed thresholds would put all jobs of a trace of short jobs into the first class, which is first come first served.
    """
    ordered = sorted(service)
    last = len(ordered) - 1
    return ordered[last // 2], ordered[last * 9 // 10]


def chosen(ordered: list[tuple[int, int]], devices: int) -> set[int]:
    """Gangs that should hold devices now: the first in the order that fit side by side. `ordered` has (job, width)."""
    take: set[int] = set()
    for key, width in ordered:
        if width <= devices:
            take.add(key)
            devices -= width
            if not devices:
                break
    return take

"""Who goes first: the orders in which jobs are admitted, and in which their ready tasks take an idle device."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from dovetail.core.job import Shape

Order = Literal["fifo", "srpt", "las", "cp", "queues", "turns"]
Rank = tuple[bool, float, float, int]
"""Smaller goes first: background last, then the order's own figure, then arrival."""


class Standing:
    """What a job has had and still wants; it outlives the job's leases. Updated at iteration boundaries."""

    __slots__ = ("arrival", "attained", "background", "done", "rounds", "serial", "shape", "slice_end", "total", "turn")

    def __init__(self, *, serial: int, arrival: float, total: float, shape: Shape, background: bool = False) -> None:
        self.serial, self.arrival, self.background = serial, arrival, background
        self.total, self.done = total, 0.0  # iterations
        self.rounds = 0  # iterations run, at whatever width
        self.attained = 0.0  # device-seconds
        self.turn = arrival  # when its last time slice ended
        self.slice_end = float("-inf")
        self.shape = shape


def rank(order: Order, s: Standing, *, thresholds: tuple[float, ...] = (), now: float = 0.0) -> Rank:
    """The job's place under an order.

    fifo: older first, so that newer jobs only fill gaps. srpt: least remaining device-seconds. las: least attained
    device-seconds, which is fair. cp: longest remaining critical path. queues: attained service in classes, FIFO
    within a class (Tiresias). turns: whoever's last slice ended longest ago; a slice under way is not cut (Gandiva).
    """
    if order == "fifo":
        figure = 0.0
    elif order == "srpt":
        figure = (s.total - s.done) * s.shape.work
    elif order == "las":
        figure = s.attained
    elif order == "cp":
        figure = -(s.total - s.done) * s.shape.period
    elif order == "queues":
        figure = float(bisect_right(thresholds, s.attained))
    else:
        figure = float("-inf") if now < s.slice_end - 1e-9 else s.turn
    return s.background, figure, s.arrival, s.serial


def chosen(ranked: list[tuple[int, int]], devices: int, *, backfill: bool = True) -> set[int]:
    """Gangs that should hold devices now: the best-ranked ones that fit side by side. `ranked` has (job, width)."""
    take: set[int] = set()
    for key, width in ranked:
        if width <= devices:
            take.add(key)
            devices -= width
            if not devices:
                break
        elif not backfill:
            break
    return take

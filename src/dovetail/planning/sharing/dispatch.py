"""Dispatch: which ready task an idle device takes. Called at every task end and every release; O(residents).

A guard needs to know how long tasks will take. The prediction begins with the job's profile and follows the measured
durations by an exponentially weighted mean, one for each job and depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from dovetail.core.job import Shape

from .priority import Precedence

R = TypeVar("R", bound="Resident")
SMOOTHING = 0.2
"""Weight of the newest task in a prediction: a lasting change is followed within ten tasks or so, and tasks that vary
by 4 % leave an error of 1.3 % (√(0.2 / 1.8) of it)."""


class Resident:
    """One admitted job between its barriers: which of its tasks are ready, running, done.

    `release` makes the tasks of the first stage ready, `take` hands one to a device, `ended` counts it; when the last
    task of a stage has ended the next stage is made ready, and after the last stage the iteration is over.
    """

    __slots__ = (
        "at",
        "background",
        "devices",
        "eta",
        "key",
        "learnt",
        "left",
        "next_release",
        "precedence",
        "ready",
        "shape",
        "stage",
    )

    def __init__(self, key: int, shape: Shape, devices: Sequence[int], precedence: Precedence) -> None:
        self.key, self.precedence, self.background = key, precedence, precedence[0]
        self.place(shape, devices)
        self.eta = 0.0  # when the running tasks of this stage are predicted to end
        self.next_release = 0.0  # when the next iteration starts, while the job is off its devices
        self.left = 0
        self.learnt: dict[float, float] = {}  # profiled seconds of a task → predicted seconds

    def place(self, shape: Shape, devices: Sequence[int]) -> None:
        """Sets the shape and the devices; called between iterations."""
        self.shape, self.devices, self.stage = shape, tuple(devices), 0
        self.ready: list[int] = []  # workers whose tasks no device has taken, by ascending duration
        self.at = {d: i for i, d in enumerate(self.devices)} if shape.pinned else {}

    def release(self) -> None:
        """Starts an iteration: the tasks of its first stage are ready."""
        self.stage, self.next_release = 0, 0.0
        self._open()

    def _open(self) -> None:
        self.left = len(self.shape.tasks[self.stage])
        self.ready = list(range(self.left))
        self.eta = 0.0

    def offers(self, device: int) -> float:
        """Profiled seconds of the task that the device would get, the longest ready one; 0.0 if there is none."""
        if not self.ready:
            return 0.0
        tasks = self.shape.tasks[self.stage]
        if not self.at:
            return tasks[self.ready[-1]]
        worker = self.at[device]
        return tasks[worker] if worker in self.ready else 0.0

    def take(self, device: int) -> int:
        """Hands a task to the device; returns its worker."""
        if not self.at:
            return self.ready.pop()
        worker = self.at[device]
        self.ready.remove(worker)
        return worker

    def ended(self) -> bool:
        """Counts a task that has ended; the next stage is ready at once. True if it was the iteration's last task."""
        self.left -= 1
        if self.left:
            return False
        if self.stage + 1 == len(self.shape.tasks):
            return True
        self.stage += 1
        self._open()
        return False

    def observe(self, profiled: float, seconds: float) -> None:
        """Learns from a task that took `seconds`; `profiled`, its seconds by the profile, stands for its depth."""
        before = self.learnt.get(profiled, profiled)
        self.learnt[profiled] = before + SMOOTHING * (seconds - before)

    def predicted(self, profiled: float) -> float:
        """Predicted seconds of a task that takes `profiled` seconds by its profile."""
        return self.learnt.get(profiled, profiled)

    def wanted(self, device: int) -> float:
        """When this job is predicted to want the device again; a burst job leaves gaps between its stages there."""
        if self.left:
            if self.offers(device):
                return 0.0
            if not self.at and self.ready:
                return 0.0
            at, stage = self.eta, self.stage + 1
        else:
            at, stage = self.next_release, 0
        tasks = self.shape.tasks
        if not self.at:
            return at + (self.shape.off_device if self.left else 0.0)
        worker = self.at[device]
        while True:
            if stage == len(tasks):
                at, stage = at + self.shape.off_device, 0
            if worker < len(tasks[stage]):
                return at
            at, stage = at + max(map(self.predicted, tasks[stage])), stage + 1

    def spares(self, device: int, now: float, seconds: float) -> bool:
        """Whether a task of a later job that is predicted to take `seconds` would have ended before this job's turn."""
        return now + seconds - 1e-9 <= self.wanted(device)


def pick(residents: Sequence[R], device: int, now: float, guard: Literal["off", "background", "all"]) -> R | None:
    """The resident whose task an idle device starts now, or None. `residents` stand in order of precedence.

    The first with a ready task wins. A guarded task is passed over if it is predicted to end after a job of better
    precedence wants the device again; the next in the order may be short enough.
    """
    for i, r in enumerate(residents):
        if not r.ready or (r.at and not r.offers(device)):
            continue
        if not i or guard == "off" or (guard == "background" and not r.background):
            return r
        seconds = r.predicted(r.offers(device))
        if all(residents[j].spares(device, now, seconds) for j in range(i)):
            return r
    return None

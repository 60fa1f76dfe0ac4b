"""Dispatch: which ready task an idle device takes. Called at every task end and every release; O(residents).

What a guard needs to know, how long tasks will take, is learnt: a job's profile says what a task of each depth should
take, and every task that ends corrects that by an exponentially weighted mean, one for each job and depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from dovetail.core.job import Shape

from .priority import Rank

R = TypeVar("R", bound="Resident")
SMOOTHING = 0.2
"""Weight of the newest task in a prediction: a lasting change is believed after about ten tasks, and single tasks that
vary by 4 % leave an error of 1.3 % (√(0.2 / 1.8) of it)."""


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
        "rank",
        "ready",
        "shape",
        "stage",
    )

    def __init__(self, key: int, shape: Shape, devices: Sequence[int], rank: Rank) -> None:
        self.key, self.rank, self.background = key, rank, rank[0]
        self.place(shape, devices)
        self.eta = 0.0  # when the running tasks of this stage are predicted to have ended
        self.next_release = 0.0  # of the next iteration, while the job is off its devices
        self.left = 0
        self.learnt: dict[float, float] = {}  # seconds of a task by its profile: seconds that it is predicted to take

    def place(self, shape: Shape, devices: Sequence[int]) -> None:
        """Between iterations: another shape, other devices."""
        self.shape, self.devices, self.stage = shape, tuple(devices), 0
        self.ready: list[int] = []  # workers whose tasks nobody has taken, by ascending duration
        self.at = {d: i for i, d in enumerate(self.devices)} if shape.pinned else {}

    def release(self) -> None:
        """An iteration may start."""
        self.stage, self.next_release = 0, 0.0
        self._open()

    def _open(self) -> None:
        self.left = len(self.shape.tasks[self.stage])
        self.ready = list(range(self.left))
        self.eta = 0.0

    def offers(self, device: int) -> float:
        """Seconds of the task that the device would get, 0.0 if there is none: the longest ready one first."""
        if not self.ready:
            return 0.0
        tasks = self.shape.tasks[self.stage]
        if not self.at:
            return tasks[self.ready[-1]]
        worker = self.at[device]
        return tasks[worker] if worker in self.ready else 0.0

    def take(self, device: int) -> int:
        """The worker whose task the device starts now."""
        if not self.at:
            return self.ready.pop()
        worker = self.at[device]
        self.ready.remove(worker)
        return worker

    def ended(self) -> bool:
        """One task has ended. True if that was the iteration's last; a further stage is made ready at once."""
        self.left -= 1
        if self.left:
            return False
        if self.stage + 1 == len(self.shape.tasks):
            return True
        self.stage += 1
        self._open()
        return False

    def observe(self, profiled: float, seconds: float) -> None:
        """A task that should have taken `profiled` seconds, which stand for its depth, took `seconds`."""
        before = self.learnt.get(profiled, profiled)
        self.learnt[profiled] = before + SMOOTHING * (seconds - before)

    def predicted(self, profiled: float) -> float:
        """Seconds that a task will take which should take `profiled`."""
        return self.learnt.get(profiled, profiled)

    def wanted(self, device: int) -> float:
        """When this job is predicted to want the device again; burst stages that leave it idle are its gaps."""
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
        """Whether a task of lower rank that is predicted to take `seconds` would have ended before this job's turn."""
        return now + seconds - 1e-9 <= self.wanted(device)


def pick(residents: Sequence[R], device: int, now: float, guard: Literal["off", "background", "all"]) -> R | None:
    """The resident whose task an idle device starts now, or None. `residents` stand in order of rank.

    The first with a ready task wins. A guarded task is passed over if it is predicted to end after a job of better
    rank wants the device again; the next in rank may be short enough.
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

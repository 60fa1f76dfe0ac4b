"""Dispatch: which ready task an idle device takes. Called at every task end and every release; O(residents)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dovetail.core.job import Shape

from .priority import Rank

NEVER = float("inf")


class Resident:
    """One admitted job between its barriers: which of its tasks are ready, running, done.

    `release` makes the tasks of the first stage ready, `take` hands one to a device, `ended` counts it; when the last
    task of a stage has ended the next stage is made ready, and after the last stage the iteration is over.
    """

    __slots__ = ("_at", "_ready", "background", "devices", "eta", "key", "left", "next_release", "rank", "shape", "stage")

    def __init__(self, key: int, shape: Shape, devices: Sequence[int], rank: Rank) -> None:
        self.key, self.rank, self.background = key, rank, rank[0]
        self.place(shape, devices)
        self.eta = 0.0  # when the running tasks of this stage are predicted to have ended
        self.next_release = 0.0  # of the next iteration, while the job is off its devices
        self.left = 0

    def place(self, shape: Shape, devices: Sequence[int]) -> None:
        """Between iterations: another shape, other devices."""
        self.shape, self.devices, self.stage = shape, tuple(devices), 0
        self._ready: list[int] = []
        self._at = {d: i for i, d in enumerate(self.devices)} if shape.pinned else {}

    def release(self) -> None:
        """An iteration may start."""
        self.stage, self.next_release = 0, 0.0
        self._open()

    def _open(self) -> None:
        self.left = len(self.shape.tasks[self.stage])
        self._ready = list(range(self.left))
        self.eta = 0.0

    def offers(self, device: int) -> float:
        """Seconds of the task that the device would get, 0.0 if there is none: the longest ready one first."""
        if not self._ready:
            return 0.0
        tasks = self.shape.tasks[self.stage]
        if not self._at:
            return tasks[self._ready[-1]]
        worker = self._at[device]
        return tasks[worker] if worker in self._ready else 0.0

    def take(self, device: int) -> int:
        """The worker whose task the device starts now."""
        if not self._at:
            return self._ready.pop()
        worker = self._at[device]
        self._ready.remove(worker)
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

    def wanted(self, device: int) -> float:
        """When this job is predicted to want the device again; burst stages that leave it idle are its gaps."""
        if self.left:
            if self.offers(device):
                return 0.0
            if not self._at and self._ready:
                return 0.0
            at, stage = self.eta, self.stage + 1
        else:
            at, stage = self.next_release, 0
        tasks = self.shape.tasks
        if not self._at:
            return at + (self.shape.off_device if self.left else 0.0)
        worker = self._at[device]
        while True:
            if stage == len(tasks):
                at, stage = at + self.shape.off_device, 0
            if worker < len(tasks[stage]):
                return at
            at, stage = at + max(tasks[stage]), stage + 1


def pick(
    residents: Sequence[Resident], device: int, now: float, guard: Literal["off", "background", "all"]
) -> Resident | None:
    """The resident whose task an idle device starts now, or None.

    The best rank with a ready task wins. A guarded task is passed over if it is predicted to end after a job of better
    rank wants the device again; the next in rank may be short enough.
    """
    best: Resident | None = None
    for r in residents:
        if (best is None or r.rank < best.rank) and r.offers(device):
            best = r
    if best is None or guard == "off" or len(residents) == 1 or (guard == "background" and not best.background):
        return best
    for r in sorted((r for r in residents if r.offers(device)), key=lambda r: r.rank):
        end = now + r.offers(device)
        if all(end <= other.wanted(device) + 1e-9 for other in residents if other.rank < r.rank):
            return r
    return None

"""The state of one job of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.job import Job
from dovetail.planning.sharing.priority import Standing

from .tasks import NEVER


@dataclass
class JobProgress:
    """One job of the simulation: its phase, its devices, and what happens to it next. Times in seconds."""

    job: Job
    standing: Standing
    part: int
    """Its partition of the devices, where the policy divides them; else 0."""
    phase: int = 0
    phase_end: float = 0.0
    """Iterations after which the present phase ends, counted from the job's first."""
    running: bool = False
    leaving: bool = False
    """Whether it is preempted at its next iteration boundary."""
    change: tuple[int, list[int]] | None = None
    """What changes at its next iteration boundary: workers more or fewer, and its devices from then on."""
    devices: tuple[int, ...] = ()
    lease_start: float = 0.0
    first_start: float = NEVER
    """When it first got devices."""
    finish: float = NEVER
    restarts: int = 0

    def seconds_left(self) -> float:
        """Seconds until it finishes on devices of its own, as its profile predicts."""
        s = self.standing
        left = (self.phase_end - s.done) * s.shape.period / s.shape.progress
        for i in range(self.phase + 1, len(self.job.phases)):
            left += self.job.phases[i].iterations * self.job.shape(i).period
        return left

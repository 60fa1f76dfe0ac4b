"""One job on its way through the simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.job import Job
from dovetail.planning.sharing.priority import Standing

NEVER = float("inf")


@dataclass
class Ticket:
    """A job on its way through the cluster."""

    job: Job
    standing: Standing
    part: int
    phase: int = 0
    phase_end: float = 0.0
    running: bool = False
    leaving: bool = False
    change: tuple[int, list[int]] | None = None
    """What happens at its next boundary: workers more or fewer, and its devices from then on."""
    devices: tuple[int, ...] = ()
    lease_start: float = 0.0
    first_start: float = NEVER
    finish: float = NEVER
    restarts: int = 0

    def seconds_left(self) -> float:
        """Until it has finished, on devices of its own, as its profile predicts."""
        s = self.standing
        left = (self.phase_end - s.done) * s.shape.period / s.shape.progress
        for i in range(self.phase + 1, len(self.job.phases)):
            left += self.job.phases[i].iterations * self.job.shape(i).period
        return left

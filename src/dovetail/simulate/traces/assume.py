"""What is assumed of jobs' iterations where a trace does not say it. `dovetail schedule` prints these assumptions."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dovetail.core.errors import Error
from dovetail.core.job import Job, JobPhase

GIB = 2**30

DUTIES = {"gpu-bound": 0.95, "typical": 0.85, "network-bound": 0.45, "input-bound": 0.15}
"""Share of an iteration in which a job uses its devices, by kind of job."""


@dataclass(frozen=True)
class Assumed:
    """The iteration of a job of which only the duration is known."""

    shape: str = "typical"
    """One of DUTIES, or "mixed": one of them for each job, drawn by the seed."""
    iteration: float = 0.4
    """Seconds of an iteration on devices of its own, with full backpropagation."""
    backward: float = 2 / 3
    """Share of the device time that is backward: twice forward's, as in nearly every network."""
    persistent_bytes: int = 3 * GIB // 2
    ephemeral_bytes: int = 4 * GIB
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape != "mixed" and self.shape not in DUTIES:
            raise Error(f"shape {self.shape!r}: expected one of {', '.join(DUTIES)}, mixed")
        if self.iteration <= 0 or not 0 <= self.backward <= 1:
            raise Error("shape: expected an iteration above 0 seconds and a backward share between 0 and 1")

    def duty(self, serial: int) -> float:
        if self.shape != "mixed":
            return DUTIES[self.shape]
        return random.Random(self.seed * 1_000_003 + serial).choice(sorted(DUTIES.values()))

    def job(self, *, name: str, serial: int, arrival: float, duration: float, workers: int, tenant: str = "") -> Job:
        """A job that would take `duration` seconds on devices of its own."""
        iteration = min(self.iteration, duration)
        return self.measured(
            name=name,
            arrival=arrival,
            iterations=max(1, round(duration / iteration)),
            workers=workers,
            device=self.duty(serial) * iteration,
            iteration=iteration,
            tenant=tenant,
        )

    def measured(
        self,
        *,
        name: str,
        arrival: float,
        iterations: int,
        workers: int,
        device: float,
        iteration: float,
        tenant: str = "",
    ) -> Job:
        """A job whose iteration is known: `device` seconds on the devices out of `iteration`."""
        device = min(device, iteration)
        return Job(
            name=name,
            arrival=arrival,
            phases=(JobPhase(iterations=iterations, workers=workers),),
            forward=device * (1 - self.backward),
            backward=device * self.backward,
            off_device=iteration - device,
            persistent_bytes=self.persistent_bytes,
            ephemeral_bytes=self.ephemeral_bytes,
            tenant=tenant,
        )

    def duties(self) -> str:
        if self.shape == "mixed":
            return " or ".join(f"{d:.0%}" for d in sorted(DUTIES.values()))
        return f"{DUTIES[self.shape]:.0%}"

    def describe(self) -> str:
        device = f"{self.duties()} of it on the device, {self.backward:.0%} of that backward"
        return f"iterations of {self.iteration:g} s, {device}"

    def memory(self) -> str:
        stays, more = self.persistent_bytes / GIB, self.ephemeral_bytes / GIB
        return f"{stays:g} GiB of a job on each of its devices, {more:g} GiB more while a task runs"

"""Small shapes of jobs for the tests of this room."""

from __future__ import annotations

from dovetail.core.job import Job, JobPhase, Shape


def shape(workers: int = 1, *, device: float = 0.5, persistent: int = 10, ephemeral: int = 20) -> Shape:
    """An iteration of one second, `device` of it on the device."""
    phase = JobPhase(iterations=1, workers=workers)
    return Job(
        name="j", phases=(phase,), forward=device, off_device=1 - device, persistent_bytes=persistent,
        ephemeral_bytes=ephemeral,
    ).shape()  # fmt: skip

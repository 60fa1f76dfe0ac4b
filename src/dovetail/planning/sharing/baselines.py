"""What the gang schedulers that jigsaw competes with decide beyond its own rules: EASY's reservation, static partition.

Gangs only: each device has one holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.core.errors import Error
from dovetail.core.job import Job

from .pack import ClusterSize, Devices, Mask


@dataclass(frozen=True)
class Reservation:
    """Devices promised to the first job in the queue, so that jobs which pass it do not delay it (EASY backfilling)."""

    time: float
    """When enough devices are predicted to be free for the job, in seconds of the schedule's clock."""
    spare: int
    """Devices that will be free then beyond those the job needs."""


def reserve(width: int, free: int, running: Sequence[tuple[float, int]]) -> Reservation:
    """The reservation of a job of `width` devices that does not fit the `free` ones.

    `running` lists every running job as (predicted end, devices). Any free devices will do, so counting is enough.
    """
    assert width > free, "a job that fits needs no reservation"
    time = float("inf")  # the job can never run: no job needs to wait for it
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


def part_of(job: Job, parts: dict[str, Mask]) -> str:
    """The partition a job belongs to: its tenant's, or background and foreground, or narrow and wide."""
    for name in _labels(job):
        if name in parts:
            return name
    raise AssertionError(f"job {job.name!r} belongs to no partition of {list(parts)}")


def partition(jobs: Sequence[Job], cluster: ClusterSize) -> dict[str, Mask]:
    """Divides the devices once and for all, in proportion to the work: among tenants; if there is only one, among
    foreground and background; if there is only one of these, among jobs of one worker and of several.

    Every part gets at least as many devices as its widest job needs.
    """
    for labels in zip(*map(_labels, jobs), strict=True):
        names = sorted(set(labels))
        if len(names) > 1:
            break
    work = dict.fromkeys(names, 0.0)
    widest = dict.fromkeys(names, 1)
    for label, job in zip(labels, jobs, strict=True):
        work[label] += job.gang_work
        widest[label] = max(widest[label], *(p.workers for p in job.phases))
    if sum(widest.values()) > cluster.devices:
        raise Error(
            f"static-partition: the widest jobs of {len(names)} partitions need {sum(widest.values())} devices, "
            f"the cluster has {cluster.devices}"
        )
    total = sum(work.values())
    share = dict(widest)
    for _ in range(cluster.devices - sum(widest.values())):  # one device at a time to the part that lacks most
        share[max(names, key=lambda n: work[n] / total * cluster.devices - share[n])] += 1
    masks: dict[str, Mask] = {}
    size, at = Devices(cluster).exists.size, 0
    for name in names:
        mask = np.zeros(size, dtype=np.bool_)
        mask[at : at + share[name]] = True
        masks[name], at = mask, at + share[name]
    return masks


def _labels(job: Job) -> tuple[str, str, str]:
    """The parts that a job could belong to, by each way of dividing."""
    kind = "background" if job.background else "foreground"
    return f"tenant {job.tenant}", kind, "one worker" if job.workers == 1 else "several workers"

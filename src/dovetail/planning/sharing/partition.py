"""Static partition: the devices divided among tenants once and for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.core.errors import Error
from dovetail.core.job import Job

from .pack import Cluster, Devices, Mask


def part_of(job: Job, parts: dict[str, Mask]) -> str:
    """The partition a job belongs to: its tenant's, or background and foreground, or narrow and wide."""
    for name in (f"tenant {job.tenant}", "background" if job.background else "foreground",
                 "one worker" if job.workers == 1 else "several workers"):  # fmt: skip
        if name in parts:
            return name
    raise AssertionError(f"job {job.name!r} belongs to no partition of {list(parts)}")


def partition(jobs: Sequence[Job], cluster: Cluster) -> dict[str, Mask]:
    """Divides the devices among tenants, else foreground and background, else one worker and several, by their work.

    Everyone gets at least the width of its widest job.
    """
    for labels in (
        [f"tenant {j.tenant}" for j in jobs],
        ["background" if j.background else "foreground" for j in jobs],
        ["one worker" if j.workers == 1 else "several workers" for j in jobs],
    ):
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
    for _ in range(cluster.devices - sum(widest.values())):  # one device at a time to whoever lacks most
        share[max(names, key=lambda n: work[n] / total * cluster.devices - share[n])] += 1
    masks: dict[str, Mask] = {}
    size, at = Devices(cluster).exists.size, 0
    for name in names:
        mask = np.zeros(size, dtype=np.bool_)
        mask[at : at + share[name]] = True
        masks[name], at = mask, at + share[name]
    return masks

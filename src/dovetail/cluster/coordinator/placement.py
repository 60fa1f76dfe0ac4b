"""Which devices a job gets: the simulator's own admission rules (`planning.sharing.pack`) on the cluster's devices.

A device with a job of promised speed (a foreground job, or a gang) takes background jobs only besides it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from dovetail.cluster.engines.base import ClusterDevice
from dovetail.core.job import Shape
from dovetail.planning.sharing import pack
from dovetail.planning.sharing.pack import Mask
from dovetail.planning.sharing.policies import SchedulingPolicy
from dovetail.planning.sharing.priority import Precedence, precedence
from dovetail.planning.sharing.repack import crowded, relocate

from .job_state import ActiveJob

QueueKey = tuple[bool, Precedence]
"""Smaller is placed first."""
RESTED = 10.0
"""Seconds that a job keeps its devices at least before it is moved to less crowded ones."""


def queue_key(policy: SchedulingPolicy, job: ActiveJob) -> QueueKey:
    """Orders the queue: foreground jobs first, then by the policy's order."""
    return job.share != "foreground", precedence(policy.order, job.standing, thresholds=policy.thresholds)


class Placement:
    """Which jobs have leases of which devices, as `planning.sharing.pack` counts them (`books`).

    Nodes may differ in size: slots are padded so that every node has as many as the largest; a slot without a device
    is never free.
    """

    def __init__(self, devices: Sequence[ClusterDevice], policy: SchedulingPolicy) -> None:
        assert devices, "a cluster has devices"
        self.policy, self.rules = policy, policy.rules
        self.devices = {d.index: d for d in devices}
        nodes: dict[str, list[int]] = {}
        for d in sorted(devices, key=lambda d: d.index):
            nodes.setdefault(d.node, []).append(d.index)
        size = max(map(len, nodes.values()))
        self.slot = {d: i * size + j for i, members in enumerate(nodes.values()) for j, d in enumerate(members)}
        self.at = {slot: d for d, slot in self.slot.items()}
        self.books = pack.Devices(
            pack.ClusterSize(devices=len(nodes) * size, node=size, device_bytes=min(d.bytes for d in devices))
        )
        self.books.exists[:] = [i in self.at for i in range(len(self.books.exists))]
        self.books.load[~self.books.exists] = np.inf
        self._regular = np.zeros(len(self.books.exists), dtype=np.int64)  # jobs there that are not background jobs
        self._promised = np.zeros(len(self.books.exists), dtype=np.int64)  # of those, with promised speed

    # -- leases --

    def has_lease(self, job: ActiveJob) -> bool:
        return job.id in self.books.residencies

    def lease(self, job: ActiveJob, devices: Iterable[int]) -> bool:
        """Leases devices to the job for its present shape; False, and no lease, where memory does not suffice."""
        slots = [self.slot[d] for d in devices]
        if not self._fits(job.shape, slots):
            return False
        self.books.add(job.id, job.shape, slots, background=job.background)
        self._regular[slots] += not job.background
        self._promised[slots] += job.promised and not job.background
        return True

    def release(self, job: ActiveJob) -> None:
        if self.has_lease(job):
            slots = self.books.remove(job.id)
            self._regular[slots] -= not job.background
            self._promised[slots] -= job.promised and not job.background

    def resize(self, job: ActiveJob, shape: Shape) -> bool:
        """Changes the job's shape to a measured one; False, and the lease is released, if that does not fit."""
        devices = [self.at[s] for s in self.books.residencies[job.id].devices]
        self.release(job)
        job.standing.shape = shape
        return self.lease(job, devices)

    def _fits(self, shape: Shape, slots: Sequence[int]) -> bool:
        b = self.books
        need = b.persistent[slots] + shape.persistent_bytes + np.maximum(b.ephemeral[slots], shape.ephemeral_bytes)
        return bool((need <= b.cluster.device_bytes).all())

    # -- questions, which change nothing --

    def allowed(self, job: ActiveJob, ready: Collection[int]) -> Mask:
        """Slots of `ready` devices that promises of speed leave open to the job."""
        mask: Mask = np.zeros(len(self.books.exists), dtype=np.bool_)
        mask[[self.slot[d] for d in ready]] = True
        if not job.background:
            mask &= (self._regular if job.promised else self._promised) == 0
        return mask

    def find(self, job: ActiveJob, ready: Collection[int]) -> list[int] | None:
        """Devices for the job now, or None."""
        mask = self.allowed(job, ready)
        slots = pack.admit(self.books, job.shape, self.rules, allowed=mask, background=job.background)
        return None if slots is None else [self.at[s] for s in slots]

    def lack(self, job: ActiveJob, ready: Collection[int]) -> str:
        """The reason for which the job cannot be placed now; empty if it can."""
        everywhere = np.zeros(len(self.books.exists), dtype=np.bool_)
        everywhere[[self.slot[d] for d in ready]] = True
        line = pack.waiting_reason(self.books, job.shape, self.rules, allowed=everywhere, background=job.background)
        if line:
            return line
        if self.find(job, ready) is not None:
            return ""
        have = int(self.allowed(job, ready).sum())
        kept = "other jobs" if job.promised else "jobs of promised speed"
        return f"promise: {have} devices are free of {kept}, it needs {job.shape.width}"

    def better(
        self, running: Iterable[ActiveJob], ready: Collection[int], *, now: float
    ) -> tuple[ActiveJob, list[int]] | None:
        """A job that would be less crowded on other devices, and those; None if no job would gain enough."""
        if not self.policy.repack or len(ready) < len(self.devices):
            return None
        jobs = {j.id: j for j in running}
        for key in crowded(self.books)[:4]:
            job = jobs.get(key)
            if job is None or job.promised or self._promised.any() or now - job.placed_at < RESTED:
                continue
            slots = relocate(self.books, key, self.rules)
            if slots is not None:
                return job, [self.at[s] for s in slots]
        return None


def admissions(
    placement: Placement, queue: Sequence[ActiveJob], ready: Collection[int], *, may: Collection[int]
) -> list[ActiveJob]:
    """Places the jobs that fit, in the queue's order: those jobs, with their leases in `devices`.

    `may` are the numbers of jobs that are described and whose pause after a strike is over. Later jobs pass one that
    does not fit if the policy allows backfilling; others of the same shape are not tried again.
    """
    found: list[ActiveJob] = []
    refused: set[tuple[object, ...]] = set()
    for job in queue:
        s = job.shape
        kind = (s.width, s.duty, s.persistent_bytes, s.ephemeral_bytes, job.share, job.is_gang)
        devices = placement.find(job, ready) if job.id in may and kind not in refused else None
        if devices is not None and placement.lease(job, devices):
            job.devices = tuple(devices)
            found.append(job)
            continue
        if job.id in may:
            refused.add(kind)
        if placement.policy.backfill == "none":
            break
    return found


def to_prepare(queue: Sequence[ActiveJob], *, now: float, most: int) -> list[ActiveJob]:
    """The jobs whose aggregators to start now, so that at most `most` aggregators wait for devices."""
    waiting = sum(j.process for j in queue)
    idle = [j for j in queue if not j.is_gang and not j.process and j.retry_at <= now]
    return idle[: max(0, most - waiting)]

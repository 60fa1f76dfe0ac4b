"""Where jobs go: the simulator's own admission rules (`planning.pack`) on the devices that are really there.

A device with a job of promised speed (foreground, or a gang, which holds it) takes besides it background jobs only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from dovetail.cluster.engines.base import Device
from dovetail.core.job import Shape
from dovetail.planning.sharing import pack
from dovetail.planning.sharing.pack import Mask
from dovetail.planning.sharing.policies import Policy
from dovetail.planning.sharing.priority import Rank, rank
from dovetail.planning.sharing.repack import crowded, relocate

from .job_state import Live

Place = tuple[bool, Rank]
RESTED = 10.0
"""Seconds from one change of devices to the next, of a job that could be less crowded elsewhere."""


def place(policy: Policy, job: Live) -> Place:
    """Its place in the queue: foreground jobs first, then the policy's order."""
    return job.share != "foreground", rank(policy.order, job.standing, thresholds=policy.thresholds)


class Floor:
    """The books of `planning.pack`, kept for devices of nodes that may differ in size.

    Slots are padded so that every node has as many as the largest; a slot without a device is never free.
    """

    def __init__(self, devices: Sequence[Device], policy: Policy) -> None:
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
            pack.Cluster(devices=len(nodes) * size, node=size, device_bytes=min(d.bytes for d in devices))
        )
        self.books.exists[:] = [i in self.at for i in range(len(self.books.exists))]
        self.books.load[~self.books.exists] = np.inf
        self._firm = np.zeros(len(self.books.exists), dtype=np.int64)  # residents that are not in the background
        self._closed = np.zeros(len(self.books.exists), dtype=np.int64)  # of those, with a promise

    # -- the books --

    def holds(self, job: Live) -> bool:
        return job.id in self.books.holdings

    def book(self, job: Live, devices: Iterable[int]) -> bool:
        """Books devices for the job's present shape; False, and nothing is booked, where memory does not suffice."""
        slots = [self.slot[d] for d in devices]
        if not self._fits(job.shape, slots):
            return False
        self.books.add(job.id, job.shape, slots, background=job.background)
        self._firm[slots] += not job.background
        self._closed[slots] += job.firm and not job.background
        return True

    def free(self, job: Live) -> None:
        if self.holds(job):
            slots = self.books.remove(job.id)
            self._firm[slots] -= not job.background
            self._closed[slots] -= job.firm and not job.background

    def rebook(self, job: Live, shape: Shape) -> bool:
        """The job's shape as it was measured; False, and it holds nothing any more, if that does not fit."""
        devices = [self.at[s] for s in self.books.holdings[job.id].devices]
        self.free(job)
        job.standing.shape = shape
        return self.book(job, devices)

    def _fits(self, shape: Shape, slots: Sequence[int]) -> bool:
        b = self.books
        need = b.persistent[slots] + shape.persistent_bytes + np.maximum(b.ephemeral[slots], shape.ephemeral_bytes)
        return bool((need <= b.cluster.device_bytes).all())

    # -- decisions, which change nothing --

    def allowed(self, job: Live, ready: Collection[int]) -> Mask:
        mask: Mask = np.zeros(len(self.books.exists), dtype=np.bool_)
        mask[[self.slot[d] for d in ready]] = True
        if not job.background:
            mask &= (self._firm if job.firm else self._closed) == 0
        return mask

    def find(self, job: Live, ready: Collection[int]) -> list[int] | None:
        """Devices for the job now, or None."""
        mask = self.allowed(job, ready)
        slots = pack.admit(self.books, job.shape, self.rules, allowed=mask, background=job.background)
        return None if slots is None else [self.at[s] for s in slots]

    def why(self, job: Live, ready: Collection[int]) -> str:
        """What it lacks, in one sentence; empty if it could start now."""
        everywhere = np.zeros(len(self.books.exists), dtype=np.bool_)
        everywhere[[self.slot[d] for d in ready]] = True
        line = pack.why(self.books, job.shape, self.rules, allowed=everywhere, background=job.background)
        if line:
            return line
        if self.find(job, ready) is not None:
            return ""
        have = int(self.allowed(job, ready).sum())
        kept = "other jobs" if job.firm else "jobs of promised speed"
        return f"promise: {have} devices are free of {kept}, it needs {job.shape.width}"

    def better(self, running: Iterable[Live], ready: Collection[int], *, now: float) -> tuple[Live, list[int]] | None:
        """A job that would be less crowded elsewhere, and where; None if nobody gains much, or all have just moved."""
        if not self.policy.repack or len(ready) < len(self.devices):
            return None
        jobs = {j.id: j for j in running}
        for key in crowded(self.books)[:4]:
            job = jobs.get(key)
            if job is None or job.firm or self._closed.any() or now - job.moved < RESTED:
                continue
            slots = relocate(self.books, key, self.rules)
            if slots is not None:
                return job, [self.at[s] for s in slots]
        return None


def admissions(floor: Floor, queue: Sequence[Live], ready: Collection[int], *, may: Collection[int]) -> list[Live]:
    """Places what can be placed, in the queue's order, and books it: those jobs, with their new `devices`.

    `may` are the numbers of jobs that are described and whose pause after a strike is over. A job that finds no place
    is passed by others if the policy allows it; others of the same shape are not tried again.
    """
    found: list[Live] = []
    refused: set[tuple[object, ...]] = set()
    for job in queue:
        s = job.shape
        kind = (s.width, s.duty, s.persistent_bytes, s.ephemeral_bytes, job.share, job.is_gang)
        devices = floor.find(job, ready) if job.id in may and kind not in refused else None
        if devices is not None and floor.book(job, devices):
            job.devices = tuple(devices)
            found.append(job)
            continue
        if job.id in may:
            refused.add(kind)
        if floor.policy.backfill == "none":
            break
    return found


def to_prepare(queue: Sequence[Live], *, now: float, most: int) -> list[Live]:
    """Whose aggregators to start now, so that at most `most` wait for devices with theirs."""
    waiting = sum(j.process for j in queue)
    idle = [j for j in queue if not j.is_gang and not j.process and j.not_before <= now]
    return idle[: max(0, most - waiting)]

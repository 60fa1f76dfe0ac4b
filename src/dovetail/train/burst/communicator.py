"""Communication among the ranks of a burst job: process groups made in advance, waits that end when another rank fails.

A rank that fails writes one line into the job's store before it raises. A rank that waits for a collective looks there
once a second, so that none waits for a rank that will never come, and all end with the same line.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from dovetail.core.errors import Error, first_line
from dovetail.train import device_streams

from .gap_board import announced

SLICE = timedelta(seconds=1)
"""How long to wait before the next look whether another rank has failed."""

PAUSE = 1e-4
"""Seconds from one look at an accelerator's progress to the next."""

_jobs = itertools.count()  # ranks make their communicators in the same order, so the number is the same on all
_pool: dict[
    tuple[int, ...], dist.ProcessGroup
] = {}  # groups of this process by their ranks; jobs that follow each other share them
_pool_of: list[object] = []  # the default group at the time when they were made


class Communicator:
    """One rank's access to the others. Without torch.distributed it is a job of one rank that never communicates."""

    def __init__(self, device: torch.device, *, timeout: float) -> None:
        self.device, self.timeout = device, timeout
        self.joined = dist.is_initialized()
        self.rank = dist.get_rank() if self.joined else 0
        self.size = dist.get_world_size() if self.joined else 1
        self.broken = ""
        """The reason why this job cannot go on; every later call raises it again."""
        self.moved_bytes = 0
        """Bytes that this rank has sent in re-sharding so far."""
        self.gaps = announced()
        """Announces this rank's idle gaps to jobs that share its device; None where no cluster asked for that."""
        self._mark: torch.Event | None = None
        self._key = f"dovetail-burst-{next(_jobs)}"
        if _pool_of != [dist.group.WORLD]:
            _pool.clear()
            _pool_of[:] = [dist.group.WORLD]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        # Not the default group even for all ranks: a job that fails leaves collectives behind that nobody will answer.
        self.prepare([tuple(range(self.size))])

    def prepare(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Makes the missing groups, in the same order on all ranks; every rank calls it with the same sets."""
        for ranks in sorted({s for s in sets if len(s) > 1}):
            if ranks not in _pool:
                made = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout))
                assert made is not None
                _pool[ranks] = made
            self._groups[ranks] = _pool[ranks]

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; None for a single rank, which has nobody to communicate with."""
        return self._groups[ranks] if len(ranks) > 1 else None

    def wait(self, work: dist.Work | None, what: str) -> None:
        """Waits until the collective is done; raises an Error as soon as it cannot complete any more."""
        if work is None:
            return
        if device_streams.is_queued(self.device):
            work.wait()  # only the device's queue waits; torch's own watchdog ends a job that hangs
            return
        deadline = time.monotonic() + self.timeout
        ended = False
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as e:
                if line := self.failure():
                    raise Error(line) from None
                if ended:
                    reason = first_line(e)
                    raise Error(f"burst rank {self.rank}: {what}: a rank is lost or unreachable ({reason})") from None
                # It may have ended, even successfully, after the slice and before this look: the next wait tells how.
                ended = work.is_completed()
                if time.monotonic() > deadline:
                    raise Error(
                        f"burst rank {self.rank}: {what}: not done within {self.timeout:g} s, though no rank has "
                        "reported a failure; do all ranks run the same steps?"
                    ) from None

    def leave_mark(self) -> None:
        """Called at the end of a step: on an accelerator its work is queued, and may be far from done."""
        self._mark = device_streams.mark(self.device)

    def catch_up(self, what: str) -> None:
        """Called before a step: lets an accelerator end the step before.

        The host runs one step ahead of its device and no more. So it notices in time when another rank has failed: that
        one's collectives never end, and nothing else waits for them on the host.
        """
        if self._mark is None:
            return
        began = looked = time.monotonic()
        while not self._mark.query():
            now = time.monotonic()
            if now - looked > SLICE.total_seconds():
                looked = now
                if line := self.failure():
                    raise Error(line)
            if now - began > self.timeout:
                raise Error(f"burst rank {self.rank}: {what}: not done within {self.timeout:g} s")
            time.sleep(PAUSE)
        self._mark = None

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> dist.Work | None:
        """Starts a sum over these ranks, in place; None for a single rank."""
        group = self.group(ranks)
        return dist.all_reduce(tensor, group=group, async_op=True) if group is not None else None

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...], what: str) -> Tensor:
        """The tensors of all ranks of the set, one row each."""
        group = self.group(ranks)
        if group is None:
            return tensor[None]
        out = tensor.new_empty((len(ranks), *tensor.shape))
        flat = tensor.contiguous().view(-1)
        self.wait(dist.all_gather_into_tensor(out.view(-1), flat, group=group, async_op=True), what)
        return out

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...], what: str) -> None:
        """Broadcasts in place from `source`; `ranks` must be one of the prepared sets."""
        group = self.group(ranks)
        if group is not None:
            self.wait(dist.broadcast(tensor, src=source, group=group, async_op=True), what)

    def share(self, value: Any, source: int, what: str) -> Any:
        """The value that rank `source` gives, on all ranks. For small picklable objects."""
        if self.size == 1:
            return value
        everyone = tuple(range(self.size))
        data = pickle.dumps(value) if self.rank == source else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        self.broadcast(size, source, everyone, what)
        box = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(box, source, everyone, what)
        return value if self.rank == source else pickle.loads(box.cpu().numpy().tobytes())

    def collect(self, value: Any, what: str) -> list[Any]:
        """The values of all ranks, on all ranks."""
        return [self.share(value, rank, what) for rank in range(self.size)]

    def fail(self, line: str) -> None:
        """Tells all ranks the reason why this one ends; the first failure counts."""
        self.broken = line
        _pool.clear()
        if self.size == 1:
            return
        try:
            _get_default_store().compare_set(self._key, "", line)
        except RuntimeError:  # the store was lost with the rank that kept it: no rank is left that could read it
            return

    def failure(self) -> str | None:
        """The line of the rank that failed first, if one has."""
        if self.size == 1:
            return None
        try:
            store = _get_default_store()
            return str(store.get(self._key).decode()) if store.check([self._key]) else None
        except RuntimeError:
            return None

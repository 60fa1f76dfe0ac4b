"""Timed collectives of a live process group: all ranks get the same figures, those of the slowest rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dovetail.core.errors import Error
from dovetail.core.network import CollectiveName, Precision

from .message_rounds import round_up

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    Functions: TypeAlias = Mapping[CollectiveName, Callable[[torch.Tensor], object]]
    """Collectives as functions of the full, flat tensor."""

CollectiveKey: TypeAlias = tuple[Precision, CollectiveName]

BURST = 2**19
"""Bytes that a link may let pass faster than its rate after a pause, as shaped links do."""
ROW, ROW_BYTES = 4, 2**23
"""Messages that are timed in a row, at most, and bytes of all of them: where one costs little, what lies between two of
them is a part of what it costs in training."""


class CollectiveTimer:
    """Times collectives of one group; all ranks get the same figures, those of the slowest rank."""

    def __init__(
        self,
        group: ProcessGroup | None,
        ranks: int,
        device: torch.device,
        max_bytes: int,
        via: Mapping[Precision, Functions],
    ) -> None:
        import torch

        from .clock import Clock

        self._group, self._ranks, self._device, self._via = group, ranks, device, via
        self._clock = Clock(device)
        self._give = torch.zeros(max_bytes // 4, dtype=torch.float32, device=device)
        self._take = torch.zeros_like(self._give)
        self._tiny = torch.zeros(1, device=device)
        self._start = Clock(torch.device("cpu"))
        self._started = self._start.stamp()

    def elapsed(self) -> float:
        """Seconds since the start, on the slowest rank."""
        return self.slowest([self._start.stamp() - self._started])[0]

    def time(self, calls: Sequence[tuple[CollectiveKey, int]]) -> list[float]:
        """Seconds that each call of a collective with so many bytes took on the slowest rank.

        Small messages are timed in a row and right behind another of their size, as a bucket comes behind another in
        training.
        """
        stamps, rows = [], []
        for key, nbytes in calls:
            call = self.call(key, nbytes, queued=True)
            rows.append(max(1, min(ROW, ROW_BYTES // max(1, nbytes))))
            self.line_up()
            if nbytes <= BURST:
                _wait([call()])
            stamps.append(self._clock.stamp())
            _wait([call() for _ in range(rows[-1])])
            stamps.append(self._clock.stamp())
        at = self._clock.seconds(stamps)
        spans = zip(at[::2], at[1::2], rows, strict=True)
        return self.slowest([(stop - begin) / row for begin, stop, row in spans])

    def line_up(self) -> None:
        """Lets no rank begin before the others are there."""
        import torch.distributed as dist

        dist.all_reduce(self._tiny, group=self._group)

    def call(self, key: CollectiveKey, nbytes: int, *, queued: bool = False) -> Callable[[], Any]:
        """A function that runs the collective; `queued`: torch's own only begins it and returns what to wait for.

        A function that was given in place of torch's own may always do so.
        """
        import torch.distributed as dist

        precision, collective = key
        group, elements = self._group, round_up(nbytes, self._ranks) // 4
        part = elements // self._ranks
        give, take = self._give[:elements], self._take[:elements]
        if (ours := self._via.get(precision, {}).get(collective)) is not None:
            return lambda: ours(give)
        if collective == "all_reduce":
            return lambda: dist.all_reduce(give, group=group, async_op=queued)
        if collective == "all_to_all":
            return lambda: dist.all_to_all_single(take, give, group=group, async_op=queued)
        if collective == "reduce_scatter":
            scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: scatter(take[:part], give, group=group, async_op=queued)
        gather = _renamed("all_gather_single", "all_gather_into_tensor")
        return lambda: gather(take, give[:part], group=group, async_op=queued)

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest figure of all ranks, for each."""
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return [float(s) for s in slowest.tolist()]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None and hasattr(work, "wait"):
            work.wait()


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 gave two collectives new names and warns about the old."""
    import torch.distributed as dist

    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


def place(group: ProcessGroup | None, device: torch.device | str | None) -> tuple[int, str, torch.device]:
    """(number of ranks, backend, device) of the group."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise Error(
            "no process group to measure: start with torchrun and call torch.distributed.init_process_group first"
        )
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise Error("this rank is not in the process group that is to be measured")
    if ranks == 1:
        raise Error("a process group of 1 rank has no network to measure: expected at least 2 ranks")
    known = group or dist.group.WORLD
    assert known is not None
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        own = found is not None and backend_of(known, found) not in ("", "gloo", "mpi")
        device = torch.device(found.type, torch.accelerator.current_device_index()) if found and own else "cpu"
    where = torch.device(device)
    return ranks, backend_of(known, where) or str(dist.get_backend(group)), where


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend that carries this device's tensors; "" where the group does not tell, as Python's own.

    A group has one for each kind of device, and where these differ (`cpu:gloo,cuda:nccl`) its own name says nothing.
    """
    import torch

    with contextlib.suppress(RuntimeError):
        return str(group._get_backend(torch.device(device.type)).name()).lower()
    return ""

"""Re-sharding: rows of tensors go from the ranks of one stage to the ranks of the next, and gradients back.

One all-to-all among the ranks of both stages carries all tensors of a boundary: each rank gets the rows that it lacks,
in ascending order of samples; rows that stay on their rank are copied locally. Splits are uneven and mostly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.core.sample_layout import Move, SampleLayout, move, moved
from dovetail.train.device_streams import hold_here, to_device

from .communicator import Communicator


@dataclass(frozen=True)
class RowSpec:
    """dtype and shape of one row (one sample) of a tensor at a boundary: enough to receive it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of one sample."""
    grad: bool = False
    """Whether a gradient comes back for it."""

    @property
    def bytes(self) -> int:
        """Size of one sample in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty((rows, *self.shape), dtype=self.dtype, device=device)


def row_spec(tensor: Tensor) -> RowSpec:
    return RowSpec(tensor.dtype, tuple(tensor.shape[1:]), tensor.requires_grad)


class RowIndices(NamedTuple):
    """The rows of one rank in a re-sharding, on its device."""

    stay: Tensor
    """Rows before it that stay on the rank."""
    settle: Tensor
    """What rows they are after it."""
    leave: Tensor
    """Rows before it that go to other ranks, in the order of these."""
    arrive: Tensor
    """What rows those are after it that come from other ranks, in the order of these."""

    @classmethod
    def of(cls, part: Move, device: torch.device) -> RowIndices:
        sent = [row for _, rows in part.sends for row in rows]
        taken = [row for _, rows in part.receives for row in rows]
        return cls(*(to_device(list(rows), torch.int64, device) for rows in (*part.keeps, sent, taken)))


class Reshard:
    """Moves rows from one layout to another; worked out once and used in every step."""

    def __init__(self, comm: Communicator, before: SampleLayout, after: SampleLayout) -> None:
        self.before, self.after = before, after
        self.ranks = tuple(sorted({rank for rank, _ in (*before.held, *after.held)}))
        self.needed = moved(before, after) > 0
        self.takes_part = self.needed and comm.rank in self.ranks
        self.comm = comm
        self._move = move(before, after, comm.rank)
        self._indices: RowIndices | None = None

    def meet(self, what: str) -> None:
        """Waits until all ranks that take part have arrived, so that a recording can tell waiting from moving."""
        if self.takes_part:
            self.comm.wait(self.comm.all_reduce(torch.zeros(1, device=self.comm.device), self.ranks), what)

    def __call__(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """This rank's rows in the layout after. A rank outside both stages gets back what it gave: no rows."""
        if not self.takes_part:
            return list(tensors)
        part = self._move
        if self._indices is None:
            self._indices = RowIndices.of(part, self.comm.device)
        stay, settle, leave, places = self._indices
        hold_here(self._indices)
        specs = [row_spec(t) for t in tensors]
        out = [spec.empty(part.rows, self.comm.device) for spec in specs]
        for old, new in zip(tensors, out, strict=True):
            new.index_copy_(0, settle, old.index_select(0, stay))
        row = sum(spec.bytes for spec in specs)
        leaving = _pack(tensors, leave)
        coming = torch.empty((len(places), row), dtype=torch.uint8, device=self.comm.device)
        work = dist.all_to_all_single(
            coming.view(-1),
            leaving.view(-1),
            [row * n for n in _counts(part.receives, self.ranks)],
            [row * n for n in _counts(part.sends, self.ranks)],
            group=self.comm.group(self.ranks),
            async_op=True,
        )
        self.comm.moved_bytes += leaving.numel()
        self.comm.wait(work, what)
        at = 0
        for spec, new in zip(specs, out, strict=True):
            rows = coming[:, at : at + spec.bytes].contiguous().view(-1).view(spec.dtype)
            new.index_copy_(0, places, rows.view(len(places), *spec.shape))
            at += spec.bytes
        return out


def _pack(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """The rows of all tensors side by side, as bytes: (rows, bytes of one sample)."""
    flat = [t.index_select(0, rows).contiguous().view(-1).view(torch.uint8) for t in tensors]
    sides = [f.view(len(rows), row_spec(t).bytes) for f, t in zip(flat, tensors, strict=True)]
    return sides[0] if len(sides) == 1 else torch.cat(sides, dim=1)


def _counts(messages: tuple[tuple[int, tuple[int, ...]], ...], ranks: tuple[int, ...]) -> list[int]:
    by_rank = {rank: len(rows) for rank, rows in messages}
    return [by_rank.get(rank, 0) for rank in ranks]

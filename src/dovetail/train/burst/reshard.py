"""Re-sharding: rows of tensors go from the ranks of one stage to the ranks of the next, and gradients back.

One all-to-all among the ranks of both stages carries all tensors of a boundary: each rank gets the rows that it lacks,
in ascending order of samples; rows that stay on their rank are copied locally. Splits are uneven and mostly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.core.sample_layout import SampleLayout, move, moved

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


class Reshard:
    """Moves rows from one layout to another; worked out once and used in every step."""

    def __init__(self, comm: Communicator, before: SampleLayout, after: SampleLayout) -> None:
        self.before, self.after = before, after
        self.ranks = tuple(sorted({rank for rank, _ in (*before.held, *after.held)}))
        self.needed = moved(before, after) > 0
        self.takes_part = self.needed and comm.rank in self.ranks
        self.comm = comm
        self._move = move(before, after, comm.rank)

    def meet(self, what: str) -> None:
        """Waits until all ranks that take part have arrived, so that a recording can tell waiting from moving."""
        if self.takes_part:
            self.comm.wait(self.comm.all_reduce(torch.zeros(1, device=self.comm.device), self.ranks), what)

    def __call__(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """This rank's rows in the layout after. A rank outside both stages gets back what it gave: no rows."""
        if not self.takes_part:
            return list(tensors)
        part = self._move
        specs = [row_spec(t) for t in tensors]
        out = [spec.empty(part.rows, self.comm.device) for spec in specs]
        stay = [_index(rows, self.comm.device) for rows in part.keeps]
        for old, new in zip(tensors, out, strict=True):
            new.index_copy_(0, stay[1], old.index_select(0, stay[0]))
        row = sum(spec.bytes for spec in specs)
        leaving = _pack(tensors, _index([i for _, rows in part.sends for i in rows], self.comm.device))
        places = _index([i for _, rows in part.receives for i in rows], self.comm.device)
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


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.int64, device=device)

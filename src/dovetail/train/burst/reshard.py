"""Re-sharding: rows of tensors go from the ranks of one stage to the ranks of the next, and gradients back.

One all-to-all among the ranks of both stages carries all tensors of a boundary: to each peer the rows it lacks, in
ascending order of samples; rows that stay are copied on the spot. Splits are uneven and mostly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.core.sample_layout import Layout, move, moved

from .wire import Wire


@dataclass(frozen=True)
class Sketch:
    """A tensor of a boundary without its rows: enough to receive it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one sample."""
    grad: bool = False
    """True if a gradient comes back for it."""

    @property
    def bytes(self) -> int:
        """Of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty((rows, *self.shape), dtype=self.dtype, device=device)


def sketch(tensor: Tensor) -> Sketch:
    return Sketch(tensor.dtype, tuple(tensor.shape[1:]), tensor.requires_grad)


class Exchange:
    """One way between two layouts, worked out once and used at every step."""

    def __init__(self, wire: Wire, before: Layout, after: Layout) -> None:
        self.before, self.after = before, after
        self.ranks = tuple(sorted({rank for rank, _ in (*before.held, *after.held)}))
        self.needed = moved(before, after) > 0
        self.takes_part = self.needed and wire.rank in self.ranks
        self.wire = wire
        self._move = move(before, after, wire.rank)

    def meet(self, what: str) -> None:
        """Waits until all ranks of the exchange are here, so that a recording tells waiting from moving."""
        if self.takes_part:
            self.wire.wait(self.wire.all_reduce(torch.zeros(1, device=self.wire.device), self.ranks), what)

    def __call__(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """This rank's rows after the exchange. A rank outside both stages gets back what it gave: no rows."""
        if not self.takes_part:
            return list(tensors)
        part = self._move
        kinds = [sketch(t) for t in tensors]
        out = [kind.empty(part.rows, self.wire.device) for kind in kinds]
        stay = [_index(rows, self.wire.device) for rows in part.keeps]
        for old, new in zip(tensors, out, strict=True):
            new.index_copy_(0, stay[1], old.index_select(0, stay[0]))
        row = sum(kind.bytes for kind in kinds)
        leaving = _pack(tensors, _index([i for _, rows in part.sends for i in rows], self.wire.device))
        places = _index([i for _, rows in part.receives for i in rows], self.wire.device)
        coming = torch.empty((len(places), row), dtype=torch.uint8, device=self.wire.device)
        work = dist.all_to_all_single(
            coming.view(-1),
            leaving.view(-1),
            [row * n for n in _counts(part.receives, self.ranks)],
            [row * n for n in _counts(part.sends, self.ranks)],
            group=self.wire.group(self.ranks),
            async_op=True,
        )
        self.wire.moved_bytes += leaving.numel()
        self.wire.wait(work, what)
        at = 0
        for kind, new in zip(kinds, out, strict=True):
            rows = coming[:, at : at + kind.bytes].contiguous().view(-1).view(kind.dtype)
            new.index_copy_(0, places, rows.view(len(places), *kind.shape))
            at += kind.bytes
        return out


def _pack(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """The rows of all tensors side by side, as bytes: (rows, bytes of one sample)."""
    flat = [t.index_select(0, rows).contiguous().view(-1).view(torch.uint8) for t in tensors]
    sides = [f.view(len(rows), sketch(t).bytes) for f, t in zip(flat, tensors, strict=True)]
    return sides[0] if len(sides) == 1 else torch.cat(sides, dim=1)


def _counts(messages: tuple[tuple[int, tuple[int, ...]], ...], ranks: tuple[int, ...]) -> list[int]:
    by_rank = {rank: len(rows) for rank, rows in messages}
    return [by_rank.get(rank, 0) for rank in ranks]


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.int64, device=device)

"""Values on which the ranks of a group agree. Every function here is a collective: all ranks call it, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def largest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Element by element, the largest value any rank has."""
    return _reduce(values, dist.ReduceOp.MAX, group, device)


def smallest(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Element by element, the smallest value any rank has."""
    return _reduce(values, dist.ReduceOp.MIN, group, device)


def everyones(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[list[float]]:
    """The values of each rank, which gives as many as the others, in the order of ranks."""
    mine = torch.tensor(list(values), dtype=torch.float32, device=device)
    shared = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shared, mine, group=group)
    return [tensor.tolist() for tensor in shared]


def from_first(value: T, group: dist.ProcessGroup, device: torch.device) -> T:
    """The value of the group's first rank, on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group, device=device)
    return box[0]


def _reduce(
    values: Sequence[float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op, group=group)
    return [float(v) for v in tensor.cpu()]

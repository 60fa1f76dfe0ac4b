"""The two halves of an all-reduce as `measure.network` takes them: what dovetail itself will run on a process group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dovetail.core.network import CollectiveName

from . import ring


def halves(group: dist.ProcessGroup) -> dict[CollectiveName, Callable[[torch.Tensor], object]]:
    """Functions of a flat tensor whose elements the ranks can share out evenly. Give it a group of its own (`twin`)."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def gather(flat: torch.Tensor) -> None:
        ring.all_gather(flat.view(ranks, -1)[rank], flat, group)

    return {"reduce_scatter": lambda flat: ring.reduce_scatter(flat, group), "all_gather": gather}

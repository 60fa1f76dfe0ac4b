"""The two halves of an all-reduce as rings of messages.

gloo's own reduce-scatter moves the bytes of a whole all-reduce, and its all-to-all suffers where links are shared. Here
n ranks form a ring, and each sends to its right neighbour only. In each of n−1 rounds a rank sends one n-th of the data
and receives another, adds it up (reduce-scatter) or keeps it (all-gather), and passes it on in the next round: every
rank sends (n−1)/n of the bytes, the least that any algorithm needs. An n-th travels in pieces, so that one piece is
added while the next is on the wire.

NCCL has both already, so its own are used there.

Messages are sent through the group object and never through torch's registry of groups. `destroy_process_group()`
empties the registry at once, while gloo works on for as long as somebody holds the group, and other ranks may still
need what this one sends.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dovetail.core.network import CollectiveName

PIECE = 2**20
"""Bytes in one message: a few milliseconds on a slow link, far more than a message costs to start."""

OWN = ("nccl", "xccl", "hccl", "ucc")
"""Backends whose own reduce-scatter and all-gather are rings or better."""

_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""Name of each group's backend, read from torch's registry when the group was first used."""


def twin(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A second group of the same ranks, backend and time-out, so that its messages never mix with other collectives.

    All ranks of `group` call it together.
    """
    group = group or dist.group.WORLD
    assert group is not None, "there is a process group"
    made = dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        timeout=_timeout(group),
        backend=dist.get_backend(group),
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of this group may take; None (torch's default) where the group does not tell."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            found = group._get_backend(torch.device(device)).options._timeout
            assert isinstance(found, timedelta)
            return found
    return None


def patience(group: dist.ProcessGroup) -> float:
    """Seconds after which a message in this group counts as lost."""
    return (_timeout(group) or default_pg_timeout).total_seconds()


def padded(elements: int, ranks: int) -> int:
    """The smallest number of elements that is not below `elements` and can be shared out evenly."""
    return -(-elements // ranks) * ranks


def reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Adds up `flat` over the ranks and returns this rank's n-th of the sum, a view of `flat`.

    Rank r gets the r-th of n equal parts, so the number of elements must be a multiple of n (see `padded`). The rest of
    `flat` is scratch afterwards. Returns when the sum is there and this rank has sent all it had to send.
    """
    ranks, rank = group.size(), group.rank()
    parts = flat.view(ranks, flat.numel() // ranks)
    mine = parts[rank]
    if ranks == 1:
        return mine
    if _backend(group) in OWN:  # not tested on the hardware at hand
        dist.reduce_scatter_tensor(mine, flat, group=group)
        return mine
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    pieces = _pieces(mine)
    spare = torch.empty_like(mine)
    receiving = [_receive(spare[piece], left, j, group) for j, piece in enumerate(pieces)]
    sending = [_send(parts[left][piece], right, j, group) for j, piece in enumerate(pieces)]
    for turn in range(1, ranks):
        part = parts[(rank - turn - 1) % ranks]
        for j, piece in enumerate(pieces):
            receiving[j].wait()
            part[piece].add_(spare[piece])
            if turn < ranks - 1:
                tag = turn * len(pieces) + j
                receiving[j] = _receive(spare[piece], left, tag, group)
                sending.append(_send(part[piece], right, tag, group))
    for message in sending:
        message.wait()
    return mine


def all_gather(shard: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> None:
    """Puts the shards of all ranks together in `out`, rank r's at the r-th of n equal parts.

    `shard` may be that very part of `out`; then nothing is copied. Returns when everything is there and this rank has
    passed on all it had to pass on. `tag` is the first message's: another kind of message in the same group needs
    another range of tags.
    """
    ranks, rank = group.size(), group.rank()
    parts = out.view(ranks, out.numel() // ranks)
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(shard)
    if ranks == 1:
        return
    if _backend(group) in OWN:  # not tested on the hardware at hand
        dist.all_gather_into_tensor(out, parts[rank], group=group)
        return
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    pieces = _pieces(parts[rank])
    receiving = [
        _receive(parts[(rank - turn) % ranks][piece], left, tag + (turn - 1) * len(pieces) + j, group)
        for turn in range(1, ranks)
        for j, piece in enumerate(pieces)
    ]
    sending = [_send(parts[rank][piece], right, tag + j, group) for j, piece in enumerate(pieces)]
    for turn in range(1, ranks):
        part = parts[(rank - turn) % ranks]
        for j, piece in enumerate(pieces):
            number = (turn - 1) * len(pieces) + j
            receiving[number].wait()
            if turn < ranks - 1:
                sending.append(_send(part[piece], right, tag + number + len(pieces), group))
    for message in sending:
        message.wait()


def halves(group: dist.ProcessGroup) -> dict[CollectiveName, Callable[[torch.Tensor], object]]:
    """Both halves for `measure.network(via=…)`: functions of a flat tensor that the ranks can share out evenly.

    They need a group of their own (see `twin`).
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def gather(flat: torch.Tensor) -> None:
        all_gather(flat.view(ranks, -1)[rank], flat, group)

    return {"reduce_scatter": lambda flat: reduce_scatter(flat, group), "all_gather": gather}


def _pieces(part: torch.Tensor) -> list[slice]:
    """One n-th cut into slices of about PIECE bytes."""
    elements = max(1, PIECE // part.element_size())
    return [slice(at, at + elements) for at in range(0, part.numel(), elements)]


def _backend(group: dist.ProcessGroup) -> str:
    if group not in _backends:
        _backends[group] = dist.get_backend(group)
    return _backends[group]


def _send(tensor: torch.Tensor, to: int, tag: int, group: dist.ProcessGroup) -> dist.Work:
    return group.send([tensor], to, tag)


def _receive(tensor: torch.Tensor, source: int, tag: int, group: dist.ProcessGroup) -> dist.Work:
    return group.recv([tensor], source, tag)

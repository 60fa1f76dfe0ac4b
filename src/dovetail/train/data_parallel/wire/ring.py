"""Collectives as rings of messages: reduce-scatter, all-gather, and the two in one.

gloo's own reduce-scatter moves the bytes of a whole all-reduce, and its all-to-all suffers where links are shared. Here
n ranks form a ring, and each sends to its right neighbour only. In each of n−1 rounds a rank sends one n-th of the data
and receives another, adds it up (reduce-scatter) or keeps it (all-gather), and passes it on in the next round: every
rank sends (n−1)/n of the bytes, the least that any algorithm needs. An n-th travels in pieces, so that one piece is
added while the next is on the wire; in an all-reduce a piece whose sum is complete starts its way back at once.

A collective is a `Transfer`, a generator, so that the link never waits between two of them. It yields for the first
time when its first messages are posted, and then whenever it has nothing left to post and waits for what others send:
at each of these points the next transfer can post its own first messages (`lane.py` does it).

NCCL has all three already, so its own are used there.

Messages are sent through the group object and never through torch's registry of groups. `destroy_process_group()`
empties the registry at once, while gloo works on for as long as somebody holds the group, and other ranks may still
need what this one sends.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dovetail.core.network import CollectiveName

from .buffers import SCRATCH

Transfer = Iterator[None]
"""A collective on its way; see above for when it yields."""

PIECE = 2**20
"""Most bytes in one message: a few milliseconds on a slow link, far more than a message costs to start."""
LEAST_PIECE = 2**17
"""Least bytes in one message, where an n-th is cut only to keep the link busy while a piece is added."""

OWN = ("nccl", "xccl", "hccl", "ucc")
"""Backends whose own collectives are rings or better."""

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


def finish(transfer: Transfer) -> None:
    """Runs a transfer to its end."""
    for _ in transfer:
        pass


def reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> Transfer:
    """Adds up `flat` over the ranks; afterwards the r-th of its n equal parts is the sum on rank r, the rest scratch.

    The number of elements must be a multiple of n (see `padded`). Ends when the sum is there and this rank has sent all
    that it had to send. `tag` is the first message's; transfers that may be on their way at once need tags apart.
    """
    ring = _Ring(flat, group, tag)
    if ring.ranks == 1:
        return
    if has_own(group):  # not tested on the hardware at hand
        dist.reduce_scatter_tensor(ring.part(0), flat, group=group)
        return
    with SCRATCH.lend(ring.part(0).shape, flat.dtype, flat.device) as spare:
        yield from ring.reduce(spare, then=None)
    ring.wait_for_sent()


def all_gather(flat: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> Transfer:
    """Gives every rank all n equal parts of `flat`, of which rank r has the r-th.

    Ends when everything is there and this rank has passed on all that it had to pass on.
    """
    ring = _Ring(flat, group, tag)
    if ring.ranks == 1:
        return
    if has_own(group):  # not tested on the hardware at hand
        dist.all_gather_into_tensor(flat, ring.part(0), group=group)
        return
    ring.expect()
    for j in range(len(ring.pieces)):
        ring.send(0, j, ring.coming_back)
    yield
    yield from ring.gather()
    ring.wait_for_sent()


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> Transfer:
    """Adds up `flat` over the ranks, on every rank. Its number of elements must be a multiple of n."""
    ring = _Ring(flat, group, tag)
    if ring.ranks == 1:
        return
    if has_own(group):  # not tested on the hardware at hand
        dist.all_reduce(flat, group=group)
        return
    # Parts can be awaited from the start: a sum comes back only after this rank's own part of it has left.
    ring.expect()
    with SCRATCH.lend(ring.part(0).shape, flat.dtype, flat.device) as spare:
        yield from ring.reduce(spare, then=lambda j: ring.send(0, j, ring.coming_back))
    yield from ring.gather()
    ring.wait_for_sent()


class _Ring:
    """The messages of one transfer on this rank. Part k is the one that belongs to the rank k places to the left."""

    def __init__(self, flat: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
        self.ranks, self.rank, self._group, self._tag = group.size(), group.rank(), group, tag
        self._parts = flat.view(self.ranks, flat.numel() // self.ranks)
        self._right, self._left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        self.pieces = pieces(self._parts.shape[1], flat.element_size())
        self.coming_back = (self.ranks - 1) * len(self.pieces)
        """Offset of the tags of messages that carry complete parts."""
        self._sent: list[dist.Work] = []
        self._awaited: list[list[dist.Work]] = []

    def part(self, k: int) -> torch.Tensor:
        return self._parts[(self.rank - k) % self.ranks]

    def send(self, k: int, j: int, at: int) -> None:
        """Sends piece j of part k, under the `at`-th tag and those that follow it."""
        self._sent.append(self._group.send([self.part(k)[self.pieces[j]]], self._right, self._tag + at + j))

    def _receive(self, into: torch.Tensor, j: int, at: int) -> dist.Work:
        return self._group.recv([into[self.pieces[j]]], self._left, self._tag + at + j)

    def reduce(self, spare: torch.Tensor, then: Callable[[int], None] | None) -> Transfer:
        """Adds up; calls `then` for every piece of this rank's own part as soon as its sum is complete."""
        count = len(self.pieces)
        receiving = [self._receive(spare, j, 0) for j in range(count)]
        for j in range(count):
            self.send(1, j, 0)
        yield
        for turn in range(1, self.ranks):
            last = turn == self.ranks - 1
            part = self.part(turn + 1)
            for j, piece in enumerate(self.pieces):
                receiving[j].wait()
                part[piece].add_(spare[piece])
                if not last:
                    receiving[j] = self._receive(spare, j, turn * count)
                    self.send(turn + 1, j, turn * count)
                elif then is not None:
                    then(j)
                else:
                    yield

    def expect(self) -> None:
        """Posts the receives of all complete parts."""
        self._awaited = [
            [
                self._receive(self.part(turn), j, self.coming_back + (turn - 1) * len(self.pieces))
                for j in range(len(self.pieces))
            ]
            for turn in range(1, self.ranks)
        ]

    def gather(self) -> Transfer:
        """Passes complete parts on until all are there; those of this rank's own part are on their way."""
        for turn, awaited in enumerate(self._awaited, 1):
            for j, message in enumerate(awaited):
                message.wait()
                if turn < self.ranks - 1:
                    self.send(turn, j, self.coming_back + turn * len(self.pieces))
                else:
                    yield

    def wait_for_sent(self) -> None:
        for message in self._sent:
            message.wait()


TimedTransfer = Callable[[torch.Tensor, int], Transfer]
"""A collective of a flat tensor that the ranks can share out evenly, with its first tag."""


def timed(group: dist.ProcessGroup) -> dict[CollectiveName, TimedTransfer]:
    """The three, to be measured. They need a group of their own (see `twin`)."""
    return {
        "all_reduce": lambda flat, tag: all_reduce(flat, group, tag=tag),
        "reduce_scatter": lambda flat, tag: reduce_scatter(flat, group, tag=tag),
        "all_gather": lambda flat, tag: all_gather(flat, group, tag=tag),
    }


def pieces(elements: int, element_size: int) -> list[slice]:
    """An n-th cut into slices of equal size: four or more, as far as messages do not become too small for that."""
    nbytes = elements * element_size
    size = min(PIECE, max(LEAST_PIECE, -(-nbytes // 4)))
    step = max(1, size // element_size)
    return [slice(at, min(at + step, elements)) for at in range(0, elements, step)]


def has_own(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend has collectives that are rings or better."""
    if group not in _backends:
        _backends[group] = dist.get_backend(group)
    return _backends[group] in OWN

"""Collectives as rings of messages: reduce-scatter, all-gather, and the two in one.

gloo's own reduce-scatter moves the bytes of a whole all-reduce, and its all-to-all suffers where links are shared. Here
n ranks form a ring, and each sends to its right neighbour only. In each of n−1 rounds a rank sends one n-th of the data
and receives another, adds it up (reduce-scatter) or keeps it (all-gather), and passes it on in the next round: every
rank sends (n−1)/n of the bytes, the least that any algorithm needs. An n-th travels in pieces, so that one piece is
added while the next is on the wire; in an all-reduce a piece whose sum is complete starts its way back at once.

The n parts may have any sizes, given by their n+1 borders: rank r's is [borders[r], borders[r + 1]). A rank then sends
all parts but one (its own, or on the way back its right neighbour's), and every message in the order in which its left
neighbour sends it. In that order a part is always there before the parts ahead of it have left: up to the time of a few
pieces no link waits, and a transfer takes as long as the rank that has most to send.

A collective is a `Transfer`, a generator, so that the link never waits between two of them. It yields for the first
time when its first messages are posted, and then whenever it has nothing left to post and waits for what others send:
at each of these points the next transfer can post its own first messages (`lane.py` does it).

Backends of accelerators have all three already, so their own are used there (`backends.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from dovetail.core.network import CollectiveName

from . import backends
from .buffers import SCRATCH

Transfer = Iterator[None]
"""A collective on its way; see above for when it yields."""

PIECE = 2**20
"""Most bytes in one message: a few milliseconds on a slow link, far more than a message costs to start."""
LEAST_PIECE = 2**17
"""Least bytes in one message, where an n-th is cut only to keep the link busy while a piece is added."""


def padded(elements: int, ranks: int) -> int:
    """The smallest number of elements that is not below `elements` and can be shared out evenly."""
    return -(-elements // ranks) * ranks


def finish(transfer: Transfer) -> None:
    """Runs a transfer to its end."""
    for _ in transfer:
        pass


Borders = Sequence[int]
"""n+1 offsets in elements, not falling, from 0 to the number of elements: rank r owns [borders[r], borders[r + 1])."""


def equal_borders(elements: int, ranks: int) -> list[int]:
    """Borders of equal parts. The number of elements must be a multiple of the number of ranks (see `padded`)."""
    assert elements % ranks == 0, f"{elements} elements cannot be shared out evenly among {ranks} ranks"
    return [r * (elements // ranks) for r in range(ranks + 1)]


def reduce_scatter(
    flat: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0, borders: Borders | None = None
) -> Transfer:
    """Adds up `flat` over the ranks; afterwards the r-th of its n parts is the sum on rank r, the rest scratch.

    Without `borders` the parts are equal, and the number of elements must be a multiple of n (see `padded`). Ends when
    the sum is there and this rank has sent all that it had to send. `tag` is the first message's; transfers that may be
    on their way at once need tags apart.
    """
    ring = _Ring(flat, group, tag, borders)
    if ring.ranks == 1:
        return
    if backends.has_own(group, flat.device):
        backends.own_reduce_scatter(group, ring.parts, flat)
        return
    with SCRATCH.lend(ring.window, flat.dtype, flat.device) as spare:
        yield from ring.reduce(spare, then=None)
    if not ring.part(0).numel():
        yield  # nothing was left to wait for, so the next transfer could not begin yet
    ring.wait_for_sent()


def all_gather(
    flat: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
    borders: Borders | None = None,
    arrived: Callable[[int, int], None] | None = None,
) -> Transfer:
    """Gives every rank all n parts of `flat`, of which rank r has the r-th. Without `borders` they are equal.

    `arrived(start, stop)` is called when these elements of another rank are there. Ends when everything is there and
    this rank has passed on all that it had to pass on.
    """
    ring = _Ring(flat, group, tag, borders)
    if ring.ranks == 1:
        return
    if backends.has_own(group, flat.device):
        backends.own_all_gather(group, ring.parts, flat)
        if arrived is not None:
            arrived(0, flat.numel())
        return
    ring.expect()
    for j in range(ring.count(0)):
        ring.send_back(0, j)
    yield
    yield from ring.gather(arrived)
    if not ring.count(ring.ranks - 1):
        yield
    ring.wait_for_sent()


def all_reduce(
    flat: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0, borders: Borders | None = None
) -> Transfer:
    """Adds up `flat` over the ranks, on every rank. Without `borders` its size must be a multiple of n."""
    ring = _Ring(flat, group, tag, borders)
    if ring.ranks == 1:
        return
    if backends.has_own(group, flat.device):
        backends.own_all_reduce(group, flat)
        return
    # Parts can be awaited from the start: a sum comes back only after this rank's own contribution to it has left.
    ring.expect()
    with SCRATCH.lend(ring.window, flat.dtype, flat.device) as spare:
        yield from ring.reduce(spare, then=lambda j: ring.send_back(0, j))
    yield from ring.gather()
    if not ring.count(ring.ranks - 1):
        yield
    ring.wait_for_sent()


class _Ring:
    """The messages of one transfer on this rank. Part k is the one that belongs to the rank k places to the left.

    A part crosses each link at most once on its way to the sum and once on its way back, so a message is named by its
    part, its piece and its direction, whatever the sizes of the parts are.
    """

    def __init__(self, flat: torch.Tensor, group: dist.ProcessGroup, tag: int, borders: Borders | None) -> None:
        self.ranks, self.rank, self._group, self._tag = group.size(), group.rank(), group, tag
        borders = equal_borders(flat.numel(), self.ranks) if borders is None else borders
        assert len(borders) == self.ranks + 1 and (borders[0], borders[-1]) == (0, flat.numel()), "n parts of it all"
        self._borders = borders
        self.parts = [flat[start:stop] for start, stop in pairwise(borders)]
        self._right, self._left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        self._pieces = [pieces(part.numel(), flat.element_size()) for part in self.parts]
        self._first = [0, *accumulate(len(cut) for cut in self._pieces)]
        """Number of the first piece of each part, and last of all the number of pieces."""
        self._slot = max((cut[0].stop for cut in self._pieces if cut), default=0)
        self._slots = max(-(-self._first[-1] // self.ranks), min(4, self._first[-1]))
        self._sent: list[dist.Work] = []
        self._awaited: list[list[dist.Work]] = []

    @property
    def window(self) -> int:
        """Elements of memory for what comes in to be added: as many pieces as a part has on average, or four."""
        return self._slots * self._slot

    def part(self, k: int) -> torch.Tensor:
        return self.parts[(self.rank - k) % self.ranks]

    def count(self, k: int) -> int:
        """Number of pieces of part k."""
        return len(self._pieces[(self.rank - k) % self.ranks])

    def _piece(self, k: int, j: int) -> tuple[torch.Tensor, int]:
        """Piece j of part k, and the tag of its message on the way to the sum."""
        owner = (self.rank - k) % self.ranks
        return self.parts[owner][self._pieces[owner][j]], self._tag + self._first[owner] + j

    def _send(self, k: int, j: int) -> None:
        piece, tag = self._piece(k, j)
        self._sent.append(self._group.send([piece], self._right, tag))

    def send_back(self, k: int, j: int) -> None:
        """Sends piece j of part k, which is complete."""
        piece, tag = self._piece(k, j)
        self._sent.append(self._group.send([piece], self._right, tag + self._first[-1]))

    def reduce(self, spare: torch.Tensor, then: Callable[[int], None] | None) -> Transfer:
        """Adds up; calls `then` for every piece of this rank's own part as soon as its sum is complete.

        What comes in waits in `spare`, which has room for so many pieces at a time; the next takes the place of one
        that was added.
        """
        coming = [(k, j) for k in range(2, self.ranks + 1) for j in range(self.count(k))]
        places = spare.split(self._slot) if self._slot else ()
        receiving: dict[int, tuple[dist.Work, torch.Tensor]] = {}

        def receive(number: int) -> None:
            if number < len(coming):
                piece, tag = self._piece(*coming[number])
                place = places[number % self._slots][: piece.numel()]
                receiving[number] = self._group.recv([place], self._left, tag), place

        for number in range(self._slots):
            receive(number)
        for j in range(self.count(1)):
            self._send(1, j)
        yield
        for number, (k, j) in enumerate(coming):
            message, place = receiving.pop(number)
            message.wait()
            self._piece(k, j)[0].add_(place)
            receive(number + self._slots)
            if k < self.ranks:
                self._send(k, j)
            elif then is not None:
                then(j)
            else:
                yield

    def expect(self) -> None:
        """Posts the receives of all complete parts."""
        self._awaited = [[self._receive_back(k, j) for j in range(self.count(k))] for k in range(1, self.ranks)]

    def _receive_back(self, k: int, j: int) -> dist.Work:
        piece, tag = self._piece(k, j)
        return self._group.recv([piece], self._left, tag + self._first[-1])

    def gather(self, arrived: Callable[[int, int], None] | None = None) -> Transfer:
        """Passes complete parts on until all are there; those of this rank's own part are on their way."""
        for k, awaited in enumerate(self._awaited, 1):
            for j, message in enumerate(awaited):
                message.wait()
                if k < self.ranks - 1:
                    self.send_back(k, j)
                if arrived is not None:
                    owner = (self.rank - k) % self.ranks
                    at, piece = self._borders[owner], self._pieces[owner][j]
                    arrived(at + piece.start, at + piece.stop)
                if k == self.ranks - 1:
                    yield

    def wait_for_sent(self) -> None:
        for message in self._sent:
            message.wait()


TimedTransfer = Callable[[torch.Tensor, int], Transfer]
"""A collective of a flat tensor that the ranks can share out evenly, with its first tag."""


def timed(group: dist.ProcessGroup) -> dict[CollectiveName, TimedTransfer]:
    """The three, to be measured. They need a group of their own (see `backends.twin`)."""
    return {
        "all_reduce": lambda flat, tag: all_reduce(flat, group, tag=tag),
        "reduce_scatter": lambda flat, tag: reduce_scatter(flat, group, tag=tag),
        "all_gather": lambda flat, tag: all_gather(flat, group, tag=tag),
    }


def pieces(elements: int, element_size: int) -> list[slice]:
    """A part cut into slices of equal size: four or more, as far as messages do not become too small for that."""
    nbytes = elements * element_size
    size = min(PIECE, max(LEAST_PIECE, -(-nbytes // 4)))
    step = max(1, size // element_size)
    return [slice(at, min(at + step, elements)) for at in range(0, elements, step)]

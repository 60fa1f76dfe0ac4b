"""The collectives of `ring.py` in fewer bytes.

A gradient is encoded once, by the rank that made it, and goes straight to the rank that owns its part of the bucket (an
n-th, or what `borders` say, as in `ring.py`); that rank adds the decoded contributions in fp32. Around a ring, sums
would be encoded anew at every hop, and the errors would add up. What comes back (complete sums, or how the new
parameters differ from the old ones) is encoded once by its owner and passed on unchanged around the ring; the owner too
uses what it has encoded, so that all ranks hold the same bits. What an encoding has lost stays with whoever made it and
is added to what that rank encodes next.

A rank sends the first piece to each of the others, the one to its right first, then the second piece, and so on. All
links into a rank and out of it are then in use all the time, also if ranks are not at the same point. (With all pieces
for one rank before those for the next, two senders that are a little apart meet at one receiver while another receives
nothing: measured on four ranks in training, a reduce-scatter took 1.45 times as long as its bytes need.) Ranks whose
parts differ in size send and receive different numbers of messages. So each message has a time, the same on all ranks,
that only counts pieces and places, and a rank awaits what was sent at time t when it has sent what it sends up to time
t + AHEAD. What a rank waits for was never sent later than what it has sent itself: ranks never wait in a circle.

Backends with collectives of their own (`backends.py`) run messages between two ranks one after the other, in the order
in which each rank has called for them. There the same encoded pieces travel in one all-to-all and one all-gather.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from dovetail.core.network import CollectiveName, Precision
from dovetail.train import device_streams

from . import backends
from .buffers import SCRATCH
from .codec import CODECS, Codec
from .ring import Borders, TimedTransfer, Transfer, equal_borders

PIECE = 2**18
"""Elements in one message: 1 MiB of fp32, which stays in a processor's cache while it is encoded."""
AHEAD = 6
"""Messages that are sent before the first one that comes in is awaited."""


@dataclass
class Coder:
    """A codec, the processor time that it has taken, and what it has lost."""

    codec: Codec
    seconds: float = 0.0
    looks: bool = False
    """Whether the norms of what is encoded and of what is lost are taken; that reads everything twice more."""
    _squares: torch.Tensor | None = None
    """Squares of these norms so far."""
    _taken: torch.Event | None = None
    """On an accelerator: when they are there."""

    @property
    def error(self) -> float:
        """Norm of what was lost relative to that of what was encoded, while it looked last."""
        if self._squares is None:
            return 0.0
        device_streams.follow(self._taken, self._squares.device)
        device_streams.hold_here([self._squares])
        whole, lost = self._squares.tolist()
        return math.sqrt(lost / whole) if whole else 0.0

    def look(self, on: bool) -> None:
        """Begins or ends to look."""
        if on and not self.looks:
            self._squares = None
        self.looks = on

    def encode(self, values: torch.Tensor, error: torch.Tensor, wire: torch.Tensor) -> None:
        start = time.thread_time()
        self.codec.encode(values, error, wire)
        self.seconds += time.thread_time() - start
        if self.looks:
            squares = torch.stack([values.square().sum(), error.square().sum()]).double()
            self._squares = squares if self._squares is None else squares + self._squares
            self._taken = device_streams.mark(values.device)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        start = time.thread_time()
        self.codec.decode(wire, out)
        self.seconds += time.thread_time() - start

    def decode_add(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        start = time.thread_time()
        self.codec.decode_add(wire, out)
        self.seconds += time.thread_time() - start


def reduce_scatter(
    flat: torch.Tensor,
    lost: torch.Tensor,
    coder: Coder,
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
    borders: Borders | None = None,
) -> Transfer:
    """Adds up `flat` over the ranks; afterwards the r-th of its n parts is the sum on rank r.

    `lost` has an element for each of `flat`: what earlier encodings have lost, and afterwards what this one has.
    """
    if group.size() > 1:
        yield from _Exchange(flat.numel(), flat.device, coder, group, tag, borders).reduce(flat, lost, last=True)


def all_gather(
    elements: int,
    mine: torch.Tensor,
    lost: torch.Tensor,
    coder: Coder,
    group: dist.ProcessGroup,
    *,
    arrived: Callable[[int, torch.Tensor], None],
    tag: int = 0,
    borders: Borders | None = None,
) -> Transfer:
    """Gives all ranks what the owners of the n parts of so many elements have as `mine`, the same bits for all.

    `arrived` is called with the first element and the values of everything that is decoded, this rank's own included;
    the values are overwritten afterwards. `lost` gets what the encoding has lost of this rank's.
    """
    if group.size() > 1:
        with SCRATCH.lend(min(PIECE, elements), mine.dtype, mine.device) as decoded:

            def put(wire: torch.Tensor, start: int, stop: int) -> None:
                values = decoded[: stop - start]
                coder.decode(wire, values)
                arrived(start, values)

            lost.zero_()
            yield from _Exchange(elements, mine.device, coder, group, tag, borders).gather(mine, lost, put)


def all_reduce(
    flat: torch.Tensor,
    lost: torch.Tensor,
    lost_sums: torch.Tensor,
    coder: Coder,
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
    borders: Borders | None = None,
) -> Transfer:
    """Adds up `flat` over the ranks, on every rank; `lost_sums` is what this rank's encodings of sums have lost."""
    if group.size() == 1:
        return
    exchange = _Exchange(flat.numel(), flat.device, coder, group, tag, borders)
    yield from exchange.reduce(flat, lost, last=False)
    way_back = exchange.gather(exchange.own(flat), lost_sums, lambda wire, a, b: coder.decode(wire, flat[a:b]))
    next(way_back, None)
    yield from way_back


class _Exchange:
    """The messages of one transfer on this rank, which cut every rank's part into pieces."""

    def __init__(
        self,
        elements: int,
        device: torch.device,
        coder: Coder,
        group: dist.ProcessGroup,
        tag: int,
        borders: Borders | None,
    ) -> None:
        self._ranks, self._rank, self._group, self._coder = group.size(), group.rank(), group, coder
        self._device, self._tag = device, tag
        self._borders = equal_borders(elements, self._ranks) if borders is None else borders
        self._pieces = [
            [slice(at, min(at + PIECE, stop - start)) for at in range(0, stop - start, PIECE)]
            for start, stop in pairwise(self._borders)
        ]
        self._sizes = [[coder.codec.wire_bytes(p.stop - p.start) for p in cut] for cut in self._pieces]
        """Bytes of the encoded form of every piece of every part."""
        self._most = max(len(cut) for cut in self._pieces)

    def _shared_out(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[start:stop] for start, stop in pairwise(self._borders)]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        return self._shared_out(flat)[self._rank]

    def _span(self, owner: int, piece: slice) -> tuple[int, int]:
        """A piece of a rank's part: its first element and the one behind its last, among all."""
        return self._borders[owner] + piece.start, self._borders[owner] + piece.stop

    def _wires(self, owners: Sequence[int]) -> tuple[int, torch.dtype, torch.device]:
        """What memory the encoded forms of these parts need."""
        return sum(sum(self._sizes[owner]) for owner in owners), torch.uint8, self._device

    def _cut(self, memory: torch.Tensor, owners: Sequence[int]) -> list[list[torch.Tensor]]:
        """That memory, by part and piece."""
        sizes = [size for owner in owners for size in self._sizes[owner]]
        cut = iter(memory.split(sizes) if sizes else ())
        return [[next(cut) for _ in self._sizes[owner]] for owner in owners]

    def reduce(self, flat: torch.Tensor, lost: torch.Tensor, *, last: bool) -> Transfer:
        """Sends this rank's contributions to their owners, and adds up what it gets for its own part.

        `last`: nothing follows, so the next transfer can begin once all is posted.
        """
        if not self._most:
            return
        if backends.has_own(self._group, flat.device):
            self._reduce_at_once(flat, lost)
            return
        parts, lost_parts, mine = self._shared_out(flat), self._shared_out(lost), self.own(flat)
        owners = [(self._rank + k) % self._ranks for k in range(1, self._ranks)]
        own = [self._rank] * len(owners)
        with SCRATCH.lend(*self._wires(owners)) as going, SCRATCH.lend(*self._wires(own)) as coming:
            out, into = self._cut(going, owners), self._cut(coming, own)
            receiving, sending = {}, []
            steps: list[tuple[int, str, int, int]] = []  # (time, what to do, places to the right, piece)
            for k in range(1, self._ranks):
                for j, wire in enumerate(into[k - 1]):
                    receiving[k, j] = self._group.recv([wire], (self._rank - k) % self._ranks, self._tag + j)
                    steps.append((j * (self._ranks - 1) + k - 1 + AHEAD, "add", k, j))
                steps += [(j * (self._ranks - 1) + k - 1, "send", k, j) for j in range(len(out[k - 1]))]
            unsent = sum(len(wires) for wires in out)
            # All sends of a time come before what is then awaited, and neither has waited for anybody by AHEAD − 1.
            steps.append((AHEAD - 1, "yield", 0, 0))
            for _, what, k, j in sorted(steps, key=lambda step: (step[0], ("send", "yield", "add").index(step[1]))):
                if what == "send":
                    owner, wire = owners[k - 1], out[k - 1][j]
                    piece = self._pieces[owner][j]
                    self._coder.encode(parts[owner][piece], lost_parts[owner][piece], wire)
                    sending.append(self._group.send([wire], owner, self._tag + j))
                    unsent -= 1
                elif what == "add":
                    receiving[k, j].wait()
                    self._coder.decode_add(into[k - 1][j], mine[self._pieces[self._rank][j]])
                if what == "yield" or (what == "add" and last and not unsent):
                    yield
            if last and not mine.numel():
                yield  # all is posted, and nothing comes in
            for message in sending:
                message.wait()

    def gather(self, mine: torch.Tensor, lost: torch.Tensor, put: Callable[[torch.Tensor, int, int], None]) -> Transfer:
        """Sends what this rank has encoded of `mine` around the ring; `put` decodes elements from one to another."""
        if not self._most:
            return
        if backends.has_own(self._group, mine.device):
            self._gather_at_once(mine, lost, put)
            return
        right, left = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        owners = [(self._rank - k) % self._ranks for k in range(self._ranks)]
        first = [self._tag + self._most + at for at in accumulate([0, *map(len, self._pieces)])]
        with SCRATCH.lend(*self._wires(owners)) as memory:
            wires = self._cut(memory, owners)
            receiving = [
                [self._group.recv([wire], left, first[owner] + j) for j, wire in enumerate(wires[k])]
                for k, owner in enumerate(owners)
                if k
            ]
            sending = []
            for j, (piece, wire) in enumerate(zip(self._pieces[self._rank], wires[0], strict=True)):
                self._coder.encode(mine[piece], lost[piece], wire)
                sending.append(self._group.send([wire], right, first[self._rank] + j))
                put(wire, *self._span(self._rank, piece))
            yield
            for k, messages in enumerate(receiving, 1):
                owner = owners[k]
                for j, message in enumerate(messages):
                    message.wait()
                    if k < self._ranks - 1:
                        sending.append(self._group.send([wires[k][j]], right, first[owner] + j))
                    put(wires[k][j], *self._span(owner, self._pieces[owner][j]))
                    if k == self._ranks - 1:
                        yield
            for message in sending:
                message.wait()

    def _reduce_at_once(self, flat: torch.Tensor, lost: torch.Tensor) -> None:
        """What `reduce` does, in one all-to-all."""
        parts, lost_parts, mine = self._shared_out(flat), self._shared_out(lost), self.own(flat)
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        own = [self._rank] * len(others)
        with SCRATCH.lend(*self._wires(others)) as going, SCRATCH.lend(*self._wires(own)) as coming:
            for owner, wires in zip(others, self._cut(going, others), strict=True):
                for piece, wire in zip(self._pieces[owner], wires, strict=True):
                    self._coder.encode(parts[owner][piece], lost_parts[owner][piece], wire)
            sent, taken = [0] * self._ranks, [0] * self._ranks
            for rank in others:
                sent[rank], taken[rank] = sum(self._sizes[rank]), sum(self._sizes[self._rank])
            backends.own_all_to_all(self._group, coming, going, taken, sent)
            from_rank = dict(zip(others, self._cut(coming, own), strict=True))
            for k in range(1, self._ranks):  # in the order in which messages are added
                wires = from_rank[(self._rank - k) % self._ranks]
                for piece, wire in zip(self._pieces[self._rank], wires, strict=True):
                    self._coder.decode_add(wire, mine[piece])

    def _gather_at_once(
        self, mine: torch.Tensor, lost: torch.Tensor, put: Callable[[torch.Tensor, int, int], None]
    ) -> None:
        """What `gather` does, in one all-gather."""
        everyone = range(self._ranks)
        with SCRATCH.lend(*self._wires(everyone)) as memory:
            wires = self._cut(memory, everyone)
            for piece, wire in zip(self._pieces[self._rank], wires[self._rank], strict=True):
                self._coder.encode(mine[piece], lost[piece], wire)
            backends.own_all_gather(self._group, memory.split([sum(self._sizes[r]) for r in everyone]), memory)
            for owner in everyone:
                for piece, wire in zip(self._pieces[owner], wires[owner], strict=True):
                    put(wire, *self._span(owner, piece))


def timed(group: dist.ProcessGroup, precision: Precision) -> dict[CollectiveName, TimedTransfer]:
    """The three for flat fp32 tensors, to be measured. They need a group of their own (see `backends.twin`)."""
    coder = Coder(CODECS[precision])
    kept: dict[str, torch.Tensor] = {}

    def lost(flat: torch.Tensor) -> torch.Tensor:
        if "lost" not in kept or kept["lost"].numel() < flat.numel():
            kept["lost"] = torch.zeros_like(flat)
        return kept["lost"][: flat.numel()]

    def gather(flat: torch.Tensor, tag: int) -> Transfer:
        mine = flat.view(group.size(), -1)[group.rank()]

        def arrived(start: int, values: torch.Tensor) -> None:
            flat[start : start + values.numel()].copy_(values)

        return all_gather(flat.numel(), mine, lost(flat)[: mine.numel()], coder, group, arrived=arrived, tag=tag)

    def reduce(flat: torch.Tensor, tag: int) -> Transfer:
        width = flat.numel() // group.size()
        return all_reduce(flat, lost(flat), lost(flat)[:width], coder, group, tag=tag)

    return {
        "all_reduce": reduce,
        "reduce_scatter": lambda flat, tag: reduce_scatter(flat, lost(flat), coder, group, tag=tag),
        "all_gather": gather,
    }

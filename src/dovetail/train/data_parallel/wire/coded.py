"""The collectives of `ring.py` in fewer bytes.

A gradient is encoded once, by the rank that made it, and goes straight to the rank that owns its n-th of the bucket;
that rank adds the decoded contributions in fp32. Around a ring, sums would be encoded anew at every hop, and the errors
would add up. What comes back (complete sums, or how the new parameters differ from the old ones) is encoded once by
its owner and passed on unchanged around the ring; the owner too uses what it has encoded, so that all ranks hold the
same bits. What an encoding has lost stays with whoever made it and is added to what that rank encodes next.

Messages go to the rank k places to the right in round k, a few at a time, so that at any moment every link carries the
messages of one sender.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dovetail.core.network import CollectiveName, Precision

from .buffers import SCRATCH
from .codec import CODECS, Codec
from .ring import TimedTransfer, Transfer

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
    _squares: tuple[float, float] = (0.0, 0.0)

    @property
    def error(self) -> float:
        """Norm of what was lost relative to that of what was encoded, while it looked last."""
        whole, lost = self._squares
        return math.sqrt(lost / whole) if whole else 0.0

    def look(self, on: bool) -> None:
        """Begins or ends to look."""
        if on and not self.looks:
            self._squares = (0.0, 0.0)
        self.looks = on

    def encode(self, values: torch.Tensor, error: torch.Tensor, wire: torch.Tensor) -> None:
        start = time.thread_time()
        self.codec.encode(values, error, wire)
        self.seconds += time.thread_time() - start
        if self.looks:
            whole, lost = self._squares
            self._squares = (whole + float(values.square().sum()), lost + float(error.square().sum()))

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        start = time.thread_time()
        self.codec.decode(wire, out)
        self.seconds += time.thread_time() - start

    def decode_add(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        start = time.thread_time()
        self.codec.decode_add(wire, out)
        self.seconds += time.thread_time() - start


def reduce_scatter(
    flat: torch.Tensor, lost: torch.Tensor, coder: Coder, group: dist.ProcessGroup, *, tag: int = 0
) -> Transfer:
    """Adds up `flat` over the ranks; afterwards the r-th of its n equal parts is the sum on rank r.

    `lost` has an element for each of `flat`: what earlier encodings have lost, and afterwards what this one has.
    """
    if group.size() > 1:
        yield from _Exchange(flat, coder, group, tag).reduce(lost, last=True)


def all_gather(
    values: torch.Tensor, new: torch.Tensor, lost: torch.Tensor, coder: Coder, group: dist.ProcessGroup, *, tag: int = 0
) -> Transfer:
    """Brings `values`, which are the same on all ranks, to what the owners of its n equal parts have as `new`.

    The differences travel; `lost` gets what the encoding has lost of this rank's.
    """
    if group.size() > 1:
        exchange = _Exchange(values, coder, group, tag)
        with SCRATCH.lend(new.shape, new.dtype, new.device) as difference:
            torch.sub(new, exchange.part(0), out=difference)
            lost.zero_()
            yield from exchange.gather(difference, lost, coder.decode_add)


def all_reduce(
    flat: torch.Tensor,
    lost: torch.Tensor,
    lost_sums: torch.Tensor,
    coder: Coder,
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
) -> Transfer:
    """Adds up `flat` over the ranks, on every rank; `lost_sums` is what this rank's encodings of sums have lost."""
    if group.size() == 1:
        return
    exchange = _Exchange(flat, coder, group, tag)
    yield from exchange.reduce(lost, last=False)
    way_back = exchange.gather(exchange.part(0), lost_sums, coder.decode)
    next(way_back, None)
    yield from way_back


class _Exchange:
    """The messages of one transfer on this rank. Part k is the one that belongs to the rank k places to the left."""

    def __init__(self, flat: torch.Tensor, coder: Coder, group: dist.ProcessGroup, tag: int) -> None:
        self._ranks, self._rank, self._group, self._coder = group.size(), group.rank(), group, coder
        self._parts = flat.view(self._ranks, flat.numel() // self._ranks)
        width = self._parts.shape[1]
        self._pieces = [slice(at, min(at + PIECE, width)) for at in range(0, width, PIECE)]
        self._sizes = [coder.codec.wire_bytes(p.stop - p.start) for p in self._pieces]
        self._tag = tag

    def part(self, k: int) -> torch.Tensor:
        return self._parts[(self._rank - k) % self._ranks]

    def _cut(self, wire: torch.Tensor) -> list[torch.Tensor]:
        return list(wire.split(self._sizes)) if self._sizes else []

    def _wires(self, count: int) -> tuple[int, torch.dtype, torch.device]:
        return count * sum(self._sizes), torch.uint8, self._parts.device

    def reduce(self, lost: torch.Tensor, *, last: bool) -> Transfer:
        """Sends this rank's contributions to their owners, and adds up what it gets for its own part.

        `last`: nothing follows, so the next transfer can begin once all is posted.
        """
        others, count, lost_parts = self._ranks - 1, len(self._pieces), lost.view_as(self._parts)
        if not count:
            return
        with SCRATCH.lend(*self._wires(others)) as going, SCRATCH.lend(*self._wires(others)) as coming:
            out = [self._cut(w) for w in going.view(others, -1)]
            into = [self._cut(w) for w in coming.view(others, -1)]
            steps = [(k, j) for k in range(1, self._ranks) for j in range(count)]
            receiving = [
                self._group.recv([into[k - 1][j]], (self._rank - k) % self._ranks, self._tag + j) for k, j in steps
            ]
            sending = []
            mine = self.part(0)
            for number in range(len(steps) + AHEAD):
                if number < len(steps):
                    k, j = steps[number]
                    owner = (self._rank + k) % self._ranks
                    piece, wire = self._pieces[j], out[k - 1][j]
                    self._coder.encode(self._parts[owner][piece], lost_parts[owner][piece], wire)
                    sending.append(self._group.send([wire], owner, self._tag + j))
                if number == min(AHEAD, len(steps)) - 1:
                    yield
                if number >= AHEAD:
                    receiving[number - AHEAD].wait()
                    k, j = steps[number - AHEAD]
                    self._coder.decode_add(into[k - 1][j], mine[self._pieces[j]])
                if last and number >= len(steps):
                    yield
            for message in sending:
                message.wait()

    def gather(
        self, mine: torch.Tensor, lost: torch.Tensor, put: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> Transfer:
        """Sends what this rank has encoded of `mine` around the ring; `put` decodes each part into its place."""
        count, right, left = len(self._pieces), (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        first = self._tag + count
        if not count:
            return
        with SCRATCH.lend(*self._wires(self._ranks)) as wires:
            parts = [self._cut(w) for w in wires.view(self._ranks, -1)]
            receiving = [
                [self._group.recv([parts[k][j]], left, first + (k - 1) * count + j) for j in range(count)]
                for k in range(1, self._ranks)
            ]
            sending = []
            for j, piece in enumerate(self._pieces):
                self._coder.encode(mine[piece], lost[piece], parts[0][j])
                sending.append(self._group.send([parts[0][j]], right, first + j))
                put(parts[0][j], self.part(0)[piece])
            yield
            for k, messages in enumerate(receiving, 1):
                for j, message in enumerate(messages):
                    message.wait()
                    if k < self._ranks - 1:
                        sending.append(self._group.send([parts[k][j]], right, first + k * count + j))
                    put(parts[k][j], self.part(k)[self._pieces[j]])
                    if k == self._ranks - 1:
                        yield
            for message in sending:
                message.wait()


def timed(group: dist.ProcessGroup, precision: Precision) -> dict[CollectiveName, TimedTransfer]:
    """The three for flat fp32 tensors, to be measured. They need a group of their own (see `ring.twin`)."""
    coder = Coder(CODECS[precision])
    kept: dict[str, torch.Tensor] = {}

    def lost(flat: torch.Tensor) -> torch.Tensor:
        if "lost" not in kept or kept["lost"].numel() < flat.numel():
            kept["lost"] = torch.zeros_like(flat)
        return kept["lost"][: flat.numel()]

    def gather(flat: torch.Tensor, tag: int) -> Transfer:
        part = flat.view(group.size(), -1)[group.rank()]
        return all_gather(flat, part, lost(flat)[: part.numel()], coder, group, tag=tag)

    def reduce(flat: torch.Tensor, tag: int) -> Transfer:
        width = flat.numel() // group.size()
        return all_reduce(flat, lost(flat), lost(flat)[:width], coder, group, tag=tag)

    return {
        "all_reduce": reduce,
        "reduce_scatter": lambda flat, tag: reduce_scatter(flat, lost(flat), coder, group, tag=tag),
        "all_gather": gather,
    }

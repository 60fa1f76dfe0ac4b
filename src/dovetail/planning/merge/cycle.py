"""An iteration in which every bucket has its own way: whole, or split in two halves, each in some precision.

What happens, in order, on every rank at the same time:

1. backward makes gradients ready. Buckets are reduced over one channel, first in first out, each once its last gradient
   is ready: a whole bucket is all-reduced, a split one reduce-scattered, after which every rank holds the sum of its
   own 1/n of the bucket.
2. The optimiser updates bucket by bucket, as their reductions end and once backward is over: all of a whole bucket on
   every rank, the rank's own 1/n of a split one.
3. The next forward starts at once. The updated parameters of the split buckets are all-gathered over the same channel
   without a pause, the bucket with the first layers first: the reverse of the order in which they were reduced. A layer
   starts once the split buckets that hold its tensors are there.
4. The last layers' bucket comes last and is needed last. So the channel is free when the next backward starts, no
   iteration reaches into the one after next, and every period is alike.

Let A_m be the time from the start of forward until the split bucket m is gathered, and t_m the seconds of forward from
the first layer that uses it to the end. Forward lasts max(forward, max over m of A_m + t_m), and A_m is the sum of the
all-gathers of the split buckets m, m + 1, …: precisely the finish of a stream with ready times t (time runs backwards
from the end of forward). With R, G and U the seconds that a way takes behind backward, behind forward and to update:

    F' = max(F, r) + R,    H' = max(H, t) + G if split, else H,    E' = max(E, backward, F') + U
    period = E + max(forward, H)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from dovetail.core.network import AffineCost, Cost, FloatArray, Precision
from dovetail.core.plan import BucketKind
from dovetail.core.profile import Profile

from .stream import Stream, bucket_bytes, stream


@dataclass(frozen=True)
class Way:
    """How a bucket travels, and what that takes in seconds, by the bytes of the bucket in memory."""

    kind: BucketKind
    precision: Precision
    reduce: Cost
    """An all-reduce or a reduce-scatter, behind backward."""
    gather: Cost | None = None
    """An all-gather, behind the next forward; None where the bucket is whole."""
    update: Cost | None = None
    """The optimiser on what a rank updates of the bucket; None where that takes no time."""


@dataclass(frozen=True)
class Bucketing:
    """Where the stream is cut into buckets, and the way of every bucket."""

    cuts: tuple[int, ...]
    """End indices, as in `stream`."""
    ways: tuple[int, ...]
    """Indices into `Cycle.ways`."""

    def __len__(self) -> int:
        return len(self.cuts)


@dataclass(frozen=True)
class Cycle:
    """A stream of gradients backward, the same tensors forward, and the ways in which buckets can travel."""

    backward: Stream
    tails: tuple[float, ...]
    """For every tensor in ready order: seconds of forward from the first layer that uses it to the end."""
    forward: float
    """Seconds of the forward pass."""
    ways: tuple[Way, ...]

    def __post_init__(self) -> None:
        assert len(self.tails) == len(self.backward) and self.ways, "a tail for every tensor, and at least one way"
        assert max(self.tails) <= self.forward * (1 + 1e-9), "no tail is longer than forward"

    def __len__(self) -> int:
        return len(self.backward)

    @property
    def updates(self) -> bool:
        """Whether any update takes time."""
        return any(way.update is not None for way in self.ways)

    @cached_property
    def tables(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds (reduce, gather, update) by way, j and i, each for the bucket [i, j)."""
        prefix = self.backward.prefix
        # Above the diagonal there is no bucket; zero bytes keep cost functions within their domain there.
        nbytes = np.maximum(prefix[:, None] - prefix[None, :-1], 0)
        found = np.zeros((3, len(self.ways), *nbytes.shape))
        for w, way in enumerate(self.ways):
            for k, cost in enumerate((way.reduce, way.gather, way.update)):
                if cost is not None:
                    found[k, w] = cost(nbytes)
        return found[0], found[1], found[2]

    def only(self, allowed: Callable[[Way], bool]) -> Cycle:
        """The same with some of the ways."""
        ways = tuple(filter(allowed, self.ways))
        return self if ways == self.ways else replace(self, ways=ways)


@dataclass(frozen=True)
class Phases:
    """When everything happens, by bucket in gradient-ready order. Times in seconds."""

    reductions: list[tuple[float, float]]
    """Seconds from the start of backward."""
    updates: list[tuple[float, float]]
    """Seconds from the start of backward."""
    gathers: list[tuple[float, float] | None]
    """Seconds from the start of the next forward, which starts when the last update ends; None for whole buckets."""
    forward: float
    """Seconds of the next forward, waiting included."""

    @property
    def period(self) -> float:
        """Seconds from one start of backward to the next, and so from one start of forward to the next."""
        return self.updates[-1][1] + self.forward


def cycle(
    profile: Profile, ways: Sequence[Way], *, batch: int | None = None, cap: int | None = None, slowdown: float = 1.0
) -> Cycle:
    """The two phases of a profile at a local batch, with all computing `slowdown` times as long."""
    return Cycle(
        backward=stream(profile, batch=batch, cap=cap).stretched(slowdown),
        tails=tuple(t * slowdown for t in tails(profile, batch=batch)),
        forward=profile.forward_time(batch) * slowdown,
        ways=tuple(ways),
    )


def tails(profile: Profile, *, batch: int | None = None) -> list[float]:
    """For every tensor in ready order: seconds of forward from its layer on."""
    seconds = [layer.forward(batch or profile.batch) for layer in profile.layers]
    left = list(accumulate(reversed(seconds)))[::-1]
    return [left[t.layer] for t in profile.tensors]


def slowed(share: float, communicating: float, computing: float) -> float:
    """The factor by which computing takes longer, where it takes `share` longer while collectives are in flight.

    The share of computing during which one is in flight is estimated as communicating / computing, at most 1, with the
    least seconds that the channel can need. That is the same for all partitions, so that the best stays the best.
    """
    return 1.0 + share * min(1.0, communicating / computing) if computing else 1.0


def by_bytes(seconds: float, total: int) -> Cost | None:
    """The cost of updating a part of `total` bytes that together take `seconds`; None where that is 0."""
    return AffineCost(0.0, seconds / max(1, total)) if seconds else None


def cheapest(ways: Sequence[Way]) -> Cost:
    """The least seconds that a bucket takes of the channel, behind backward and forward together, over the ways."""

    def least(nbytes: npt.ArrayLike, /) -> FloatArray:
        each = [way.reduce(nbytes) + (0.0 if way.gather is None else way.gather(nbytes)) for way in ways]
        return np.asarray(np.min(each, axis=0))

    return least


def phases(cycle: Cycle, bucketing: Bucketing) -> Phases:
    """When each bucket is reduced, updated and gathered."""
    stream, cuts, chosen = cycle.backward, list(bucketing.cuts), np.array(bucketing.ways)
    sizes = bucket_bytes(stream, cuts)
    seconds = np.zeros((3, len(cuts)))
    for w in sorted(set(bucketing.ways)):
        way, at = cycle.ways[w], np.flatnonzero(chosen == w)
        for row, cost in zip(seconds, (way.reduce, way.gather, way.update), strict=True):
            if cost is not None:
                row[at] = cost(sizes[at])
    split = [cycle.ways[w].gather is not None for w in bucketing.ways]
    reductions, updates = list[tuple[float, float]](), list[tuple[float, float]]()
    free, updated, gathered = -math.inf, stream.backward, -math.inf
    each = seconds.T.tolist()
    for (start, stop), (reduce, gather, update), waited in zip(pairwise([0, *cuts]), each, split, strict=True):
        begins = max(free, stream.ready[stop - 1])
        free = begins + reduce
        reductions.append((begins, free))
        begins = max(updated, free)
        updated = begins + update
        updates.append((begins, updated))
        if waited:
            gathered = max(gathered, *cycle.tails[start:stop]) + gather
    gathers, done = list[tuple[float, float] | None](), 0.0
    for (_, gather, _), waited in zip(reversed(each), reversed(split), strict=True):
        gathers.append((done, done + gather) if waited else None)
        done += gather
    return Phases(reductions, updates, gathers[::-1], forward=max(cycle.forward, gathered))


def period(cycle: Cycle, bucketing: Bucketing) -> float:
    """Seconds from one iteration to the next."""
    return phases(cycle, bucketing).period


def grouped(cycle: Cycle, cuts: list[int], *, forced: bool = False) -> Cycle:
    """The same with each of these buckets as one tensor; `forced`: and none of them merged with another."""
    stream, bounds = cycle.backward, list(pairwise([0, *cuts]))
    breaks = range(1, len(cuts)) if forced else [k for k, (i, _) in enumerate(bounds) if i in stream.breaks]
    merged = Stream(
        ready=tuple(stream.ready[j - 1] for j in cuts),
        sizes=tuple(bucket_bytes(stream, cuts).tolist()),
        breaks=frozenset(breaks),
        cap=None if forced else stream.cap,
        backward=stream.backward,
    )
    return replace(cycle, backward=merged, tails=tuple(max(cycle.tails[i:j]) for i, j in bounds))


def ungrouped(bucketing: Bucketing, cuts: list[int]) -> Bucketing:
    """What a bucketing of grouped tensors is of the tensors themselves."""
    return Bucketing(tuple(cuts[j - 1] for j in bucketing.cuts), bucketing.ways)


def uniform(cycle: Cycle, cuts: Sequence[int]) -> list[Bucketing]:
    """The bucketings in which all of these buckets have the same way: one for each way."""
    return [Bucketing(tuple(cuts), (w,) * len(cuts)) for w in range(len(cycle.ways))]

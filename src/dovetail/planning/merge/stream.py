"""Gradients in the order in which backward makes them ready, and what cutting them into buckets costs.

A partition is the list of the end indices of its buckets: ``[2, 5]`` are the tensors 0–1 and 2–4. Buckets go over one
channel, first in first out: a bucket starts once the bucket before it has finished and its own last gradient is ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dovetail.core.network import AffineCost, Cost, FloatArray
from dovetail.core.profile import Profile

IntArray = npt.NDArray[np.int64]

_BLOCK = 64
"""Rows of the cost table that are filled at once: few calls of the cost function, and still little memory."""


@dataclass(frozen=True)
class Stream:
    """What backward hands to the network, in ready order."""

    ready: tuple[float, ...]
    """Seconds from the start of backward, non-decreasing."""
    sizes: tuple[int, ...]
    """Bytes of each gradient."""
    breaks: frozenset[int] = frozenset()
    """A bucket must end before each of these tensors: the dtype or the device changes there."""
    cap: int | None = None
    """Largest bucket in bytes; a single tensor above it is a bucket of its own."""
    backward: float = 0.0
    """Seconds until backward itself ends; communication that finishes earlier is free."""

    def __post_init__(self) -> None:
        assert len(self.ready) == len(self.sizes) > 0, "one ready time and one size for each of at least one tensor"
        assert all(a <= b for a, b in pairwise(self.ready)), "ready times must not decrease"
        assert min(self.sizes) >= 0, "sizes must not be negative"
        assert self.cap is None or self.cap > 0, "the cap must be positive"
        assert all(0 < b < len(self.sizes) for b in self.breaks), "a break lies between two tensors"

    def __len__(self) -> int:
        return len(self.sizes)

    def stretched(self, factor: float) -> Stream:
        """The same where backward takes `factor` times as long."""
        return replace(self, ready=tuple(t * factor for t in self.ready), backward=self.backward * factor)

    @cached_property
    def ready_array(self) -> FloatArray:
        return np.array(self.ready, dtype=np.float64)

    @cached_property
    def prefix(self) -> IntArray:
        """prefix[i]: bytes of the first i tensors."""
        return np.concatenate([[0], np.cumsum(np.array(self.sizes, dtype=np.int64))])

    @cached_property
    def lows(self) -> IntArray:
        """lows[j]: the smallest i for which the tensors [i, j) may share a bucket. Non-decreasing; lows[0] is unused.

        Every i from lows[j] to j − 1 is allowed, because a part of an allowed bucket is allowed.
        """
        ends = np.arange(len(self) + 1)
        lows = np.zeros(len(self) + 1, dtype=np.int64)
        if self.cap is not None:
            lows = np.searchsorted(self.prefix, self.prefix - self.cap, side="left").astype(np.int64)
            lows = np.minimum(lows, np.maximum(ends - 1, 0))
        if self.breaks:
            inner = np.array([0, *sorted(self.breaks)], dtype=np.int64)
            lows = np.maximum(lows, inner[np.maximum(np.searchsorted(inner, ends, side="left") - 1, 0)])
        return lows

    @cached_property
    def highs(self) -> IntArray:
        """highs[i]: the largest j for which the tensors [i, j) may share a bucket."""
        return np.searchsorted(self.lows[1:], np.arange(len(self)), side="right").astype(np.int64)


def stream(profile: Profile, *, batch: int | None = None, cap: int | None = None) -> Stream:
    """The gradients of a profile at a local batch; forced cuts where the dtype changes."""
    dtypes = [t.dtype for t in profile.tensors]
    return Stream(
        ready=tuple(profile.ready_times(batch)),
        sizes=tuple(t.bytes for t in profile.tensors),
        breaks=frozenset(i for i in range(1, len(dtypes)) if dtypes[i] != dtypes[i - 1]),
        cap=cap,
        backward=profile.backward_time(batch),
    )


def allowed(stream: Stream, cuts: list[int]) -> bool:
    """Whether the cuts cover all tensors, in order, and respect breaks and cap."""
    covers = bool(cuts) and cuts[-1] == len(stream) and all(a < b for a, b in pairwise([0, *cuts]))
    return covers and all(stream.lows[stop] <= start for start, stop in pairwise([0, *cuts]))


def bucket_bytes(stream: Stream, cuts: list[int]) -> IntArray:
    return np.diff(stream.prefix[[0, *cuts]])


def schedule(stream: Stream, cuts: list[int], cost: Cost, *, overhead: float = 0.0) -> list[tuple[float, float]]:
    """(start, stop) of every bucket on the channel, in seconds from the start of backward."""
    spans: list[tuple[float, float]] = []
    free = float("-inf")
    for stop, seconds in zip(cuts, cost(bucket_bytes(stream, cuts)).tolist(), strict=True):
        start = max(free, stream.ready[stop - 1])
        free = start + (seconds + overhead)
        spans.append((start, free))
    return spans


def finish(stream: Stream, cuts: list[int], cost: Cost, *, overhead: float = 0.0) -> float:
    """When the last bucket has been reduced, in seconds from the start of backward."""
    return schedule(stream, cuts, cost, overhead=overhead)[-1][1]


def objective(stream: Stream, cuts: list[int], cost: Cost) -> float:
    """Seconds from the start of backward until backward and communication are both over."""
    return max(stream.backward, finish(stream, cuts, cost))


def rows(stream: Stream, cost: Cost, *, overhead: float = 0.0) -> Iterator[tuple[int, int, FloatArray]]:
    """For j = 1..n: (j, low, seconds), where seconds[i − low] is the time of the bucket [i, j), low ≤ i < j."""
    prefix, lows = stream.prefix, stream.lows
    for first in range(1, len(stream) + 1, _BLOCK):
        stop = min(first + _BLOCK, len(stream) + 1)
        left = int(lows[first])
        # Above the diagonal there is no bucket; zero bytes keep the cost function within its domain there.
        nbytes = np.maximum(prefix[first:stop, None] - prefix[None, left : stop - 1], 0)
        table = cost(nbytes) + overhead
        for j in range(first, stop):
            low = int(lows[j])
            yield j, low, table[j - first, low - left : j - left]


def latency(cost: Cost) -> float:
    """Seconds of an empty collective: `a` where the cost is a + b·M."""
    return cost.latency if isinstance(cost, AffineCost) else float(cost(0))

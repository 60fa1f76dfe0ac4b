"""Simple rules for cutting the stream: what frameworks do and what the literature proposes, in one pass each."""

from __future__ import annotations

import bisect

from dovetail.core.network import Cost
from dovetail.core.plan import MIB

from .stream import Stream, latency


def per_tensor(stream: Stream) -> list[int]:
    return list(range(1, len(stream) + 1))


def fill(stream: Stream) -> list[int]:
    """As few buckets as breaks and cap allow: one, where there are none."""
    cuts = [0]
    while cuts[-1] < len(stream):
        cuts.append(int(stream.highs[cuts[-1]]))
    return cuts[1:]


def by_size(stream: Stream, limit: float, *, first: float | None = None) -> list[int]:
    """A bucket closes once it holds at least `limit` bytes; the first after every break once it holds `first`."""
    cuts: list[int] = []
    start, held = 0, 0
    for i, size in enumerate(stream.sizes):
        held += size
        opens = start == 0 or start in stream.breaks
        want = first if first is not None and opens else limit
        if held >= want or i + 1 == stream.highs[start]:
            cuts.append(i + 1)
            start, held = i + 1, 0
    return cuts


def ddp(stream: Stream) -> list[int]:
    """torch's default: buckets close at 1 MiB, then at 25 MiB each, and start again with every dtype.

    Exact where each dtype is one run of the ready order; torch gathers scattered dtypes into buckets of their own,
    which are not contiguous in ready order and so no partition of the stream.
    """
    return by_size(stream, 25 * MIB, first=1 * MIB)


def accumulate_while_busy(stream: Stream, cost: Cost) -> list[int]:
    """Whenever the channel is free, send all that is ready by then; if nothing is, wait for the next gradient."""
    cuts: list[int] = []
    start, free = 0, float("-inf")
    while start < len(stream):
        now = max(free, stream.ready[start])
        stop = min(bisect.bisect_right(stream.ready, now), int(stream.highs[start]))
        free = now + float(cost(stream.prefix[stop] - stream.prefix[start]))
        cuts.append(stop)
        start = stop
    return cuts


def mgwfbp_greedy(stream: Stream, cost: Cost) -> list[int]:
    """MG-WFBP's rule: the next gradient joins the open bucket if that delays its start by less than the latency.

    One step of look-ahead that never takes a merge back: exact for two tensors, not for three.
    """
    a = latency(cost)
    cuts: list[int] = []
    start, free = 0, float("-inf")
    begins = stream.ready[0]  # when the open bucket could start
    for i in range(1, len(stream)):
        if i < stream.highs[start] and stream.ready[i] - begins < a:
            begins = max(begins, stream.ready[i])
        else:
            free = begins + float(cost(stream.prefix[i] - stream.prefix[start]))
            cuts.append(i)
            start, begins = i, max(free, stream.ready[i])
    return [*cuts, len(stream)]

"""Partitions that no other partition beats.

For a fixed last bucket the finish is non-decreasing in the finish of what precedes it. So the best partition of the
first j tensors is made of the best partition of the first i and one bucket [i, j):

    F_0 = −∞,   F_j = min over i < j of max(F_i, r_j) + T(P_j − P_i)

with r_j the ready time of the j-th tensor (seconds), P the prefix sums (bytes) and T the time of one collective. That
holds for every T: tables, steps, costs that fall with size. Forced cuts and a byte cap only narrow the range of i.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, Cost, FloatArray

from .rules import fill
from .stream import IntArray, Stream, objective, rows

# Sums of the same times in another order differ by rounding; a budget must not fail by that.
_ROUNDING = 1e-12


def optimal(stream: Stream, cost: Cost, *, overhead: float = 0.0) -> list[int]:
    """The partition that finishes first, for any cost function. O(n²).

    `overhead` is added to every bucket's time on the channel, in seconds. Among equals the last bucket is the largest.
    """
    n = len(stream)
    best = np.full(n + 1, -np.inf)  # best[j] is F_j
    back = np.zeros(n + 1, dtype=np.int64)
    for j, low, seconds in rows(stream, cost, overhead=overhead):
        total = np.maximum(best[low:j], stream.ready[j - 1]) + seconds
        at = int(total.argmin())
        best[j], back[j] = total[at], low + at
    return _walk(back.tolist(), n)


def optimal_affine(stream: Stream, cost: AffineCost, *, overhead: float = 0.0) -> list[int]:
    """The partition that finishes first where T(M) = a + b·M with a, b ≥ 0. O(n), also with forced cuts and a cap.

    Take the best partition of the first j + 1 tensors and drop the last tensor. A part of an allowed bucket is allowed,
    and what remains finishes at least b·p_{j+1} earlier. So both F_j and F_j − b·P_j are non-decreasing in j. With
    k = max{i < j: F_i ≤ r_j}:

    * predecessors up to k cost r_j + a + b·(P_j − P_i): the largest of them, k, is the best;
    * predecessors above k cost F_i − b·P_i + a + b·P_j: the smallest of them, k + 1, is the best.

    Forced cuts and the cap allow the predecessors low_j ≤ i < j, and low_j is non-decreasing too: the same argument
    within that range leaves k (if k ≥ low_j) and max(k + 1, low_j). k only moves forward.
    """
    a, b = cost.latency + overhead, cost.seconds_per_byte
    if a < 0 or b < 0:
        return optimal(stream, cost, overhead=overhead)
    n, lows, prefix = len(stream), stream.lows.tolist(), stream.prefix.tolist()
    best, back = [float("-inf")] * (n + 1), [0] * (n + 1)
    k = 0
    for j in range(1, n + 1):
        ready = stream.ready[j - 1]
        while k + 1 < j and best[k + 1] <= ready:
            k += 1
        low = lows[j]
        here, i = float("inf"), k
        if k >= low:
            here = ready + (a + b * (prefix[j] - prefix[k]))
        after = max(k + 1, low)
        if after < j and (there := max(best[after], ready) + (a + b * (prefix[j] - prefix[after]))) < here:
            here, i = there, after
        best[j], back[j] = here, i
    return _walk(back, n)


def optimum(stream: Stream, cost: Cost) -> list[int]:
    """The partition that finishes first, by the faster of the two algorithms that applies."""
    return optimal_affine(stream, cost) if isinstance(cost, AffineCost) else optimal(stream, cost)


def best_per_count(stream: Stream, cost: Cost, most: int) -> dict[int, list[int]]:
    """For every number of buckets up to `most` that breaks and cap allow: the one that finishes first. O(most·n²)."""
    reached, back = _by_count(stream, cost, min(most, len(stream)))
    return {k: _walk_layers(back, k) for k in range(1, len(back)) if np.isfinite(reached[k, -1])}


def best_with(stream: Stream, cost: Cost, count: int) -> list[int]:
    """The partition with exactly `count` buckets that finishes first."""
    if not len(fill(stream)) <= count <= len(stream):
        raise Error(
            f"expected between {len(fill(stream))} and {len(stream)} buckets for {len(stream)} tensors, got {count}"
        )
    return _walk_layers(_by_count(stream, cost, count)[1], count)


def fewest(stream: Stream, cost: Cost, *, tolerance: float = 0.01) -> list[int]:
    """The fewest buckets that end backward and communication within `tolerance` of the optimum (0.01: one per cent).

    Of all partitions with that many buckets it is the one that finishes first. Communication that ends before backward
    costs nothing, so where everything can hide this is the fewest buckets that still hide. O(k·n²) for k buckets.
    """
    best = optimum(stream, cost)
    budget = objective(stream, best, cost) * (1 + tolerance + _ROUNDING)
    most = len(best)  # enough, by construction
    layers = min(most, len(fill(stream)) + 3)
    while True:
        reached, back = _by_count(stream, cost, layers)
        within = np.flatnonzero(reached[:, -1] <= budget)
        if len(within):
            return _walk_layers(back, int(within[0]))
        if layers == most:
            return best
        layers = min(most, 2 * layers)


def lower_bound(stream: Stream, cost: Cost) -> float:
    """Seconds from the start of backward before which no allowed partition can finish; cheap, and often tight.

    Look at the bucket [i, k) that holds tensor j, so i < j ≤ k (counting tensors from 1). It and all buckets after it
    start no earlier than r_j, one after the other. So the finish is at least r_j + D_j, where

        C_k = the least total time of any allowed partition of the tensors after k     (C_n = 0)
        D_j = min over i < j ≤ k of T(P_k − P_i) + C_k

    both of which ignore ready times and hence never exceed what a real partition spends there. This holds for every T,
    and max over j of r_j + D_j is the bound. For T = a + b·M without breaks and cap, splitting never saves time and
    bytes only add, so D_j = a + b·(P_n − P_{j−1}). In general one sweep over k from n down to 1 fills both tables in
    O(n²): when k is reached C_k is final, and the minimum over i < j is a running minimum.
    """
    return float((stream.ready_array + remaining(stream, cost)[1][1:]).max())


def remaining(stream: Stream, cost: Cost) -> tuple[FloatArray, FloatArray]:
    """(C, D) as `lower_bound` defines them, for 0..n; D_0 is meaningless."""
    n, prefix = len(stream), stream.prefix
    if (
        isinstance(cost, AffineCost)
        and min(cost.latency, cost.seconds_per_byte) >= 0
        and not (stream.breaks or stream.cap)
    ):
        rest = cost(prefix[n] - prefix)
        least = np.concatenate([[np.inf], rest[:n]])
        rest[n] = 0.0
        return rest, least
    return remaining_by(stream, lambda k, low: cost(prefix[k] - prefix[low:k]))


def remaining_by(stream: Stream, seconds: Callable[[int, int], FloatArray]) -> tuple[FloatArray, FloatArray]:
    """The same, where `seconds(k, low)` are the times of the buckets [low, k), [low + 1, k), … [k − 1, k)."""
    n = len(stream)
    rest = np.full(n + 1, np.inf)
    rest[n] = 0.0
    least = np.full(n + 1, np.inf)
    for k in range(n, 0, -1):
        low = int(stream.lows[k])
        total = seconds(k, low) + rest[k]
        rest[low:k] = np.minimum(rest[low:k], total)
        least[low + 1 : k + 1] = np.minimum(least[low + 1 : k + 1], np.minimum.accumulate(total))
    return rest, least


def _by_count(stream: Stream, cost: Cost, most: int) -> tuple[FloatArray, IntArray]:
    """reached[k, j]: the earliest finish of the first j tensors in exactly k buckets (inf: impossible), and where
    the last of them starts."""
    n = len(stream)
    reached = np.full((most + 1, n + 1), np.inf)
    reached[0, 0] = -np.inf
    back = np.zeros((most + 1, n + 1), dtype=np.int64)
    layer = np.arange(most)
    for j, low, seconds in rows(stream, cost):
        total = np.maximum(reached[:most, low:j], stream.ready[j - 1]) + seconds
        at = total.argmin(axis=1)
        reached[1:, j] = total[layer, at]
        back[1:, j] = low + at
    return reached, back


def _walk(back: list[int], j: int) -> list[int]:
    cuts: list[int] = []
    while j > 0:
        cuts.append(j)
        j = back[j]
    return cuts[::-1]


def _walk_layers(back: IntArray, count: int) -> list[int]:
    cuts = [back.shape[1] - 1]
    for k in range(count, 1, -1):
        cuts.append(int(back[k, cuts[-1]]))
    return cuts[::-1]

"""Shares of the work: local batches with which all workers finish together, and depths that fit their devices."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from dovetail.core.errors import Error

Seconds = Callable[[int, int], float]
"""(worker, batch or depth) → seconds; must not fall as the second grows."""


FEW = 4096
"""Samples that are handed out one by one; of more, most are handed out by a deadline."""


def balance(seconds: Seconds, total: int, *, caps: Sequence[int | None], knots: Sequence[int] = ()) -> tuple[int, ...]:
    """Local batches that add up to `total`, at least one each, for which the slowest worker is as fast as possible.

    One sample after another goes to the worker that would be done first with it. For times that do not fall with the
    batch that is optimal: any other assignment gives some worker at least one sample more than this one, and that
    sample was passed over here for one that ended no later. `caps` are the workers' largest batches (memory).

    Times of a profile may fall from one measured batch to the next. `knots` are those batches, ascending: between them
    times must be convex, or not fall.
    """
    workers = len(caps)
    if total < workers:
        raise Error(f"global batch: expected at least one sample for each of {workers} workers, got {total}")
    limits = [total if cap is None else cap for cap in caps]
    if min(limits) < 1:
        raise Error(f"worker {limits.index(min(limits))}: its memory does not hold a single sample at its depth")
    if sum(limits) < total:
        raise Error(
            f"global batch: expected at most {sum(limits)}, which is all that the workers' memory holds, got {total}"
        )
    batches = [1] * workers
    if total - workers > FEW:
        batches = _by_deadline(seconds, total, limits, knots)
    heap = [(seconds(w, b + 1), w) for w, b in enumerate(batches) if b < limits[w]]
    heapq.heapify(heap)
    for _ in range(total - sum(batches)):
        _, worker = heapq.heappop(heap)
        batches[worker] += 1
        if batches[worker] < limits[worker]:
            heapq.heappush(heap, (seconds(worker, batches[worker] + 1), worker))
    return tuple(batches)


def _by_deadline(seconds: Seconds, total: int, limits: Sequence[int], knots: Sequence[int]) -> list[int]:
    """The batches when all but the last few samples have been handed out, one after another.

    Samples are handed out in the order of the times that they lead to. So at any moment every worker has as many as it
    can do by some deadline, which is found by bisection. Where many samples end at the very same time no deadline
    separates them: of those, the first workers get theirs first.
    """
    inner = [[2, *(k for k in knots if 2 < k < limit), limit] if limit > 1 else [] for limit in limits]

    def done(deadline: float) -> list[int]:
        return [_most(seconds, w, deadline, points) for w, points in enumerate(inner)]

    low, high = 0.0, max(seconds(w, k) for w, points in enumerate(inner) for k in points)
    batches, most = done(low), list(limits)
    if sum(batches) > total:  # samples take no time at all
        batches, most, high = [1] * len(limits), batches, low
    while total - sum(batches) > FEW:
        middle = (low + high) / 2
        if not low < middle < high:
            # No number lies between the deadlines: every sample beyond the low one ends at the high one.
            for w in range(len(limits)):
                batches[w] += min(most[w] - batches[w], total - sum(batches))
            break
        found = done(middle)
        if sum(found) <= total:
            low, batches = middle, found
        else:
            high, most = middle, found
    return batches


def _most(seconds: Seconds, worker: int, deadline: float, points: Sequence[int]) -> int:
    """The largest batch such that the worker meets the deadline with it and with every smaller one from two on."""
    sure = 1
    for point in points:
        if seconds(worker, point) <= deadline:
            sure = point
            continue
        beyond = point
        while beyond - sure > 1:
            middle = (sure + beyond) // 2
            sure, beyond = (middle, beyond) if seconds(worker, middle) <= deadline else (sure, middle)
        break
    return sure


def assign(depths: Sequence[int], seconds: Seconds, *, limits: Sequence[int]) -> tuple[int, ...]:
    """Gives each worker one of `depths` so that the slowest worker is as fast as possible.

    `limits` are the depths beyond which workers have no memory. Both time and memory grow with depth, so for a given
    deadline every worker has a deepest depth, and the depths fit if the sorted ones stay below the sorted deepest ones.
    The shortest deadline for which they fit is found among the times that occur.
    """
    workers, wanted = len(depths), sorted(depths)
    times = [[seconds(w, d) for d in range(max(wanted) + 1)] for w in range(workers)]
    moments = sorted({times[w][d] for w in range(workers) for d in wanted if d <= limits[w]})

    def deepest(deadline: float) -> list[int]:
        return [
            max((d for d in wanted if d <= limits[w] and times[w][d] <= deadline), default=0) for w in range(workers)
        ]

    def fits(deadline: float) -> bool:
        return all(d <= most for d, most in zip(wanted, sorted(deepest(deadline)), strict=True))

    if not moments or not fits(moments[-1]):
        small = min(range(workers), key=lambda w: limits[w])
        raise Error(
            f"depths {','.join(map(str, depths))} do not fit the workers' memory: "
            f"worker {small} holds at most depth {limits[small]} at its local batch"
        )
    low, high = 0, len(moments) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(moments[middle]) else (middle + 1, high)
    most = deepest(moments[low])
    # The worker that can go least deep takes the shallowest depth; among equals the slower, then the first.
    order = sorted(range(workers), key=lambda w: (most[w], -times[w][-1], w))
    given = [0] * workers
    for worker, depth in zip(order, wanted, strict=True):
        given[worker] = depth
    return tuple(given)


def deepen(counts: Sequence[int], seconds: Seconds, *, limits: Sequence[int]) -> tuple[int, ...]:
    """The deepest depths that cost no time, given that segment s (from the input) needs counts[s] contributors.

    The shortest deadline is sought by which enough workers reach every segment; then every worker goes as deep as it
    can by that deadline, since nobody would wait for it.
    """
    segments, workers = len(counts), len(limits)
    times = [[seconds(w, d) for d in range(segments + 1)] for w in range(workers)]
    for deadline in sorted({t for row in times for t in row[1:]}):
        depths = [max((d for d in range(1, m + 1) if times[w][d] <= deadline), default=0) for w, m in enumerate(limits)]
        enough = all(sum(d >= segments - s for d in depths) >= c for s, c in enumerate(counts))
        if enough and min(depths) >= 1:
            return tuple(depths)
    raise Error(
        f"contributors {','.join(map(str, counts))} (input to output) do not fit the workers' memory: "
        f"at their local batches they hold depths {','.join(map(str, limits))}"
    )

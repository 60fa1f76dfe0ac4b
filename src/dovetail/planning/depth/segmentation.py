"""Segments of equal backward time: where to cut the layers so that all segments take equally long.

A segment is a run of layers in execution order that holds at least one parameter. The cuts are exact: no other cuts
have a shorter longest segment, and of those that share this longest segment none has a smaller sum of squares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dovetail.core.depth_plan import Segment
from dovetail.core.errors import Error
from dovetail.core.network import FloatArray
from dovetail.core.profile import Profile

_ROUNDING = 1e-12  # sums of the same times in another order differ by this share of the whole


def partition(seconds: Sequence[float], count: int) -> list[int]:
    """Cuts `seconds` into `count` runs, none of them empty, as equal as can be; the end of every run. O(count·n²).

    First the longest run becomes as short as it can; then, among all partitions with such a longest run, the sum of the
    squares decides, so that what need not be long is equal too.
    """
    assert 1 <= count <= len(seconds), "every run holds at least one"
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
    longest, _ = _best(prefix, count, np.maximum)
    limit = longest + _ROUNDING * float(prefix[-1])

    def squares(before: FloatArray, run: FloatArray) -> FloatArray:
        return np.where(run <= limit, before + run**2, np.inf)

    return _best(prefix, count, squares)[1]


def _best(
    prefix: FloatArray, count: int, join: Callable[[FloatArray, FloatArray], FloatArray]
) -> tuple[float, list[int]]:
    """The smallest value of a partition, and its ends: `join` adds runs to the values of what precedes them."""
    n = len(prefix) - 1
    value = np.full(n + 1, np.inf)
    value[0] = 0.0
    back = np.zeros((count + 1, n + 1), dtype=np.int64)
    for runs in range(1, count + 1):
        here = np.full(n + 1, np.inf)
        for j in range(runs, n - (count - runs) + 1):
            totals = join(value[runs - 1 : j], prefix[j] - prefix[runs - 1 : j])
            at = int(totals.argmin())
            here[j], back[runs, j] = totals[at], runs - 1 + at
        value = here
    ends = [n]
    for runs in range(count, 1, -1):
        ends.append(int(back[runs, ends[-1]]))
    return float(value[n]), ends[::-1]


def segments(profile: Profile, count: int, *, cuts: Sequence[str] | None = None) -> tuple[Segment, ...]:
    """The profile's layers in `count` segments of as equal backward time as its layers allow.

    Cuts fall only before layers that own parameters, so that every segment has something to train. `cuts` names the
    layers or modules before which a cut may fall; without it every such layer will do.
    """
    owners = sorted({t.layer for t in profile.tensors})
    starts = [0, *owners[1:]]  # layers before the first parameter belong to the first segment
    if cuts is not None:
        starts = [0, *_allowed(profile, cuts, set(owners[1:]))]
    if not 1 <= count <= len(starts):
        raise Error(
            f"profile {profile.name!r}: expected 1 to {len(starts)} segments "
            f"(cuts fall before layers with parameters{' that are named' if cuts is not None else ''}), got {count}"
        )
    seconds = [layer.backward(profile.batch) for layer in profile.layers]
    edges = [*starts, len(profile.layers)]
    ends = partition([sum(seconds[a:b]) for a, b in itertools.pairwise(edges)], count)
    bounds = [0, *(edges[e] for e in ends)]
    return tuple(Segment(start=a, stop=b) for a, b in itertools.pairwise(bounds))


def _allowed(profile: Profile, cuts: Sequence[str], owners: set[int]) -> list[int]:
    """The first layer with parameters of each named module."""
    found = set()
    for name in cuts:
        within = [
            i for i, layer in enumerate(profile.layers) if layer.name == name or layer.name.startswith(f"{name}.")
        ]
        if not within:
            raise Error(f"cuts: expected layers of profile {profile.name!r}, got {name!r}")
        inside = [i for i in within if i in owners]
        if not inside:
            raise Error(f"cuts: {name!r}: expected parameters in it and before it, so that both sides train something")
        found.add(inside[0])
    return sorted(found)

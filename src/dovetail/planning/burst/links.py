"""Links as they were measured where a burst job will run: all-reduce and re-sharding among each number of ranks.

On a network whose ranks share processors, switches or links no law leads from all ranks to some of them, so both are
measured for each number. `train.burst_measure` makes such links from a running job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dovetail.core.network import Collective, Cost, FloatArray, Network

from .cost import NetworkLinks


@dataclass(frozen=True)
class MeasuredLinks:
    """A number of ranks that was not measured follows the ring law from the widest, a re-sharding its nearest pair."""

    networks: Mapping[int, Network]
    """By number of ranks, the first ones of the job: what an all-reduce costs."""
    moves: Mapping[tuple[int, int], Collective]
    """By (ranks before, ranks after): what re-sharding costs, one way, by the bytes of the busiest rank."""
    crowded: Mapping[int, float] = field(default_factory=dict)
    """By number of ranks: how many times longer two all-reduces take at once than one after the other."""

    def all_reduce(self, nbytes: float, ranks: npt.ArrayLike, /) -> FloatArray:
        n = np.asarray(ranks, dtype=np.int64)
        each = [float(self.reduction(int(m))(nbytes)) if m > 1 else 0.0 for m in n.ravel()]
        return np.array(each).reshape(n.shape)

    def reduction(self, ranks: int, /) -> Cost:
        return NetworkLinks(self.networks.get(ranks) or self.networks[max(self.networks)]).reduction(ranks)

    def move(self, nbytes: npt.ArrayLike, before: npt.ArrayLike, after: npt.ArrayLike, /) -> FloatArray:
        amounts, h, g = np.broadcast_arrays(
            np.asarray(nbytes, dtype=np.float64), np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64)
        )
        each = [
            float(self._move(int(a), int(b))(amount)) if a != b else 0.0
            for amount, a, b in zip(amounts.ravel(), h.ravel(), g.ravel(), strict=True)
        ]
        return np.array(each).reshape(amounts.shape)

    def crowding(self, ranks: int, /) -> float:
        return self.crowded.get(ranks, 1.0)

    def _move(self, before: int, after: int) -> Cost:
        """Of the pairs that go the same way, shrinking or growing, the nearest."""
        same = [p for p in self.moves if (p[0] < p[1]) == (before < after)]
        near = min(same, key=lambda p: (abs(p[0] - before) + abs(p[1] - after), p))
        return self.moves[near].cost()

"""How an iteration is divided among a job's workers: samples, segments, and what each task is predicted to take."""

from __future__ import annotations

import msgspec


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for a job's whole life: it follows from the job file alone, never from times measured here and now.

    So two runs of a job, alone or among others, are cut at the same places and give the same losses.
    """

    batches: tuple[int, ...]
    """Samples of each worker."""
    plan: str = ""
    """The DepthPlan as JSON; empty where every worker goes all the way."""
    forward: tuple[float, ...] = ()
    """Seconds of each worker's forward pass; empty where neither a profile nor the job says."""
    backward: tuple[float, ...] = ()
    """Seconds of each worker's whole backward pass."""
    shares: tuple[float, ...] = (0.0, 1.0)
    """By depth from 0 on: the share of backward that the last so many segments take."""
    activations: int = 0
    """Bytes that a whole backward pass keeps, on an even share of the batch; 0 where unknown."""

    @property
    def segments(self) -> int:
        return len(self.shares) - 1

    @property
    def timed(self) -> bool:
        return bool(self.forward)

    def seconds(self, worker: int, depth: int) -> float:
        """Of one task; depth 0 stands for all segments, as in Task."""
        return self.forward[worker] + self.backward[worker] * self.shares[depth or self.segments]

    def samples(self, worker: int) -> tuple[int, int]:
        """[start, stop) in the global batch."""
        start = sum(self.batches[:worker])
        return start, start + self.batches[worker]


def even(batch: int, workers: int) -> tuple[int, ...]:
    """As equal as whole samples allow, the first workers take what is left over."""
    return tuple(batch // workers + (w < batch % workers) for w in range(workers))

"""How an iteration is divided among a job's workers: samples, segments, and the predicted time of each task."""

from __future__ import annotations

import msgspec


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for a job's whole life: it follows from the job file alone, never from measured times.

    So two runs of a job, alone or among others, are cut at the same places and give the same losses. It is stored in
    checkpoints: names do not change.
    """

    batches: tuple[int, ...]
    """Number of samples of each worker."""
    plan: str = ""
    """The DepthPlan as JSON; empty where every worker has full depth."""
    forward: tuple[float, ...] = ()
    """Seconds of each worker's forward pass; empty if neither a profile nor `task_seconds` gives them."""
    backward: tuple[float, ...] = ()
    """Seconds of each worker's whole backward pass."""
    shares: tuple[float, ...] = (0.0, 1.0)
    """Share of the whole backward pass that the last `depth` segments take, by depth from 0 on."""
    activations: int = 0
    """Bytes of activations that a whole backward pass needs, on an even share of the batch; 0 if unknown."""

    @property
    def segments(self) -> int:
        return len(self.shares) - 1

    @property
    def timed(self) -> bool:
        return bool(self.forward)

    def seconds(self, worker: int, depth: int) -> float:
        """Predicted seconds of one task; depth 0 means all segments, as in Task."""
        return self.forward[worker] + self.backward[worker] * self.shares[depth or self.segments]

    def samples(self, worker: int) -> tuple[int, int]:
        """The worker's samples [start, stop) in the global batch."""
        start = sum(self.batches[:worker])
        return start, start + self.batches[worker]


def even(batch: int, workers: int) -> tuple[int, ...]:
    """Samples of each worker, as equal as possible; the first workers take one more where it does not divide evenly."""
    return tuple(batch // workers + (w < batch % workers) for w in range(workers))

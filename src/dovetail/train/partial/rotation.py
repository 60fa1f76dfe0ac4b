"""Which samples a worker gets at each step: its depth stays, and the data goes round.

The samples of one step are cut into one part per worker. At step t, worker r takes part (r + t) mod k, so that every
part of the data meets every depth, while the tasks' shapes, memory and placement never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error


class RotatingBatches(Sampler[list[int]]):
    """Batches of sample indices for one worker, for `DataLoader(dataset, batch_sampler=…)`.

    Each epoch shuffles anew (the same on all ranks) and is cut into global batches of all workers' local batches
    together. The last one is filled up from the epoch's start, so that every rank makes the same number of steps.
    Local batches are the plan's, those of the phase to which a step belongs; steps are counted across epochs.
    """

    def __init__(
        self,
        data: Sized,
        plan: DepthPlan | Sequence[int],
        *,
        rank: int,
        steps: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """`plan` may be the local batches themselves, one per worker. `steps` is the length of the training."""
        self._size = len(data)
        if isinstance(plan, DepthPlan):
            if len(plan.phases) > 1 and steps is None:
                raise Error("RotatingBatches: the plan has phases: expected the training's length in `steps`")
            self._phases = [(p.begins * (steps or 0), p.batches) for p in plan.phases]
        else:
            self._phases = [(0.0, tuple(plan))]
        for _, batches in self._phases:
            if not batches or min(batches) < 1:
                raise Error(f"RotatingBatches: expected local batches of at least 1, got {list(batches)}")
        workers = len(self._phases[0][1])
        if not 0 <= rank < workers:
            raise Error(f"rank: expected 0 to {workers - 1}, got {rank}")
        if not self._size:
            raise Error("data: expected at least one sample, got none")
        self._rank, self._shuffle, self._seed = rank, shuffle, seed
        self._epoch = 0
        self.step = 0
        """Steps handed out so far. Set it when training resumes from a checkpoint."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, whose number seeds the order of the samples."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches in an epoch that begins now."""
        steps, at = 0, 0
        while at < self._size:
            at += sum(self._batches(self.step + steps))
            steps += 1
        return steps

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        at = 0
        while at < self._size:
            batches = self._batches(self.step)
            workers = len(batches)
            # Part p belongs to worker (p − step) mod k and is as large as that worker's batch.
            sizes = [batches[(part - self.step) % workers] for part in range(workers)]
            mine = (self._rank + self.step) % workers
            start = at + sum(sizes[:mine])
            at += sum(sizes)
            self.step += 1
            yield [order[i % self._size] for i in range(start, start + sizes[mine])]

    def _batches(self, step: int) -> tuple[int, ...]:
        return next(batches for begins, batches in reversed(self._phases) if step >= begins)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return [int(i) for i in torch.randperm(self._size, generator=generator)]

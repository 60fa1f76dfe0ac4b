"""RotatingBatches: which samples each worker gets at each step."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from dovetail.core.errors import Error
from dovetail.train.partial.rotation import RotatingBatches

from .depth_models import linear_plan


def test_every_part_of_the_data_meets_every_worker_and_nothing_is_lost() -> None:
    workers = [RotatingBatches(range(64), (4, 4, 4, 4), rank=r, shuffle=False) for r in range(4)]
    epochs = [[list(w) for w in workers] for _ in range(2)]
    assert all(sorted(i for w in epoch for b in w for i in b) == list(range(64)) for epoch in epochs)
    first = [[batch[0] % 16 // 4 for batch in w] for w in epochs[0]]
    assert first == [[(r + t) % 4 for t in range(4)] for r in range(4)]


def test_unequal_batches_rotate_and_the_last_step_is_filled_up() -> None:
    workers = [RotatingBatches(range(30), (6, 3, 1), rank=r, seed=3) for r in range(3)]
    assert [len(w) for w in workers] == [3, 3, 3]
    batches = [list(w) for w in workers]
    assert [[len(b) for b in w] for w in batches] == [[6] * 3, [3] * 3, [1] * 3]
    assert sorted(i for w in batches for b in w for i in b) == list(range(30))
    for worker in workers:
        worker.set_epoch(1)
    assert [list(w) for w in workers] != batches
    uneven = [RotatingBatches(range(32), (6, 3, 1), rank=r) for r in range(3)]
    counts = Counter(i for w in uneven for batch in w for i in batch)
    assert set(counts) == set(range(32)) and sum(counts.values()) == 40


def test_phases_change_the_batches_at_their_step() -> None:
    plan = linear_plan((4, 4))
    late = msgspec.structs.replace(plan.phases[0], begins=0.5, batches=(5, 3))
    plan = msgspec.structs.replace(plan, phases=(plan.phases[0], late))
    batches = RotatingBatches(range(16), plan, rank=0, steps=6)
    sizes = [len(b) for _ in range(3) for b in batches]
    assert sizes == [4, 4, 4, 5, 5, 5]
    with pytest.raises(Error, match="the plan has phases: expected the training's length"):
        RotatingBatches(range(16), plan, rank=0)


@pytest.mark.parametrize("batches", [(0, 0), (4, 0), (4, -1)])
def test_batches_that_would_never_use_up_the_data_are_refused(batches: tuple[int, ...]) -> None:
    with pytest.raises(Error, match=r"RotatingBatches: expected local batches of at least 1, got \["):
        RotatingBatches(range(4), batches, rank=0)

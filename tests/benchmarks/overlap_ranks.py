"""What ranks of the benchmarks' tests run: small contests of the real contestants."""

from __future__ import annotations

import sys
from typing import Any

from tests.emulate.test_layered import profile
from tests.paths import BENCHMARKS

TUNING = {"warmup": 0, "measure": 2, "candidates": 3, "steps": 1, "duel": 5, "duel_steps": 1, "network_seconds": 0.5}


def contest(contestants: list[str]) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import overlap_rank
    import overlap_records
    from dovetail.emulate.layered import in_layer_order

    spec = overlap_records.Spec(
        profile=in_layer_order(profile()),
        contestants=tuple(contestants),
        rounds=1,
        settle=1,
        steps=2,
        trial=1,
        caps=(1, 25),
        splits=1,
        tuning=TUNING,
    )
    return overlap_rank.contest(spec)


def training(steps: int) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import overlap_training

    return overlap_training.training(steps)


def memory(contestants: list[str], steps: int) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    import memory_rank

    return {name: memory_rank.run(name, steps, width=64, blocks=2) for name in contestants}

"""One rank of benchmarks/false_gains.py: plans again and again among buckets that are all the same."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from dovetail.train.data_parallel.tuning.reducer_target import ReducerTarget
from dovetail.train.data_parallel.tuning.trials import TrialPlan

WIDTH, DEPTH, BATCH = 384, 6, 64
TUNING = dovetail.Tuning(warmup=2, measure=3, network_seconds=0.2)

_contenders = ReducerTarget.contenders


def alike(target: ReducerTarget, *given: Any) -> list[TrialPlan]:
    """torch's own buckets, and the same buckets under other names, which get a new reducer each time."""
    first = _contenders(target, *given)[0]
    again = [TrialPlan(plan=first.plan, label=f"the same, name {n}", predicted=first.predicted) for n in range(2, 5)]
    return [first, *again]


def run() -> dict[str, Any]:
    """Trains one model until planning is over."""
    torch.manual_seed(0)
    hidden = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = dovetail.DistributedDataParallel(nn.Sequential(*hidden), tuning=TUNING)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(BATCH, WIDTH)
    while model.report.state in ("measuring", "trying"):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    found = model.report
    assert found.verdict is not None, found.reason
    return {
        "kept": found.verdict.kept > 0,
        "gain": found.gain,
        "spread": found.spread,
        "steps": found.steps,
        "most": TUNING.most,
        "result": next(line for line in str(found).splitlines() if "result" in line).split(maxsplit=1)[1],
    }


def main(runs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    ReducerTarget.contenders = alike  # type: ignore[method-assign,assignment]
    report([run() for _ in range(runs)])
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""What the tests of recordings run on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail.core.timeline import Timeline
from dovetail.train.integrations import buckets
from tests.train.data_parallel.overlap_scenarios import CAP, OPTIMIZERS, Bag, loss
from tests.train.data_parallel.scenarios import batch, net, own_plan, same_gradients

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")


def merged() -> dict[str, Any]:
    """Planned buckets behind backward, recorded beside torch's."""
    ours, theirs = dovetail.DistributedDataParallel(net(), plan=own_plan()), TorchDDP(net())
    equal = True
    with ours.record() as recording:
        for step in range(5):
            for model in (ours, theirs):
                model.zero_grad()
                model(batch(step)).sum().backward()
            equal &= same_gradients(ours, theirs)
    for step in range(4):  # and the module works on without the recording
        ours(batch(step)).sum().backward()
    timeline = recording.timeline()
    timeline.check()
    busy = dovetail.DistributedDataParallel(net())
    try:
        with busy.record():
            refused = ""
    except dovetail.Error as e:
        refused = str(e)
    return {
        "equal": equal,
        "iterations": _count(timeline, "forward"),
        "bytes": sum(s.bytes for s in timeline.spans),
        "parameters": sum(p.numel() * 4 for p in ours.parameters()),
        "tracks": sorted({s.track for s in timeline.spans}),
        "buckets": _count(timeline, "communication"),
        "used": buckets(ours),
        "refused": refused,
    }


def overlapped() -> dict[str, Any]:
    """Both halves of every bucket, and what that says of them."""
    model: Any = dovetail.DistributedDataParallel(Bag(), overlap="forward", bucket_cap_mb=CAP, plan=None)
    optimizer = dovetail.optimizer(OPTIMIZERS["sgd"](model.parameters()), model)
    with model.record() as recording:
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    timeline = recording.timeline()
    timeline.check()
    names = [s.name for s in timeline.spans if s.kind == "communication"]
    return {
        "kinds": sorted({s.kind for s in timeline.spans} - {"wait"}),
        "tracks": sorted({s.track for s in timeline.spans}),
        "scatters": sum(name.startswith("reduce-scatter") for name in names),
        "gathers": sum(name.startswith("all-gather") for name in names),
        "buckets": len(model.exchange.buckets),
        "start": min(s.start for s in timeline.spans),
        "backwards": _count(timeline, "backward"),
        "watching": model.exchange.watching,
    }


def nested(mode: str) -> dict[str, Any]:
    """Iterations in a recording, in a recording inside it, in one after that, and afterwards."""
    model: Any
    if mode == "burst":
        model = dovetail.Burst([nn.Linear(16, 4)], [2], loss=CROSS_ENTROPY, timeout=60)
    elif mode == "overlap":
        model = dovetail.DistributedDataParallel(net(), overlap="forward", plan=None)
        optimizer = dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    else:
        model = dovetail.DistributedDataParallel(net(), plan=None)

    def iterate(times: int) -> None:
        for _ in range(times):
            if mode == "burst":
                model.step(torch.ones(4, 16), torch.zeros(4, dtype=torch.long))
                continue
            model(batch(0)).sum().backward()
            if mode == "overlap":
                optimizer.step()
                optimizer.zero_grad()

    with model.record() as outer:
        iterate(4)
        with model.record() as inner:
            iterate(1)
        iterate(1)
        with model.record() as second:
            iterate(2)
        iterate(1)
    iterate(2)
    with model.record() as later:
        iterate(3)
    found = {"outer": outer, "inner": inner, "second": second, "later": later}
    return {name: _count(recording.timeline(), "backward") for name, recording in found.items()} | {
        "starts": [min(s.start for s in r.timeline().spans) for r in found.values()]
    }


def _count(timeline: Timeline, kind: str) -> int:
    return sum(s.kind == kind for s in timeline.spans)

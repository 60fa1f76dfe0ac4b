"""What the tests of overlap run on every rank: stored plans, what is refused, the rings alone, how a rank dies."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail.core import files
from dovetail.core.plan import Bucket, Plan, Prediction
from dovetail.train.data_parallel.eligibility import PLAN_VARIABLE
from dovetail.train.data_parallel.wire import backends, ring

from .overlap_scenarios import OPTIMIZERS, Bag, both, difference, loss, refusal


def refusals() -> dict[str, str]:
    """What cannot work says so when it is wrapped."""

    def ours(module: Any, **given: Any) -> Any:
        return dovetail.DistributedDataParallel(module, overlap="forward", **given)

    model = ours(nn.Linear(4, 4))
    held = dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    other = ours(nn.Linear(4, 4))
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    silent = ours(nn.Linear(4, 4))
    silent_optimizer = dovetail.optimizer(torch.optim.SGD(silent.parameters(), lr=0.1), silent)
    with silent.no_sync():
        silent(torch.ones(2, 4)).sum().backward()
    idle = ours(nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)}))
    idle_optimizer = dovetail.optimizer(torch.optim.SGD(idle.parameters(), lr=0.1), idle)
    idle.module.forward = lambda x: idle.module["used"](x)
    idle(torch.ones(2, 4)).sum().backward()
    moved = ours(nn.Linear(4, 4))
    moved_optimizer = dovetail.optimizer(torch.optim.SGD(moved.parameters(), lr=0.1), moved)
    moved(torch.ones(2, 4)).sum().backward()
    moved.module.weight.data = moved.module.weight.data.clone()
    acts: dict[str, Callable[[], Any]] = {
        "lbfgs": lambda: dovetail.optimizer(torch.optim.LBFGS(other.parameters()), other),
        "twice": lambda: dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model),
        "several": lambda: dovetail.optimizer(torch.optim.SGD(other.parameters(), lr=0.1), [model, other]),
        "plain model": lambda: dovetail.optimizer(held, nn.Linear(2, 2)),
        "word": lambda: dovetail.DistributedDataParallel(nn.Linear(2, 2), overlap="backward"),  # type: ignore[arg-type]
        "sparse": lambda: ours(nn.Embedding(4, 4, sparse=True)),
        "dtypes": lambda: ours(mixed, precision="bf16"),
        "hook": lambda: model.register_comm_hook(None, lambda *_: None),
        "silent": silent_optimizer.step,
        "idle": idle_optimizer.step,
        "moved": moved_optimizer.step,
        "different": lambda: ours(nn.Linear(4, 4), tuning=dovetail.Tuning(warmup=3 + dist.get_rank())),
    }
    return {name: refusal(act) for name, act in acts.items()}


def by_hand() -> Plan:
    """A plan for a Bag, in an order that nobody would guess."""
    sizes = {n: p.numel() * p.element_size() for n, p in Bag().named_parameters() if p.requires_grad}
    names = sorted(sizes)
    ends = [1, 4, len(names)]
    return Plan(
        policy="by hand",
        profile="bag",
        network="none",
        workers=dist.get_world_size(),
        batch=1,
        tensors=tuple(names),
        dtypes=("float64",),
        buckets=tuple(
            Bucket(start=a, stop=b, bytes=sum(sizes[n] for n in names[a:b]), kind="whole" if a == 1 else "split")
            for a, b in pairwise([0, *ends])
        ),
        prediction=Prediction(iteration=0.0, forward=0.0, backward=0.0, exposed=0.0, lower_bound=0.0),
        overlap="forward",
    )


def given() -> dict[str, Any]:
    """A stored plan from the first step on; and plans that do not fit."""
    theirs, plan = TorchDDP(Bag()), by_hand()
    ours = dovetail.DistributedDataParallel(Bag(), overlap="forward", plan=plan)
    make = OPTIMIZERS["adam"]
    pairs = [(theirs, make(theirs.parameters())), (ours, dovetail.optimizer(make(ours.parameters()), ours))]
    for step in range(3):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    return {
        "difference": difference(ours, theirs),
        "used": _buckets(ours),
        "planned": [list(plan.tensors[b.start : b.stop]) for b in plan.buckets],
        "report": ours.report.plan == plan,
        "other model": refusal(lambda: dovetail.DistributedDataParallel(nn.Linear(4, 4), overlap="forward", plan=plan)),
    }


def by_torch() -> dict[str, Any]:
    """A stored plan for torch's reducer, with a second line: the reducer stays, and the optimiser is whole."""
    theirs = TorchDDP(Bag())
    sizes = {n: p.numel() * p.element_size() for n, p in Bag().named_parameters() if p.requires_grad}
    plan = by_hand()
    whole = tuple(msgspec.structs.replace(b, kind="whole") for b in plan.buckets)
    ours = dovetail.DistributedDataParallel(
        Bag(), plan=msgspec.structs.replace(plan, overlap="backward", buckets=whole)
    )
    make = OPTIMIZERS["adam"]
    pairs = [(theirs, make(theirs.parameters())), (ours, dovetail.optimizer(make(ours.parameters()), ours))]
    for step in range(4):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    assert ours.exchange is not None
    return {
        "difference": difference(ours, theirs),
        "by torch": not ours.exchange.active,
        "elements": sum(p.numel() for p in ours.optimizer.state if p.dim()) if ours.optimizer else 0,
        "all": sum(size // 8 for size in sizes.values()),
    }


def named(folder: str) -> dict[str, Any]:
    """Plans that the environment names."""
    plan = by_hand()
    mine = Path(folder, str(dist.get_rank()))
    mine.mkdir()
    files.write(mine / "plan.json", plan)
    files.write(mine / "other.json", msgspec.structs.replace(plan, tensors=("other", *plan.tensors[1:])))
    found: dict[str, Any] = {"planned": [list(plan.tensors[b.start : b.stop]) for b in plan.buckets]}

    def wrapped() -> Any:
        model = dovetail.DistributedDataParallel(Bag(), overlap="forward")
        dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        return model

    try:
        os.environ[PLAN_VARIABLE] = str(mine / "plan.json")
        ours = wrapped()
        found |= {"used": _buckets(ours), "report": ours.report.plan == plan}
        for what in ("other", "missing"):
            os.environ[PLAN_VARIABLE] = str(mine / f"{what}.json")
            found[what] = refusal(wrapped)
    finally:
        del os.environ[PLAN_VARIABLE]
    return found


def _buckets(model: Any) -> list[list[str]]:
    return [[model.exchange.slots[i].name for i in bucket.members] for bucket in model.exchange.buckets]


def dropped() -> list[bool]:
    """Whether a model is freed when nobody holds it any more, with parameters on their way."""
    freed = []
    for steps in (0, 2):
        model, optimizer = both(OPTIMIZERS["sgd"])[1]
        for step in range(steps):
            loss(model, step).backward()
            optimizer.step()
        inner = weakref.ref(model.module)
        del model, optimizer
        gc.collect()
        freed.append(inner() is None)
    return freed


def rings(elements: int, piece: int) -> dict[str, bool]:
    """The three collectives against plain sums, in pieces of so many bytes; two of them on their way at once."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = backends.twin(None, torch.device("cpu"))
    whole = ring.padded(elements, ranks)
    real, ring.PIECE = ring.PIECE, piece
    try:
        inputs = [torch.arange(whole, dtype=torch.float64) * (r + 1) + r for r in range(ranks)]
        expected = sum(inputs)
        assert isinstance(expected, torch.Tensor)
        share = expected.view(ranks, -1)[rank]
        scattered, gathered = inputs[rank].clone(), torch.zeros(whole, dtype=torch.float64)
        first = ring.reduce_scatter(scattered, group)
        next(first, None)
        reduced = inputs[rank].clone()
        second = ring.all_reduce(reduced, group, tag=10**6)
        next(second, None)
        ring.finish(first)
        ring.finish(second)
        gathered.view(ranks, -1)[rank].copy_(share)
        ring.finish(ring.all_gather(gathered, group))
    finally:
        ring.PIECE = real
    return {
        "scattered": torch.equal(scattered.view(ranks, -1)[rank], share),
        "reduced": torch.equal(reduced, expected),
        "gathered": torch.equal(gathered, expected),
    }


def mortal() -> None:
    """Trains until the second rank is killed in the middle of a backward pass."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=45))
    torch.manual_seed(0)
    model = dovetail.DistributedDataParallel(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), overlap="forward", bucket_cap_mb=0.02
    )
    optimizer = dovetail.optimizer(torch.optim.Adam(model.parameters()), model)
    for step in range(100):
        if step == 3 and dist.get_rank() == 1:
            model.module[4].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    mortal()

"""What the tests of this folder run on every rank. Each function returns what the test then asserts on."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import Tuning, planning
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.train.data_parallel.module import DistributedDataParallel
from dovetail.train.data_parallel.observe import ObservedIteration
from dovetail.train.data_parallel.tuning import tuner as tuner_module
from dovetail.train.integrations import buckets
from tests.devices import place

QUICK = Tuning(warmup=1, measure=3, candidates=3, settle=2, steps=2, rounds=2, duel_steps=1, network_seconds=0.2)
STEPS = QUICK.most // 2 + 14  # enough for QUICK to end and for the kept plan to be in force


def net(width: int = 48, depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    hidden = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return place(nn.Sequential(nn.Linear(16, width), *hidden, nn.Linear(width, 4)))


def same_gradients(one: nn.Module, other: nn.Module, same: Callable[..., bool] = torch.equal) -> bool:
    """Whether two models have the same gradients, None where the other has None."""
    pairs = [(p.grad, q.grad) for p, q in zip(one.parameters(), other.parameters(), strict=True)]
    return all(p is q is None or (p is not None and q is not None and same(p, q)) for p, q in pairs)


def batch(step: int) -> torch.Tensor:
    return place(torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())))


@contextmanager
def preferring(position: int, *, by: float = 0.5) -> Iterator[None]:
    """Lets one of three candidates look faster than torch's own buckets by this share, whatever the machine does.

    Only the candidates and their measured times are replaced; everything they lead to is real.
    """
    tuner: Any = tuner_module
    planner: Any = planning
    real, real_candidates = tuner.compete, planner.candidates

    def three(profile: Profile, network: Network, **_: Any) -> list[Plan]:
        return [planning.plan(profile, network, policy=p) for p in ("ddp", "threshold:0.02", "per-tensor")]

    def fake(*given: Any, use: Callable[[int], None], **more: Any) -> Generator[None, ObservedIteration, int]:
        now = 0

        def using(which: int) -> None:
            nonlocal now
            now = which
            use(which)

        more["seconds"] = lambda _: 1.0 - by if now == position else 1.0 + 0.01 * now
        kept: int = yield from real(*given, use=using, **more)
        return kept

    tuner.compete, planner.candidates = fake, three
    try:
        yield
    finally:
        tuner.compete, planner.candidates = real, real_candidates


def follows_torch(keep: int, **keywords: Any) -> dict[str, Any]:
    """Trains with torch's DDP and with dovetail's side by side through the whole of tuning, and beyond."""
    warnings.simplefilter("ignore")
    pairs: list[tuple[Any, torch.optim.Optimizer]] = []
    kinds: list[tuple[Any, dict[str, Any]]] = [(TorchDDP, {}), (DistributedDataParallel, {"tuning": QUICK})]
    for kind, more in kinds:
        model = kind(net(), **keywords, **more)
        pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)))
    different = []
    for step in range(STEPS):
        for model, optimizer in pairs:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with preferring(keep):
                model(batch(step)).square().mean().backward()
            optimizer.step()
        parameters = [list(m.parameters()) for m, _ in pairs]
        # More than two ranks add in an order that depends on where a bucket begins, with torch's own caps as well.
        same = torch.equal if dist.get_world_size() == 2 else torch.allclose
        if not all(same(p, q) for p, q in zip(*parameters, strict=True)):
            different.append(step)
    ours = pairs[1][0]
    return {
        "different": different,
        "state": ours.report.state,
        "kept": ours.report.kept.label,
        "trials": [t.steps for t in ours.report.trials],
        "dropped": [t.dropped for t in ours.report.trials],
        "buckets": buckets(ours),
        "planned": [b.bytes for b in (ours.report.plan or ours.report.kept.plan).buckets],
        "explained": ours.explain(),
        "tuner_left": ours._tuner is not None,
        "hooks_left": sum(len(p._post_accumulate_grad_hooks or ()) for p in ours.parameters()),
    }


def near_tie(gain: float) -> str:
    model = DistributedDataParallel(net(), tuning=QUICK)
    for step in range(STEPS):
        with preferring(1, by=gain):
            model(batch(step)).sum().backward()
    assert model.report.kept is not None
    return model.report.kept.label


def accumulates() -> dict[str, Any]:
    """Gradient accumulation with no_sync: two silent passes, one that synchronises; evaluation on one rank between."""
    ours, theirs = DistributedDataParallel(net(), tuning=QUICK), TorchDDP(net())
    equal = True
    for step in range(STEPS):
        for model in (ours, theirs):
            model.zero_grad()
            with model.no_sync():
                model(batch(3 * step)).sum().backward()
                model(batch(3 * step + 1)).sum().backward()
            model(batch(3 * step + 2)).sum().backward()
            if dist.get_rank() == 0:
                with torch.no_grad():
                    model(batch(step))
        equal &= same_gradients(ours, theirs)
    return {"equal": equal, "state": ours.report.state, "steps": ours.report.steps}


def uneven() -> dict[str, Any]:
    """`join`: one rank has more data than the other."""
    model = DistributedDataParallel(net(), tuning=QUICK)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            model(batch(step)).sum().backward()
    return {"reason": model.report.reason}


def alone() -> str:
    return DistributedDataParallel(net()).report.reason


def planner_fails() -> dict[str, str]:
    """The first rank cannot plan: all ranks must hear of it, or the others would wait for ever."""

    def broken(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no numbers today")

    real = planning.candidates
    if dist.get_rank() == 0:
        planning.candidates = broken  # type: ignore[assignment]
    model = DistributedDataParallel(net(), tuning=QUICK)
    for step in range(STEPS):
        model(batch(step)).sum().backward()
    planning.candidates = real
    return {"state": model.report.state, "reason": model.report.reason}


def dies(step_of_death: int) -> str:
    """One rank vanishes in the middle of planning; the other must end with an error, not hang."""
    import os

    model = DistributedDataParallel(net(), tuning=QUICK)
    for step in range(STEPS):
        if step == step_of_death and dist.get_rank() == 1:
            os._exit(0)
        model(batch(step)).sum().backward()
    return "went on"


def own_plan(policy: str = "threshold:0.02") -> Plan:
    profile = dovetail.measure.profile(net(), torch.randn(8, 16), steps=2, warmup=1, batches=[8])
    box = [planning.plan(profile, dovetail.measure.preset("10gbe-2"), policy=policy)]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def given_plan(path: str) -> dict[str, Any]:
    import os

    plan = own_plan()
    models: dict[str, Any] = {
        "given": DistributedDataParallel(net(), plan=plan),
        "keywords": TorchDDP(net(), **plan.ddp_kwargs()),
    }
    if dist.get_rank() == 0:
        dovetail.write(path, plan)
    dist.barrier()
    os.environ["DOVETAIL_PLAN"] = path
    models["environment"] = DistributedDataParallel(net())
    os.environ["DOVETAIL_PLAN"] = "off"
    off = DistributedDataParallel(net())
    del os.environ["DOVETAIL_PLAN"]
    for model in models.values():
        for step in range(4):
            model(batch(step)).sum().backward()
    return {
        "planned": [b.bytes for b in plan.buckets],
        "used": {name: buckets(model) for name, model in models.items()},
        "off": off.report.reason,
        "explained": models["given"].explain(),
    }


def wrong_plans() -> list[str]:
    plan = own_plan()
    said = []
    attempts: list[Callable[[], Any]] = [
        lambda: DistributedDataParallel(net(depth=5), plan=plan),
        lambda: DistributedDataParallel(net(width=47), plan=plan),
        lambda: DistributedDataParallel(net(), plan=plan, bucket_cap_mb=10),
        lambda: DistributedDataParallel(net(), plan="fastest"),  # type: ignore[arg-type]
        lambda: DistributedDataParallel(net(), tuning=Tuning(steps=0)),
    ]
    for attempt in attempts:
        try:
            attempt()
        except dovetail.Error as e:
            said.append(str(e))
    return said


def states() -> dict[str, bool]:
    """state_dict goes both ways between torch's DDP and ours, also in the middle of planning; pickles work."""
    ours, theirs = DistributedDataParallel(net(), tuning=QUICK), TorchDDP(net(depth=6))
    for step in range(6):
        ours(batch(step)).sum().backward()
        with torch.no_grad():
            for p in ours.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.01)
    theirs.load_state_dict(ours.state_dict())
    there = all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    fresh = DistributedDataParallel(net())
    fresh.load_state_dict(theirs.state_dict())
    back = all(torch.equal(a, b) for a, b in zip(fresh.parameters(), theirs.parameters(), strict=True))
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(batch(0)).sum().backward()
    twin = copy.deepcopy(theirs.module)
    return {
        "there": there,
        "back": back,
        "keys": list(ours.state_dict()) == list(theirs.state_dict()),
        "is a torch DDP": isinstance(ours, TorchDDP),
        "pickled": all(torch.equal(a, b) for a, b in zip(loaded.parameters(), ours.parameters(), strict=True)),
        "unwrapped": all(torch.equal(a, b) for a, b in zip(twin.parameters(), ours.module.parameters(), strict=True)),
    }


def subclasses() -> dict[str, Any]:
    """Classes of the user's own, with a second line and without."""

    class Mine(DistributedDataParallel):
        pass

    made = {"plain": Mine(net(), plan=None), "overlapping": Mine(net(), overlap="forward", plan=None)}
    dovetail.optimizer(torch.optim.SGD(made["overlapping"].parameters(), lr=0.1), made["overlapping"])
    for model in made.values():
        model(batch(0)).sum().backward()
    return {name: type(model).__name__ for name, model in made.items()}


def says_so_once() -> list[str]:
    """The line that says why planning is off appears once, on the first rank."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear()
    logging.getLogger("dovetail").addHandler(ear)
    model = DistributedDataParallel(net(), bucket_cap_mb_list=[0.01, 1.0])
    for step in range(3):
        model(batch(step)).sum().backward()
    logging.getLogger("dovetail").removeHandler(ear)
    return heard

"""What a training is like long after its plan was kept: looks back at the plan, and what is left when it is over."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dovetail
from dovetail import Tuning
from dovetail.train.data_parallel.module import DistributedDataParallel
from dovetail.train.data_parallel.tuning import tuner as tuner_module
from dovetail.train.data_parallel.tuning.trials import Turns
from dovetail.train.integrations import buckets

from .scenarios import batch, net, preferring, same_gradients

QUICK = Tuning(warmup=1, measure=3, candidates=3, steps=2, duel=5, duel_steps=1, network_seconds=0.2, look_back=80)
LONG = 400
"""Iterations in which planning and a look back are over in any case."""


class Delayed(nn.Module):
    """A net whose forward pass waits for a while."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.net, self.seconds = net(width=width), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.net(x)  # type: ignore[no-any-return]


@contextmanager
def looking_back(gain: float) -> Iterator[None]:
    """In looks back the kept plan seems faster by this share, whatever the machine does; all else is real."""
    tuner: Any = tuner_module
    real = tuner.Turns

    class Rigged(Turns[Any]):
        def __init__(self, *given: Any, use: Callable[[int], None], seconds: Any) -> None:
            now = 0

            def using(plan: int) -> None:
                nonlocal now
                now = plan
                use(plan)

            super().__init__(*given, use=using, seconds=lambda _: 1.0 - gain * now)

    tuner.Turns = Rigged
    try:
        yield
    finally:
        tuner.Turns = real


@contextmanager
def heard() -> Iterator[list[str]]:
    """What dovetail logs, in one line each."""
    lines: list[str] = []
    log, handler = logging.getLogger("dovetail"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def looks_back(gain: float, *, drift: bool = False, record: bool = False) -> dict[str, Any]:
    """Trains beside torch's DDP until a plan that was kept has been looked at again, and some iterations beyond.

    The first rank also runs forward passes of its own, with gradients, as some scripts do to evaluate; not while torch
    is about to put new buckets into ready order, which takes all ranks.
    """
    theirs, inner = TorchDDP(Delayed()), Delayed()
    ours = DistributedDataParallel(inner, tuning=QUICK)
    different, rested, at_rest, after, recorded = [], 0, 0, 0, 0
    with heard() as lines, looking_back(gain):
        for number in range(LONG):
            for model in (theirs, ours):
                model.zero_grad()
                with preferring(1):
                    model(batch(number)).square().sum().backward()
            if not same_gradients(ours, theirs):
                different.append(number)
            resting = ours.report.state == "done" and ours._tuner is None
            rested, at_rest = rested + resting, at_rest + 1 if resting else 0
            if at_rest > 3 and dist.get_rank() == 0 and number % 3 == 0 and not record:
                ours(batch(number))
            if drift and rested == 14:  # there was a glance after 10
                inner.seconds = 0.03
            if record and ours._tuner is not None and ours._tuner.looks_back and not recorded:
                with ours.record() as recording:
                    for more in range(4):
                        ours.zero_grad()
                        ours(batch(more)).sum().backward()
                recorded = len(recording.timeline().spans)
            after += bool(ours.report.reviews)
            if after == 6:
                break
    report = ours.report
    review = report.reviews[-1] if report.reviews else None
    return {
        "different": different,
        "rested": rested,
        "recorded": recorded,
        "review": {"stays": review.stays, "drifted": review.drifted, "gain": review.duel.gain} if review else None,
        "kept": report.kept.label if report.kept else None,
        "gain": report.gain,
        "plan": report.plan is not None,
        "buckets": buckets(ours),
        "own": buckets(theirs),
        "planned": [b.bytes for b in report.trials[1].plan.buckets],
        "explained": ours.explain(),
        "lines": [line for line in lines if "less time a step than" in line or "in force again" in line],
        "looks_on": ours._look_back is not None,
        "hooks_left": sum(len(p._post_accumulate_grad_hooks or ()) for p in ours.parameters()),
    }


def looks_back_attached(gain: float) -> dict[str, Any]:
    """The same with an attached optimiser, where the exchange was kept."""
    theirs, ours = TorchDDP(net(width=192)), DistributedDataParallel(net(width=192), tuning=QUICK)
    optimizers: list[Any] = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (theirs, ours)]
    optimizers[1] = dovetail.optimizer(optimizers[1], ours)
    tuner: Any = tuner_module
    real, after = tuner.compete, 0

    def fake(plans: Any, *given: Any, use: Callable[[int], None], **more: Any) -> Any:
        now = 0

        def using(which: int) -> None:
            nonlocal now
            now = which
            use(which)

        more["seconds"] = lambda _: 0.5 if now == len(plans) - 1 else 1.0
        return real(plans, *given, use=using, **more)

    tuner.compete = fake
    try:
        with looking_back(gain):
            for number in range(LONG):
                for model, optimizer in zip((theirs, ours), optimizers, strict=True):
                    optimizer.zero_grad()
                    model(batch(number)).square().mean().backward()
                    optimizer.step()
                after += bool(ours.report.reviews)
                if after == 6:
                    break
    finally:
        tuner.compete = real
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return {
        "stays": [review.stays for review in ours.report.reviews],
        "kept": ours.report.kept.label if ours.report.kept else None,
        "plan": ours.report.plan.overlap if ours.report.plan else None,
        "exchange": ours.exchange is not None and ours.exchange.active,
        "explained": ours.explain(),
        "apart": max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs),
    }


def logged_iterations(keep: int, **keywords: Any) -> dict[str, Any]:
    """Numbers of iterations by torch's log, through the whole of planning: torch's DDP and ours, step by step."""
    theirs, ours = TorchDDP(net(), **keywords), DistributedDataParallel(net(), tuning=QUICK, **keywords)
    for model in (theirs, ours):
        model._set_ddp_runtime_logging_sample_rate(1)
    counted = []
    for number in range(LONG):
        for model in (theirs, ours):
            with preferring(keep):
                model(batch(number)).sum().backward()
        counted.append([m._get_ddp_logging_data().get("iteration", 0) for m in (theirs, ours)])
        if ours.report.state == "done" and ours._tuner is None and len(counted) > 40:
            break
    data = ours._get_ddp_logging_data()
    return {"counted": counted, "plan": ours.report.plan is not None, "rebuilt": data.get("has_rebuilt_buckets")}


def left_over(folder: str) -> dict[str, list[tuple[int, int]]]:
    """(threads, descriptors) of this process after each of some cycles of connecting, training and disconnecting."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def connect(name: str) -> None:
        where = f"file://{Path(folder) / name}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=120))

    def disconnect() -> None:
        dist.barrier()
        time.sleep(0.1)
        dist.destroy_process_group()

    def cycle(name: str, model_of: Callable[[nn.Module], Any], *, first: str) -> tuple[int, int]:
        connect(name)
        model = model_of(net())
        for number in range(60):
            with preferring(1):
                model(batch(number)).sum().backward()
        if first == "model":
            del model
            gc.collect()
            disconnect()
        else:
            disconnect()
            del model
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "torch": TorchDDP,
        "ours": lambda module: DistributedDataParallel(module, tuning=QUICK),
    }
    disconnect()
    found = {
        f"{kind}, {first} first": [cycle(f"{kind}-{first}-{n}", model_of, first=first) for n in range(3)]
        for kind, model_of in kinds.items()
        for first in ("model", "group")
    }
    connect("last")
    return found

"""Every way to train, on whatever device the ranks have: what they come to, and how often their hosts wait for it.

Models are small: a device that emulates another is slow. Losses are read when training is over, as a script does that
does not want to wait for its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dovetail
from dovetail.core.plan import Bucket
from dovetail.emulate import accelerator
from dovetail.planning.depth.guard import Guard
from dovetail.train.data_parallel.wire import backends
from dovetail.train.partial.segments import cut
from tests import devices
from tests.devices import place

from .data_parallel.overlap_scenarios import of_kinds, refusal
from .data_parallel.scenarios import QUICK, STEPS, preferring

Train = Callable[[nn.Module, int, Callable[[int], None]], list[torch.Tensor]]
"""Trains a model for so many steps, calls the function before each step, and returns the losses."""


class Convolutions(nn.Sequential):
    """Convolutions with batch norms."""

    shape = (1, 8, 8)

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 5)),
        )


class Attention(nn.Module):
    """One block of a transformer."""

    shape = (6, 8)

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(x).mean(1))


class Recurrent(nn.Module):
    shape = (6, 8)

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.cells(x)[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": Convolutions, "transformer": Attention, "lstm": Recurrent}
BATCH = 4
COUNTED = 2
"""Steps in which waits of the host are counted, the last ones."""


def made(model: str) -> nn.Module:
    torch.manual_seed(0)
    return place(MODELS[model]())


def data(model: nn.Module, step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a rank, or the same on all ranks."""
    draw = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    inner: Any = getattr(model, "module", model)
    x, y = torch.randn(BATCH, *inner.shape, generator=draw), torch.randint(0, 5, (BATCH,), generator=draw)
    return place(x), place(y)


def steps_of(
    model: nn.Module, optimizer: Any, steps: int, before: Callable[[int], None], clip: float = 0.0
) -> list[torch.Tensor]:
    losses = []
    for step, (x, y) in enumerate([data(model, step) for step in range(steps)]):
        before(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    before(steps)
    return losses


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def planned(model: nn.Module, steps: int, before: Callable[[int], None]) -> list[torch.Tensor]:
    """dovetail's DistributedDataParallel, from before planning to behind it."""
    wrapped = dovetail.DistributedDataParallel(model, tuning=QUICK, bucket_cap_mb=0.002)
    with preferring(1):
        losses = steps_of(wrapped, adam(wrapped.parameters()), STEPS, lambda _: None)
    assert wrapped.report.state == "done", wrapped.explain()
    return [*losses, *steps_of(wrapped, adam(wrapped.parameters()), steps, before)]


def split(
    model: nn.Module,
    steps: int,
    before: Callable[[int], None],
    *,
    kinds: str = "ws",
    precision: Any = "full",
    **more: Any,
) -> list[torch.Tensor]:
    """With the second line, in buckets of both kinds; they are laid out anew in the middle."""
    wrapped: Any = dovetail.DistributedDataParallel(model, plan=None, bucket_cap_mb=0.002, **more)
    optimizer = dovetail.optimizer(adam(wrapped.parameters()), wrapped)

    def lay_out(which: str, every: int | None) -> None:
        order, buckets = of_kinds(wrapped, which, every=every)
        optimizer.move(order, [_travelling(bucket, precision) for bucket in buckets])

    lay_out(kinds, None)
    losses = steps_of(wrapped, optimizer, 3, lambda _: None)
    lay_out(kinds[::-1], 2)
    losses += steps_of(wrapped, optimizer, steps, before, clip=0.5)
    state = dovetail.full_state(optimizer)
    assert len(state.get("state", {})) in (0, len(list(model.parameters())))
    return losses


def _travelling(bucket: Bucket, precision: Any) -> Bucket:
    return Bucket(start=bucket.start, stop=bucket.stop, bytes=bucket.bytes, kind=bucket.kind, precision=precision)


def tuned(model: nn.Module, steps: int, before: Callable[[int], None]) -> list[torch.Tensor]:
    """The second line through the whole of its planning, in which all kinds of buckets and torch's reducer compete."""
    wrapped: Any = dovetail.DistributedDataParallel(model, overlap="forward", tuning=QUICK, bucket_cap_mb=0.002)
    optimizer = dovetail.optimizer(adam(wrapped.parameters()), wrapped)
    with preferring(3):
        losses = steps_of(wrapped, optimizer, STEPS, lambda _: None)
    assert wrapped.report.state == "done", wrapped.explain()
    return [*losses, *steps_of(wrapped, optimizer, steps, before)]


def partial_depth(
    model: nn.Module, steps: int, before: Callable[[int], None], *, guard: Guard | None = None
) -> list[torch.Tensor]:
    """Partial backpropagation: the second rank leaves out the first segment."""
    x, _ = data(model, 0)
    first = next(name for name, layer in reversed(list(model.named_modules())) if isinstance(layer, nn.Linear))
    plan = cut(model, x, at=[first], depths=[2, 1])
    wrapped = dovetail.PartialBackprop(model, plan, guard=guard, timeout=60)
    optimizer = adam(wrapped.parameters())
    return [*steps_of(wrapped, optimizer, 3, lambda _: None), *steps_of(wrapped, optimizer, steps, before)]


def bursting(model: nn.Module, steps: int, before: Callable[[int], None]) -> list[torch.Tensor]:
    """Burst, with another plan in the middle."""
    assert isinstance(model, nn.Sequential)
    cut = len(model) // 2
    burst = dovetail.Burst(model, [2] * cut + [1] * (len(model) - cut), loss=partial(F.cross_entropy, reduction="none"))
    optimizer, losses = adam(burst.parameters()), []
    for step, (x, y) in enumerate([data(model, step, rank=0) for step in range(3 + steps)]):
        if step == 2:
            burst.replan([1] * cut + [2] * (len(model) - cut), optimizer)
        before(step - 3)
        optimizer.zero_grad()
        losses.append(burst.step(x, y))
        burst.clip_grad_norm_(1.0)
        optimizer.step()
    before(steps)
    return losses


GUARD = Guard(every=2, patience=1)

WAYS: dict[str, tuple[Train, str]] = {
    "planned": (planned, "cnn"),
    "split": (split, "cnn"),
    "split lstm": (split, "lstm"),
    "split, unused": (partial(split, find_unused_parameters=True), "transformer"),
    "bf16": (partial(split, precision="bf16"), "transformer"),
    "int8": (partial(split, precision="int8"), "transformer"),
    "tuned": (tuned, "transformer"),
    "partial": (partial_depth, "cnn"),
    "partial, guarded": (partial(partial_depth, guard=GUARD), "transformer"),
    "burst": (bursting, "cnn"),
}


def trains(way: str, where: str = "", jitter: float = 0.0, steps: int = 4) -> dict[str, Any]:
    """Losses, and where and how often the host waited in the last steps; `jitter` of kernels is in seconds."""
    train, name = WAYS[way]
    model = made(name)
    counting, counted = ExitStack(), list[accelerator.SyncCount]()

    def before(step: int) -> None:
        if not devices.on_accelerator():
            return
        devices.reuse_memory()
        if step == steps - COUNTED:
            counted.append(counting.enter_context(accelerator.count_syncs()))
        elif step == steps:
            counting.close()

    with devices.kernels_vary(jitter), devices.side_stream() if where == "side" else nullcontext():
        losses = train(model, steps, before)
        waits = [f"{r.count} x {r.what} at {r.where}" for count in counted for r in count.records]
        return {"losses": [loss.item() for loss in losses], "waits": waits}


def groups() -> dict[str, Any]:
    """Seconds after which messages of second groups count as lost, by what the first has; and a group without emu."""
    device, first = devices.device(), dist.group.WORLD
    assert first is not None
    both, seven = "cpu:gloo,emu:eccl", timedelta(seconds=7)
    named = {
        "own": first,
        "both": dist.new_group(timeout=timedelta(seconds=60), backend=both),
        "own, 7 s": dist.new_group(timeout=seven, backend="eccl"),
        "both, 7 s": dist.new_group(timeout=seven, backend=both),
    }
    hosts = dist.new_group(backend="gloo")
    return {
        "patience": {name: backends.patience(backends.twin(group, device)) for name, group in named.items()},
        "own": {name: backends.has_own(group, device) for name, group in named.items()},
        "of the host": backends.has_own(named["both"], torch.device("cpu")),
        "said": refusal(lambda: backends.twin(hosts, device)),
    }

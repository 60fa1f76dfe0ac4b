"""What the tests of tasks on an accelerator run: in a process of its own, since the emulated device stays loaded.

    python -m tests.cluster.executor.device.scenarios    prints what each scenario found, as JSON

Losses and parameters on the device are compared with those of the same job on the CPU, in the same process.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob
from dovetail.cluster.aggregator.training import Training
from dovetail.cluster.executor.device import leaving_gradients
from dovetail.cluster.executor.device.device_runner import DeviceRunner
from dovetail.cluster.executor.device.device_tensors import DeviceTensors
from dovetail.cluster.executor.device.leaving_gradients import LeavingGradients
from dovetail.cluster.executor.device.task_device import TaskDevice
from dovetail.cluster.executor.loader import open_runner
from dovetail.cluster.executor.task_runner import TaskRunner
from dovetail.cluster.job.objects import JobError
from dovetail.cluster.transport.messages import Done, Task
from dovetail.emulate import accelerator

DEVICE = "emu:1"
"""Not the device that is current when the process begins."""
STEPS = 4
LIMIT = 64 << 20
JITTER = 0.0003
"""Seconds, at most, by which every kernel is delayed."""
_names = itertools.count()


# -- jobs --


class Convolutions(nn.Module):
    """Batch norm, a buffer that is replaced instead of changed, parameters that get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
        )  # fmt: skip
        self.unused = nn.Linear(2, 2)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        out: torch.Tensor = self.body(x)
        return out


class Norm(nn.Module):
    """By the root of the mean square."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


class Attention(nn.Module):
    """Written with products and a softmax: for attention in one call, CPU and device have kernels of their own."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = norm, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        out: torch.Tensor = x + self.out(weights @ v)
        return out


class Transformer(nn.Module):
    """Tied embeddings; the same kernels on CPU and device unless the norm is torch's."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.blocks = nn.Sequential(
            Attention(32, norm or Norm()), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        )
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.position: torch.Tensor
        self.register_buffer("position", torch.randn(12, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(x) + self.position))
        return out


class Normed(Transformer):
    """With torch's layer norm, for which CPU and device have kernels of their own."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(32))


class Recurrent(nn.Module):
    """torch keeps weak references to an LSTM's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x.squeeze(1))[0][:, -1])
        return out


def images() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 1, 8, 8, generator=made), torch.randint(0, 4, (64,), generator=made))


def text() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randint(0, 16, (2, 64, 12), generator=made))


def wide() -> nn.Module:
    """Its weights are most of what a task needs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def job(model: Callable[[], nn.Module] = Convolutions, **given: Any) -> TrainingJob:
    usual: dict[str, Any] = {
        "model": model,
        "data": text if model in (Transformer, Normed) else images,
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "steps": STEPS,
        "batch": 16,
        "workers": 2,
        "seed": 3,
    }
    return TrainingJob(**{**usual, **given})


# -- running them --


class Opened:
    """A job's training and its task runner, on the CPU or on a device."""

    def __init__(self, one: TrainingJob, on: TaskDevice | None = None) -> None:
        self.training = Training(one, f"dovetail-test-{os.getpid()}-{next(_names)}")
        self.runner: TaskRunner = open_runner(one, self.training.arena.name, emulated=False, on=on)
        self.losses: list[float] = []

    def task(self, worker: int) -> Task:
        depths, division = self.training.depths(), self.training.division
        depth = 0 if depths[worker] == division.segments else depths[worker]
        return Task(iteration=self.training.iteration, worker=worker, depth=depth, samples=division.samples(worker))

    def iterate(self) -> None:
        done: dict[int, Done] = {w: self.runner.run(self.task(w)) for w in range(self.training.job.workers)}
        self.losses.append(self.training.update(done, self.training.depths()))

    def bits(self) -> list[Any]:
        """Everything that has been learnt: losses, parameters, buffers."""
        arena = self.training.arena
        return [*self.losses, *(t.tolist() for t in (*arena.parameters.values(), *arena.buffers.values()))]

    def close(self) -> None:
        self.runner.close()
        self.training.arena.unlink()


@contextmanager
def opened(*jobs: TrainingJob, on: TaskDevice | None = None) -> Iterator[list[Opened]]:
    made = [Opened(one, on) for one in jobs]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def trained(one: TrainingJob, on: TaskDevice | None = None) -> list[Any]:
    with opened(one, on=on) as (only,):
        for _ in range(one.steps):
            only.iterate()
        return only.bits()


# -- scenarios --


def same_bits() -> dict[str, bool]:
    """By job: whether device and CPU have learnt the same, to the bit, with jitter on every kernel."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    jobs = {
        f"{model.__name__} {spb}": job(model, spb=spb)
        for model, spb in itertools.product((Convolutions, Transformer), ("off", "ladder"))
    }
    for name, one in (jobs | {"backward inside the loss": job(loss=twice)}).items():
        expected = trained(one)
        with accelerator.durations(jitter=JITTER, seed=7):
            found[name] = trained(one, on) == expected
    return found


def nearly_same_losses() -> dict[str, float]:
    """Largest relative difference to the CPU's losses, where the device has kernels of its own."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    for model in (Recurrent, Normed):
        pairs = zip(trained(job(model))[:STEPS], trained(job(model), on)[:STEPS], strict=True)
        found[model.__name__] = max(abs(a - b) / abs(a) for a, b in pairs)
    return found


def waits() -> dict[str, Any]:
    """How often the host waited for the device in tasks after the first ones, and what they left there."""
    on = TaskDevice(DEVICE, LIMIT)
    with opened(job(), on=on) as (only,):
        only.iterate()
        before = torch.accelerator.memory_allocated(on.device)
        with accelerator.count_syncs() as counted:
            for _ in range(3):
                only.iterate()
        left = torch.accelerator.memory_allocated(on.device) - before
    gc.collect()
    after = torch.accelerator.memory_allocated(on.device)
    return {"tasks": 6, "waits": counted.total, "where": str(counted), "left": left, "closed": after}


def overlap() -> dict[str, float]:
    """Milliseconds by which copies had ended before the computation had that they ran beside."""
    on = TaskDevice(DEVICE, LIMIT)
    on.event = lambda: torch.Event(on.device, enable_timing=True)  # type: ignore[method-assign]
    with opened(job(wide, workers=1), job(wide, workers=1, seed=4), on=on) as (one, other):
        one.iterate()
        other.iterate()
        runner, waiting = one.runner, other.runner
        assert isinstance(runner, DeviceRunner) and isinstance(waiting, DeviceRunner)
        on.meanwhile = lambda: waiting.prefetch(other.training.iteration)
        first, left = runner._leaving._groups[0][-1], on.event()
        copy = LeavingGradients._copy

        def timed(self: LeavingGradients, index: int) -> None:
            copy(self, index)
            if index == first:
                left.record(on.outward)

        LeavingGradients._copy = timed  # type: ignore[method-assign]
        try:
            with accelerator.durations(0.005, kernels={"copy H2D": 0.0, "copy D2H": 0.0}):
                one.iterate()
        finally:
            LeavingGradients._copy = copy  # type: ignore[method-assign]
        computed, arrived = runner._leaving._computed, waiting._tensors._arrived
        arrived.synchronize()
        before = [computed, left, arrived]
        with accelerator.count_syncs() as counted:
            on.meanwhile = lambda: None
            other.iterate()
        assert waiting._tensors.iteration == 1
        return {
            "gradients": before[1].elapsed_time(before[0]),
            "parameters": before[2].elapsed_time(before[0]),
            "waits": counted.total,
        }


def races() -> dict[str, str]:
    """What a task says if a wait between two streams is left out."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    kept = DeviceTensors.await_arrival, on.outward
    for name in ("parameters", "gradients"):
        with opened(job(), on=on) as (only,), accelerator.durations(jitter=JITTER):
            if name == "parameters":
                DeviceTensors.await_arrival = lambda self: None  # type: ignore[method-assign]
            else:
                on.outward = Deaf(device=on.device)
            found[name] = failure(only.iterate)
            DeviceTensors.await_arrival, on.outward = kept  # type: ignore[method-assign]
            only.iterate()  # the next task is whole again
    accelerator.races(clear=True)
    return found


class Deaf(torch.Stream):
    """A stream that waits for nobody."""

    def wait_event(self, event: torch.Event) -> None:
        pass


def one_of_three() -> dict[str, Any]:
    """Three jobs take turns on a device that has room for one of them."""
    jobs = [job(wide, seed=seed) for seed in range(3)]
    expected = [trained(one) for one in jobs]
    need = needed(jobs[0])
    on = TaskDevice(DEVICE, need + need // 8)
    most = 0
    with opened(*jobs, on=on) as three:
        for _ in range(STEPS):
            for one in three:
                torch.accelerator.reset_peak_memory_stats(on.device)
                one.iterate()
                most = max(most, torch.accelerator.max_memory_allocated(on.device))
        same = [one.bits() for one in three] == expected
    return {"same": same, "evictions": on.budget.evictions, "most": most, "limit": on.budget.limit, "need": need}


def room_for_all() -> int:
    """Evictions of three jobs where all have room."""
    on = TaskDevice(DEVICE, LIMIT)
    with opened(*(job(wide, seed=seed) for seed in range(3)), on=on) as three:
        for one in (*three, *three):
            one.iterate()
    return on.budget.evictions


def wrong_guess() -> dict[str, Any]:
    """A job whose first task needs more than was to be expected runs out of memory, and is run again alone."""
    heavy, light = job(wide, batch=64, workers=1, loss=hungry), job(wide, seed=1)
    expected = [trained(heavy), trained(light)]
    on = TaskDevice(DEVICE, needed(heavy) + 4096)
    with opened(heavy, light, on=on) as both:
        for one in [*reversed(both)] * STEPS:
            one.iterate()
        failed = torch.accelerator.memory_stats(on.device)["num_ooms"]
        return {"same": [one.bits() for one in both] == expected, "failed": failed}


def too_large() -> dict[str, Any]:
    """A job that does not fit alone fails with one line, and the next job runs."""
    on = TaskDevice(DEVICE, needed(job()) * 2)
    with opened(job(wide), job(), on=on) as (large, small):
        lines = [failure(large.iterate), failure(large.iterate)]
        small.iterate()
        return {"lines": lines, "loss": small.losses[0]}


def faults() -> dict[str, Any]:
    """Errors of a job's code, in Python or in a kernel that fails later, are its own."""
    on, found = TaskDevice(DEVICE, LIMIT), {}
    expected = trained(job(Transformer))
    broken = {"kernel": outside, "tensors of two devices": elsewhere, "python": impossible}
    with opened(job(Transformer), on=on) as (whole,):
        for name, bad in broken.items():
            with opened(job(Transformer, loss=bad), on=on) as (one,):
                found[name] = failure(one.iterate)
            whole.iterate()
        whole.iterate()
        return {**found, "same": whole.bits() == expected}


def hungry(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Needs more memory for activations than for weights."""
    return loss(model, [batch[0].repeat(64, 1, 1, 1), batch[1].repeat(64)])


def twice(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Every gradient is added to a second time, when the first may have been on its way already."""
    loss(model, [batch[0] * 0.5, batch[1]]).backward()  # type: ignore[no-untyped-call]
    return loss(model, batch)


def outside(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return loss(model, [batch[0] + 1000, batch[1]])


def elsewhere(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return loss(model, [batch[0], batch[1].cpu()])


def impossible(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    loss(model, batch).backward()  # leaves gradients behind
    raise RuntimeError("out of paper")


def needed(one: TrainingJob) -> int:
    """Bytes that a task of the job needs on a device, its tensors included."""
    on = TaskDevice(DEVICE, LIMIT)
    with opened(one, on=on) as (only,):
        only.iterate()
        assert isinstance(only.runner, DeviceRunner)
        return only.runner._tensors.bytes + only.runner._working


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except JobError as e:
        return str(e)
    return ""


SCENARIOS = (
    same_bits, nearly_same_losses, waits, overlap, races, one_of_three, room_for_all, wrong_guess, too_large, faults,
)  # fmt: skip


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    leaving_gradients.GROUP = 4096  # several groups in a small model
    print(json.dumps({s.__name__: s() for s in SCENARIOS if not wanted or s.__name__ in wanted}))


if __name__ == "__main__":
    main(sys.argv[1:])

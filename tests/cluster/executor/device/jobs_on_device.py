"""Jobs for tests of tasks on an accelerator, and a loop that trains one without a cluster, on CPU or device."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob
from dovetail.cluster.aggregator.training import Training
from dovetail.cluster.executor.device.task_device import TaskDevice
from dovetail.cluster.executor.loader import open_runner
from dovetail.cluster.executor.task_runner import TaskRunner
from dovetail.cluster.transport.messages import Done, Task

STEPS = 4
_names = itertools.count()


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

"""One task: the same bits whenever and wherever it runs; errors of the job's code stay with the job."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob
from dovetail.cluster.aggregator.training import Training
from dovetail.cluster.executor.loader import open_runner
from dovetail.cluster.executor.task_runner import Stale, TaskRunner
from dovetail.cluster.job.arena import FOLDER, Arena
from dovetail.cluster.job.objects import JobError
from dovetail.cluster.transport.messages import Task

pytestmark = pytest.mark.usefixtures("one_thread")
names = itertools.count()


class Noisy(nn.Module):
    """Dropout, batch norm, and a buffer that is replaced instead of changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        hidden: torch.Tensor = self.norm(self.first(x))
        out: torch.Tensor = self.last(nn.functional.dropout(hidden, 0.5))
        return out


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + random.random() + float(np.random.rand()) + torch.rand(4)


def job(**given: Any) -> TrainingJob:
    usual: dict[str, Any] = {
        "model": Noisy,
        "data": Augmented,
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "steps": 3,
        "batch": 10,
        "workers": 2,
        "seed": 5,
    }
    return TrainingJob(**{**usual, **given})


@contextmanager
def opened(one: TrainingJob, *, emulated: bool = False) -> Iterator[tuple[Training, TaskRunner]]:
    training = Training(one, f"dovetail-test-{os.getpid()}-{next(names)}")
    try:
        yield training, open_runner(one, training.arena.name, emulated=emulated)
    finally:
        training.arena.unlink()
        assert not (FOLDER / training.arena.name).exists()


def task(worker: int, *, iteration: int = 0, depth: int = 0, share: int = 5, claim: int = 0) -> Task:
    samples = (worker * share, (worker + 1) * share)
    return Task(iteration=iteration, worker=worker, depth=depth, samples=samples, claim=claim)


def bits(arena: Arena, worker: int) -> list[torch.Tensor]:
    flats = [*arena.gradients(worker).flats.values(), arena.flags[worker], *arena.next_buffers.values()]
    return [t.clone() for t in flats]


def test_a_task_run_again_after_others_and_by_another_executor_gives_the_same_bits() -> None:
    with opened(job()) as (training, runner):
        other = open_runner(job(), training.arena.name, emulated=False)
        first = runner.run(task(0))
        expected = bits(training.arena, 0)
        for again in (runner, other, other, runner):
            again.run(task(1))
            again.run(task(0, iteration=2))
            torch.rand(3)
            random.random()
            done = again.run(task(0))
            assert (done.loss, done.samples) == (first.loss, first.samples)
            assert all(torch.equal(a, b) for a, b in zip(bits(training.arena, 0), expected, strict=True))
        runner.run(task(0, iteration=1))
        assert not torch.equal(bits(training.arena, 0)[0], expected[0]), "another iteration, other samples"


def test_buffers_of_worker_0_become_the_jobs_at_the_barrier() -> None:
    with opened(job()) as (training, runner):
        runner.run(task(1))
        assert not any(t.any() for t in training.arena.next_buffers.values())
        before = {d: t.clone() for d, t in training.arena.buffers.items()}
        runner.run(task(0))
        runner.run(task(0))
        assert all(torch.equal(training.arena.buffers[d], t) for d, t in before.items())
        done = {w: runner.run(task(w)) for w in (0, 1)}
        training.update(done, training.depths())
        buffers = dict(training.model.named_buffers())
        assert (float(buffers["calls"]), int(buffers["norm.num_batches_tracked"])) == (1.0, 1)
        runner.run(task(0, iteration=1))
        assert float(dict(runner.model.named_buffers())["calls"]) == 2.0


def test_gradients_of_a_task_that_another_executor_has_got_are_not_written() -> None:
    with opened(job()) as (training, runner):
        training.arena.words[0] = 7
        runner.run(task(0, claim=7))
        kept = bits(training.arena, 0)
        with pytest.raises(Stale):
            runner.run(task(0, iteration=1, claim=6))
        assert all(torch.equal(a, b) for a, b in zip(bits(training.arena, 0), kept, strict=True))


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model(batch).sum().backward()  # leaves gradients behind
    raise RuntimeError("out of paper\nsecond line")


LOSSES: dict[str, Any] = {
    "RuntimeError: out of paper": failing,
    "loss: expected a scalar tensor, the mean over the batch, got shape (5, 2)": lambda m, b: m(b),
    "loss: expected a scalar tensor, the mean over the batch, got float": lambda m, b: 1.5,
    "loss: expected one that depends on the model's parameters": lambda m, b: b.sum(),
    "SystemExit: 4": lambda m, b: exit(4),
}


@pytest.mark.parametrize("line", LOSSES)
def test_an_error_of_the_jobs_code_is_one_line_and_the_next_task_is_not_affected(line: str) -> None:
    switch = {"loss": job().loss}
    with opened(job(loss=lambda m, b: switch["loss"](m, b), spb="ladder")) as (training, runner):
        runner.run(task(0))
        expected = bits(training.arena, 0)
        switch["loss"] = LOSSES[line]
        with pytest.raises(JobError) as caught:
            runner.run(task(0, depth=1))
        assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
        assert ("second line" in caught.value.trace) == (line == "RuntimeError: out of paper")
        assert all(p.requires_grad and p.grad is None for p in runner.model.parameters())
        switch["loss"] = job().loss
        runner.run(task(0))
        assert all(torch.equal(a, b) for a, b in zip(bits(training.arena, 0), expected, strict=True))


def test_sparse_gradients_that_only_appear_in_backward_are_refused() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))

    one = job(
        model=Quiet,
        data=lambda: TensorDataset(torch.arange(10) % 5),
        loss=lambda m, b: nn.functional.embedding(b[0], m.weight, sparse=True).mean(),
    )
    with opened(one) as (_, runner), pytest.raises(JobError, match="'weight': sparse gradients cannot be averaged"):
        runner.run(task(0))


def test_an_emulated_task_takes_the_jobs_seconds_by_depth_and_a_job_without_times_is_refused() -> None:
    one = job(task_seconds=(0.01, 0.04), spb="ladder")
    with opened(one, emulated=True) as (training, runner):
        assert training.division.seconds(0, 1) == pytest.approx(0.01 + 0.04 / 2)
        shallow, full = runner.run(task(0, depth=1)), runner.run(task(1))
        assert shallow.stop - shallow.start >= 0.03
        assert full.stop - full.start >= 0.05
    line = "profile: expected one, or task_seconds, since the devices are emulated"
    with pytest.raises(JobError, match=line), opened(job(), emulated=True):
        pass


def test_a_jobs_default_dtype_is_in_force_in_its_tasks_only() -> None:
    seen = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float16)
        with torch.no_grad():
            torch.set_grad_enabled(False)
        torch.set_grad_enabled(True)
        mean: torch.Tensor = model(batch.double()).mean()
        return mean

    def model() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        return Noisy()

    one = job(model=model, loss=loss)
    try:
        with opened(one) as (_, runner):
            torch.set_default_dtype(torch.float32)
            runner.run(task(0))
            assert torch.get_default_dtype() == torch.float32
        assert seen == [torch.float64]
    finally:
        torch.set_default_dtype(torch.float32)

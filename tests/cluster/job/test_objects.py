"""A job's own objects: unusable ones are refused in one line, and samples come in the same order in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from dovetail import TrainingJob
from dovetail.cluster.job.objects import JobError, LearningRateSchedule, Samples, make_model, make_optimizer


def job(**given: Any) -> TrainingJob:
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        "data": lambda: TensorDataset(torch.arange(30.0).view(10, 3)),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "steps": 5,
        "batch": 8,
        "workers": 2,
    }
    return TrainingJob(**{**usual, **given})


def one_line(call: Callable[[], Any]) -> str:
    with pytest.raises(JobError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class NoLength(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1

    def __len__(self) -> int:
        return 1


def test_what_a_files_functions_return_is_checked_before_the_first_task() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such architecture\nand more")

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(2, 5))], lr=0.1)

    assert one_line(lambda: make_model(job(model=broken))) == "model: ValueError: no such architecture"
    assert "expected a function that makes a torch.nn.Module, got int" in one_line(lambda: make_model(job(model=int)))
    assert "expected parameters to train, ReLU has none" in one_line(lambda: make_model(job(model=nn.ReLU)))
    assert "got lazy ones" in one_line(lambda: make_model(job(model=lambda: nn.LazyLinear(3))))
    sparse = job(model=lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)))
    assert one_line(lambda: make_model(sparse)).startswith("model: 0: sparse gradients cannot be averaged")
    assert one_line(lambda: Samples(job(data=Stream))).startswith("data: expected a dataset with len()")
    assert one_line(lambda: Samples(job(data=NoLength))).startswith("data: expected a dataset with len()")
    assert one_line(lambda: Samples(job(data=list))) == "data: expected at least one sample, got none"
    model = make_model(job())
    assert "group 0 has another one of shape (2, 5)" in one_line(
        lambda: make_optimizer(job(optimizer=optimizer), model)
    )
    assert "LBFGS" in one_line(lambda: make_optimizer(job(optimizer=torch.optim.LBFGS), model))
    assert "SparseAdam" in one_line(lambda: make_optimizer(job(optimizer=torch.optim.SparseAdam), model))
    assert "expected a function that makes" in one_line(lambda: make_optimizer(job(optimizer=list), model))


class Functional(nn.Module):
    """Its parameters are used without any module being called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a + self.b).sum(dim=1)


def test_samples_are_shuffled_anew_in_every_epoch_and_none_is_left_out() -> None:
    one = job(data=lambda: TensorDataset(torch.arange(10.0)), batch=4)
    samples = Samples(one)
    order = [i for iteration in range(10) for i in samples.indices(iteration, 0, 4)]
    epochs = [order[at : at + 10] for at in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert Samples(one).indices(7, 1, 3) == order[29:31], "any part, without those before"
    assert Samples(job(batch=25)).indices(0, 0, 25)[:10] != Samples(job(batch=25, seed=1)).indices(0, 0, 25)[:10]


def test_batches_are_what_a_data_loader_gives() -> None:
    made = [{"x": torch.full((2,), float(i)), "y": i} for i in range(10)]
    samples = Samples(job(data=lambda: made, batch=4))
    batch = samples.batch(0, 1, 4)
    wanted = samples.indices(0, 1, 4)
    assert batch["y"].tolist() == wanted and batch["x"][:, 0].tolist() == [float(i) for i in wanted]
    assert Samples(job(data=lambda: made, collate=len)).batch(0, 0, 3) == 3
    tensors = TensorDataset(torch.randn(10, 2), torch.arange(10))
    quick, slow = Samples(job(data=lambda: tensors)), Samples(job(data=lambda: [tensors[i] for i in range(10)]))
    assert all(torch.equal(a, b) for a, b in zip(quick.batch(2, 1, 5), slow.batch(2, 1, 5), strict=True))


def test_a_scheduler_whose_state_cannot_be_stored_is_refused() -> None:
    class Odd(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.thing = Functional()
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            return [0.1]

    for make in (
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
    ):
        LearningRateSchedule(job(scheduler=make), make_optimizer(job(), make_model(job())))
    optimizer = make_optimizer(job(), make_model(job()))
    assert "cannot be stored in a checkpoint" in one_line(lambda: LearningRateSchedule(job(scheduler=Odd), optimizer))
    assert "expected one of torch.optim" in one_line(
        lambda: LearningRateSchedule(job(scheduler=lambda o: 3), optimizer)
    )

"""The gradient of an iteration is that of one process with masks, whichever executors ran the tasks in any order."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import Guard, TrainingJob
from dovetail.cluster.aggregator.offers import IterationTasks
from dovetail.cluster.aggregator.training import NotFinite, Training
from dovetail.cluster.executor.loader import open_runner
from dovetail.cluster.executor.task_runner import TaskRunner
from dovetail.cluster.job.objects import Samples
from dovetail.cluster.transport.messages import Done
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.files import decode
from dovetail.train.partial.segments import cut
from tests.train.partial.depth_models import build, inputs, loss
from tests.train.partial.depth_scenarios import difference, oracle

pytestmark = pytest.mark.usefixtures("one_thread")
names = itertools.count()


Order = Callable[[list[int]], list[int]]


def job(kind: str, spb: str, **given: Any) -> TrainingJob:
    usual: dict[str, Any] = {
        "model": lambda: build(kind),
        "data": lambda: TensorDataset(inputs(kind, 31, 7)),
        "loss": lambda model, batch: loss(model(batch[0])),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
        "steps": 20,
        "batch": 14,
        "workers": 4,
        "spb": spb,
        "guard": Guard(epsilon=0.6, every=3, patience=1),
    }
    return TrainingJob(**{**usual, **given})


@contextmanager
def opened(one: TrainingJob, state: dict[str, Any] | None = None) -> Iterator[tuple[Training, list[TaskRunner]]]:
    training = Training(one, f"dovetail-test-{os.getpid()}-{next(names)}", state)
    try:
        yield training, [open_runner(one, training.arena.name, emulated=False) for _ in range(2)]
    finally:
        training.arena.unlink()


def run(training: Training, runners: list[TaskRunner], chance: random.Random | None = None) -> float:
    """One iteration; with `chance`: tasks in any order, on any runner, some of them twice."""
    iteration = IterationTasks(training.division)
    iteration.prepare(training.iteration, training.depths())
    training.arena.offer(iteration.ready)
    tasks = list(reversed(iteration.ready))
    if chance is not None:
        tasks += chance.sample(tasks, 2)
        chance.shuffle(tasks)
    done: dict[int, Done] = {}
    for task in tasks:
        runner = chance.choice(runners) if chance is not None else runners[0]
        done[task.worker] = runner.run(task)
    return training.update(done, iteration.depths)


def bits(training: Training) -> str:
    said = hashlib.sha256()
    for tensor in [*training.model.state_dict().values(), *(p.grad for p in training.model.parameters())]:
        if tensor is not None:
            said.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return said.hexdigest()


def plan_of(training: Training, kind: str) -> Any:
    if training.division.plan:
        return decode(training.division.plan, DepthPlan)
    return cut(training.model, inputs(kind, 3, 0), at=[], depths=[1] * training.job.workers)


CASES = [
    *(("transformer", spb) for spb in ("off", "ladder", "balanced", "guard")),
    *(("tied", spb) for spb in ("ladder", "guard")),
    ("cnn", "ladder"),
    ("skips", "balanced"),
    ("unused", "off"),
    ("unused", "guard"),
    ("checkpointed", "ladder"),
]


@pytest.mark.parametrize(("kind", "spb"), CASES)
def test_the_gradient_is_that_of_one_process_with_masks(kind: str, spb: str) -> None:
    one = job(kind, spb)
    samples, seen = Samples(one), set()
    with opened(one) as (training, runners):
        plan = plan_of(training, kind)
        division = training.division
        assert sum(division.batches) == 14 and min(division.batches) >= 1
        assert (len(set(division.batches)) > 2) == (spb == "balanced")
        for step in range(8):
            depths = training.depths()
            seen.add(depths)
            data = [inputs(kind, 31, 7)[samples.indices(step, *division.samples(w))] for w in range(4)]
            expected = oracle(training.model, plan, list(depths), data, [float(b) for b in division.batches])
            value = run(training, runners)
            assert difference(training.model, expected) <= 1e-12
            assert value == pytest.approx(mean_loss(training, data, division.batches), rel=0.5)
    if spb in ("ladder", "balanced"):
        assert seen == {(1, 2, 3, 4)} or kind == "unused"
    if spb == "guard":
        assert len(seen) > 1, "it starts at full depth and then lowers it"


def mean_loss(training: Training, data: list[torch.Tensor], batches: tuple[int, ...]) -> float:
    """Of the parameters after the step: near that before."""
    with torch.no_grad():
        values = [float(loss(training.model(d))) * b for d, b in zip(data, batches, strict=True)]
    return sum(values) / sum(batches)


@pytest.mark.parametrize(("kind", "spb"), [("cnn", "guard"), ("tied", "balanced"), ("transformer", "off")])
def test_the_order_of_tasks_their_executors_and_repeated_tasks_change_no_bit(kind: str, spb: str) -> None:
    one = job(kind, spb)
    with opened(one) as (training, runners):
        plain = [(run(training, runners), bits(training)) for _ in range(6)]
    for seed in range(2):
        with opened(one) as (training, runners):
            assert [(run(training, runners, random.Random(seed)), bits(training)) for _ in range(6)] == plain


def test_at_full_depth_a_training_equals_that_of_plain_torch() -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    one = job("skips", "off", scheduler=scheduler)
    samples = Samples(one)
    with opened(one) as (training, runners):
        model = build("skips")
        model.load_state_dict({name: value.clone() for name, value in training.model.state_dict().items()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, foreach=False, fused=False)
        schedule = scheduler(optimizer)
        for step in range(10):
            batch = inputs("skips", 31, 7)[samples.indices(step, 0, 14)]
            value = loss(model(batch))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            assert run(training, runners) == pytest.approx(float(value.detach()), rel=1e-12)
        for ours, theirs in zip(training.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["unused"])
def test_parameters_without_a_gradient_stay_as_torch_leaves_them(kind: str) -> None:
    with opened(job(kind, "ladder")) as (training, runners):
        before = {n: p.detach().clone() for n, p in training.model.named_parameters()}
        run(training, runners)
        for name, parameter in training.model.named_parameters():
            untouched = name.startswith(("spare", "blocks.1"))
            assert (parameter.grad is None) == untouched
            assert torch.equal(parameter, before[name]) == untouched, "no decay either"


class Sometimes(nn.Module):
    """A layer that only samples of one kind use, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        rare = x[:, 0] > 1.0
        if rare.any():
            y = torch.where(rare[:, None], self.rare(y), y)
        out: torch.Tensor = self.last(y)
        return out


def test_a_layer_that_some_workers_do_not_use_counts_as_zero_there() -> None:
    one = job("skips", "off", model=lambda: Sometimes().double())
    samples = Samples(one)
    with opened(one) as (training, runners):
        model = Sometimes().double()
        model.load_state_dict({name: value.clone() for name, value in training.model.state_dict().items()})
        loss(model(inputs("skips", 31, 7)[samples.indices(0, 0, 14)])).backward()
        run(training, runners)
        assert 0 < int(training.arena.flags[:, 2].sum()) < 4, "some did, some did not"
        expected = {n: p.grad for n, p in model.named_parameters()}
        assert difference(training.model, expected) <= 1e-12  # type: ignore[arg-type]


def test_half_precision_is_added_up_in_single_precision() -> None:
    one = job("skips", "ladder", model=lambda: build("skips", dtype=torch.bfloat16))
    one = TrainingJob(**{**vars_of(one), "data": lambda: TensorDataset(inputs("skips", 31, 7, dtype=torch.bfloat16))})
    with opened(one) as (training, runners):
        run(training, runners)
        head = next(i for i, leaf in enumerate(training.arena.leaves) if leaf.name == "head.bias")
        own = [training.arena.gradients(w).views[head].float() for w in range(4)]
        weights = [b / 14 for b in training.division.batches]
        mean = sum(g * w for g, w in zip(own, weights, strict=True))
        assert isinstance(mean, torch.Tensor)
        grads = {n: p.grad for n, p in training.model.named_parameters()}
        torch.testing.assert_close(grads["head.bias"], mean.to(torch.bfloat16), rtol=0, atol=0)


def vars_of(one: TrainingJob) -> dict[str, Any]:
    return {name: value for name, value in vars(one).items() if name != "default_dtype"}


def test_a_loss_that_is_not_finite_names_iteration_and_worker() -> None:
    with opened(job("skips", "off")) as (training, runners):
        run(training, runners)
        done = {w: Done(iteration=1, worker=w, loss=1.0, samples=3, start=0.0, stop=0.0) for w in range(4)}
        for bad in (float("nan"), float("inf")):
            done[2] = Done(iteration=1, worker=2, loss=bad, samples=3, start=0.0, stop=0.0)
            with pytest.raises(NotFinite, match=f"iteration 1: the loss of worker 2 is {bad}"):
                training.update(done, training.depths())


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.003, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, momentum=0.5),
}


@pytest.mark.parametrize(
    ("kind", "spb", "optimizer"),
    [("cnn", "guard", "adamw"), ("skips", "balanced", "sgd"), ("tied", "off", "rmsprop")],
)
def test_a_training_restored_from_its_state_continues_with_the_same_bits(kind: str, spb: str, optimizer: str) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)

    one = job(kind, spb, scheduler=scheduler, optimizer=OPTIMIZERS[optimizer])
    states = []
    with opened(one) as (training, runners):
        plain = []
        for _ in range(10):
            file = io.BytesIO()
            torch.save(training.state(), file)
            states.append(file)
            plain.append((run(training, runners), bits(training), training.depths()))
    for at in (0, 4, 7):
        states[at].seek(0)
        state = torch.load(states[at], weights_only=True)
        with opened(one, state) as (training, runners):
            assert training.iteration == at
            again = [(run(training, runners), bits(training), training.depths()) for _ in range(10 - at)]
        assert again == plain[at:]

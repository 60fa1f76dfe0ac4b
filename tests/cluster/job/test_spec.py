"""Job files: a valid one loads, with the submission's options; an invalid one gives a one-line error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from dovetail import TrainingJob
from dovetail.cluster.aggregator.cuts import divide
from dovetail.cluster.job import objects
from dovetail.cluster.job.objects import JobError, Samples, make_model, make_optimizer
from dovetail.cluster.job.spec import Options, load
from dovetail.core.errors import Error, InputError

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from dovetail import TrainingJob

job = TrainingJob(
    model=lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    data=lambda: TensorDataset(torch.arange(30.0).view(10, 3)),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    steps=5,
    batch=8,
    workers=2,
)
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "job.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_job_file_loads_and_the_submissions_options_override_it(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert (load(path).steps, load(path).workers, load(path).name) == (5, 2, "job")
    job = load(path, Options(workers=4, steps=7, spb="ladder", seed=3, batch=12))
    assert (job.workers, job.steps, job.spb, job.seed, job.batch) == (4, 7, "ladder", 3, 12)


WRONG = {
    "job: name: expected a line of at most 200 letters, got": GOOD.replace("steps=5", "name='a\\nb', steps=5"),
    "job: steps: missing": GOOD.replace("    steps=5,\n", ""),
    "job: steps: expected a whole number of at least 1, got 0": GOOD.replace("steps=5", "steps=0"),
    "job: steps: expected a whole number of at least 1, got True": GOOD.replace("steps=5", "steps=True"),
    "job: batch: expected at least one sample for each of 2 workers, got 1": GOOD.replace("batch=8", "batch=1"),
    "job: model: expected a function, got int 3": GOOD.replace("model=lambda: nn", "model=3 if nn else lambda: nn"),
    "job: spb: expected one of off, ladder, balanced, guard, got 'some'": GOOD.replace(
        "steps=5", "steps=5, spb='some'"
    ),
    "job: task_seconds: expected (forward, backward) in seconds, got (1,)": GOOD.replace(
        "steps=5", "steps=5, task_seconds=(1,)"
    ),
    "job: off_device: expected seconds, at least 0, got -1": GOOD.replace("steps=5", "steps=5, off_device=-1"),
    "job: profile: expected a dovetail.Profile": GOOD.replace("steps=5", "steps=5, profile='fast'"),
    "job: missing: expected `job = TrainingJob(...)`": GOOD.replace("job = ", "training = "),
    "job: expected a dovetail.TrainingJob, got int 3": "job = 3",
    "line 2: expected valid Python": "\njob = (",
    "line 3: ZeroDivisionError: division by zero": "def f():\n    pass\n1 / 0",
    "line 1: SystemExit: 3": "raise SystemExit(3)",
    "line 1: ModuleNotFoundError: No module named 'absent'": "import absent",
    "line 7: TypeError: TrainingJob.__init__() got an unexpected keyword argument 'step'": GOOD.replace(
        "steps=5", "steps=5, step=1"
    ),
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_file_gets_one_line_that_names_file_and_field(line: str, tmp_path: Path) -> None:
    path = written(tmp_path, WRONG[line])
    with pytest.raises(InputError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_an_error_names_the_submissions_options_if_they_do_not_fit_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"job with the submission's options: batch: .* 9 workers per step, got 8"):
        load(written(tmp_path, GOOD), Options(workers=9))
    with pytest.raises(InputError, match="cannot be read: no such file"):
        load(tmp_path / "absent.py")


def test_the_default_dtype_that_a_file_sets_applies_to_its_job_only(tmp_path: Path) -> None:
    job = load(written(tmp_path, "import torch\ntorch.set_default_dtype(torch.float64)\n" + GOOD))
    assert torch.get_default_dtype() == torch.float32
    assert job.default_dtype == "float64"
    with pytest.raises(InputError):
        load(written(tmp_path, "import torch\ntorch.set_default_dtype(torch.float64)\n1 / 0"))
    assert torch.get_default_dtype() == torch.float32


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


@pytest.mark.filterwarnings("ignore")  # torch's own, of scripting and of reentrant checkpoints
def test_a_model_that_cannot_be_cut_for_partial_depth_is_refused_before_the_first_task() -> None:
    def line(**given: Any) -> str:
        one = job(spb="ladder", **given)
        return one_line(lambda: divide(one, make_model(one), Samples(one)))

    assert line(model=Functional) == (
        "spb: expected a model of at least two layers that own parameters and run one after another, got 1"
    )
    assert "compiled modules run no hooks" in line(model=lambda: torch.jit.script(nn.Linear(3, 2)))
    assert line(loss=lambda model, batch: model(batch[0], 3).mean()).startswith("the first samples: TypeError: ")
    from tests.train.partial.depth_models import Checkpointed, Hooked

    six = {"data": lambda: TensorDataset(torch.arange(60.0).view(10, 6))}
    assert "cannot be cut before layer" in line(model=Hooked, workers=4, **six)
    assert "the cut breaks this model" in line(model=lambda: Checkpointed(reentrant=True), workers=4, **six)


def test_the_order_of_samples_is_a_shuffle_of_every_epoch_and_nothing_is_left_out() -> None:
    one = job(data=lambda: TensorDataset(torch.arange(10.0)), batch=4)
    samples = Samples(one)
    order = [i for iteration in range(10) for i in samples.indices(iteration, 0, 4)]
    epochs = [order[at : at + 10] for at in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert Samples(one).indices(7, 1, 3) == order[29:31], "any part of it, from anywhere"
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


def test_a_schedulers_state_must_fit_into_a_checkpoint() -> None:
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
        objects.LearningRateSchedule(job(scheduler=make), make_optimizer(job(), make_model(job())))
    optimizer = make_optimizer(job(), make_model(job()))
    assert "cannot go into a checkpoint" in one_line(
        lambda: objects.LearningRateSchedule(job(scheduler=Odd), optimizer)
    )
    assert "expected one of torch.optim" in one_line(
        lambda: objects.LearningRateSchedule(job(scheduler=lambda o: 3), optimizer)
    )


def test_errors_of_fields_are_dovetail_errors() -> None:
    with pytest.raises(Error, match="loss: missing"):
        TrainingJob(model=nn.ReLU, data=list)

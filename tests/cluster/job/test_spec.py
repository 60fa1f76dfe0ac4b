"""Job files: a valid one loads, with the submission's options; an invalid one gives a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dovetail import TrainingJob
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
    with pytest.raises(InputError, match=r"job with the submission's options: batch: .* 9 workers, got 8"):
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


def test_errors_of_fields_are_dovetail_errors() -> None:
    with pytest.raises(Error, match="loss: missing"):
        TrainingJob(model=nn.ReLU, data=list)

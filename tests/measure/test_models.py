"""Models by name and from files, and one clear line for what is neither."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from dovetail.core.errors import Error, InputError, MissingExtra
from dovetail.core.profile import Profile
from dovetail.measure import load, profile

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (dovetail-train[examples])"
)

GOOD = """
from dataclasses import dataclass
import torch
from neighbour import WIDTH

@dataclass
class Settings:
    width: int = WIDTH

def model():
    return torch.nn.Linear(Settings().width, 1)

def batch(size):
    return torch.ones(size, Settings().width)
"""


def written(folder: Path, text: str) -> str:
    (folder / "neighbour.py").write_text("WIDTH = 5\n")
    (folder / "job.py").write_text(text)
    return str(folder / "job.py")


def test_a_file_with_model_and_batch_is_a_workload(tmp_path: Path) -> None:
    work = load(written(tmp_path, GOOD))
    assert (work.name, work.loss) == ("job", None)
    batch = work.make_batch(3)
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (3, 5)
    assert work.model(batch).shape == (3, 1)


def test_a_files_own_loss_is_used(tmp_path: Path) -> None:
    work = load(written(tmp_path, GOOD + "\ndef loss(output):\n    return output.sum()\n"))
    assert work.loss is not None
    found = profile(work.model, work.make_batch(2), loss=work.loss, steps=1, warmup=0)
    assert isinstance(found, Profile)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def model(:\n", "job.py: line 1: expected valid Python: "),
        ("x = 1 / 0\n", "job.py: fails when imported, with ZeroDivisionError: division by zero"),
        ("import nowhere_to_be_found\n", "job.py: fails when imported, with ModuleNotFoundError"),
        ("def batch(size): ...\n", "job.py: model: missing, expected a function that returns the module"),
        ("model = 3\n", "job.py: model: missing"),
        ("def model(): ...\n", "job.py: batch: missing, expected a function that takes the number of samples"),
        ("def model(): ...\ndef batch(size): ...\n", r"job.py: model\(\): expected a torch.nn.Module, got NoneType"),
        (
            "def model(): raise OSError('no disk')\ndef batch(n): ...\n",
            r"job.py: model\(\): fails with OSError: no disk",
        ),
        ("raise SystemExit(3)\n", "job.py: fails when imported, with SystemExit: 3"),
        ("def model(): raise SystemExit\ndef batch(n): ...\n", r"job.py: model\(\): fails with SystemExit"),
        ("\x00", "job.py: "),
    ],
)
def test_a_wrong_file_gets_one_line_that_names_it(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        load(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_batch_function_that_fails_is_named(tmp_path: Path) -> None:
    text = "import torch\ndef model(): return torch.nn.Linear(1, 1)\ndef batch(n): return [][n]\n"
    with pytest.raises(InputError, match=r"job.py: batch\(4\): fails with IndexError"):
        load(written(tmp_path, text)).make_batch(4)


def test_a_batch_of_another_size_is_refused(tmp_path: Path) -> None:
    text = "import torch\ndef model(): return torch.nn.Linear(1, 1)\ndef batch(n): return torch.ones(n + 1, 1)\n"
    with pytest.raises(InputError, match=r"job.py: batch\(4\): expected 4 samples, got 5"):
        load(written(tmp_path, text)).make_batch(4)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("resnet", "no model 'resnet': expected one of mlp, cnn, gpt, resnet50, hf:resnet-50"),
        ("", "no model ''"),
        ("nowhere/job.py", "nowhere/job.py: cannot be read: no such file"),
        ("job.py", "job.py: cannot be read: no such file"),
        ("hf:llama", "no model 'hf:llama': expected one of hf:resnet-50"),
    ],
)
def test_an_unknown_model_gets_one_line_that_says_what_exists(
    spec: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Error, match=expected) as caught:
        load(spec)
    assert "\n" not in str(caught.value)


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a Python file"):
        load(str(tmp_path))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(MissingExtra, match=r"hf:gpt2 needs dovetail-train\[examples\]"):
        load("hf:gpt2")


def test_the_cnn_is_a_small_resnet_18() -> None:
    model = load("cnn").model
    kinds = [type(m).__name__ for m in model.modules()]
    assert (kinds.count("Conv2d"), kinds.count("Linear"), kinds.count("Block")) == (17 + 3, 1, 8)


@needs_transformers
def test_resnet_50_has_its_published_size() -> None:
    model = load("hf:resnet-50").model
    assert len(list(model.parameters())) == 161
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


@needs_transformers
@pytest.mark.parametrize(
    ("spec", "tied"),
    [
        ("hf:bert-base?layers=1&hidden=16&heads=2&vocab_size=50&intermediate_size=32&length=6", True),
        ("hf:gpt2?layers=2&hidden=16&heads=2&vocab_size=50&length=6", True),
        ("hf:vit-base?layers=1&hidden=16&heads=2&intermediate_size=32&image=32&num_labels=3", False),
        ("hf:resnet-50?image=32&num_labels=3", False),
    ],
)
def test_hugging_face_models_profile_from_their_configuration(spec: str, tied: bool) -> None:
    work = load(spec)
    found = profile(work.model, work.make_batch(2), steps=1, warmup=0, batches=[2])
    found.check()
    assert {t.name for t in found.tensors} == {name for name, p in work.model.named_parameters() if p.requires_grad}
    if tied:
        head = next(layer for layer in reversed(found.layers) if layer.name.endswith(("lm_head", "decoder")))
        assert head.parameter_bytes <= 4 * 50  # at most a bias: the weights are the embedding's


@needs_transformers
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:gpt2?layers=two", "layers: expected a positive whole number, got 'two'"),
        ("hf:gpt2?depth=3", "GPT2Config has no field 'depth'"),
        ("hf:gpt2?layers", "layers: expected a positive whole number, got ''"),
        ("hf:bert-base?hidden=10&heads=3&layers=1", "cannot be built"),
    ],
)
def test_a_wrong_size_gets_one_line(spec: str, expected: str) -> None:
    with pytest.raises(Error, match=expected) as caught:
        load(spec)
    assert "\n" not in str(caught.value)

"""Models by name or from a user's file: what `dovetail profile` is given."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from dovetail.core.errors import Error, InputError, MissingExtra, first_line, typed_line

if TYPE_CHECKING:
    from torch import nn

    from .batches import Batch, Loss

BUILT_IN = ("mlp", "cnn", "gpt", "resnet50")
HUGGING_FACE = ("hf:resnet-50", "hf:bert-base", "hf:gpt2", "hf:vit-base")

_SHORT = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}


@dataclass(frozen=True)
class Workload:
    """A model with everything that it takes to train it on made-up data."""

    name: str
    model: nn.Module
    make_batch: Callable[[int], Batch]
    """Number of samples → batch."""
    loss: Loss | None = None
    """Output → scalar; None for the default of `dovetail.measure.profile`."""


def load(spec: str) -> Workload:
    """A built-in model ("cnn"), one of Hugging Face's with random weights ("hf:gpt2"), or a Python file.

    Sizes of Hugging Face's can be changed by any field of their configuration: "hf:bert-base?layers=4&hidden=256"
    (layers, hidden and heads are short names), and by `length` or `image`, the size of the input. A file defines
    `model()`, which returns the module, `batch(size)`, which returns a batch of that size, and, where the default
    does not fit, `loss(output)`.
    """
    if spec in BUILT_IN:
        return _built_in(spec)
    if spec.startswith("hf:"):
        return _hugging_face(spec)
    if not spec or not (Path(spec).suffix or "/" in spec or Path(spec).exists()):
        raise Error(f"no model {spec!r}: expected one of {', '.join(BUILT_IN + HUGGING_FACE)}, or a Python file")
    return _from_file(Path(spec))


def _built_in(name: str) -> Workload:
    import torch

    from . import zoo

    if name == "mlp":
        return Workload(name, zoo.mlp(), lambda n: torch.randn(n, 64), zoo.cross_entropy)
    if name == "cnn":
        return Workload(name, zoo.cnn(), lambda n: torch.randn(n, 3, 32, 32), zoo.cross_entropy)
    if name == "resnet50":
        return Workload(name, zoo.resnet50(), lambda n: torch.randn(n, 3, 64, 64), zoo.cross_entropy)
    gpt = zoo.GPT()

    def characters(n: int) -> Batch:
        text = torch.randint(0, 256, (n, gpt.length + 1))
        return {"tokens": text[:, :-1], "labels": text[:, 1:]}

    return Workload(name, gpt, characters)


def _hugging_face(spec: str) -> Workload:
    kind, _, query = spec.partition("?")
    if kind not in HUGGING_FACE:
        raise Error(f"no model {kind!r}: expected one of {', '.join(HUGGING_FACE)}, or a Python file")
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra(kind, "examples")
    options = _options(spec, query)
    import torch
    import transformers as hf

    length, image = options.pop("length", 128), options.pop("image", 224)
    configs: dict[str, tuple[Any, Any]] = {
        "hf:resnet-50": (hf.ResNetConfig, hf.ResNetForImageClassification),
        "hf:bert-base": (hf.BertConfig, hf.BertForMaskedLM),
        "hf:gpt2": (hf.GPT2Config, hf.GPT2LMHeadModel),
        "hf:vit-base": (hf.ViTConfig, hf.ViTForImageClassification),
    }
    config_type, model_type = configs[kind]
    images = kind in ("hf:resnet-50", "hf:vit-base")
    if images:
        options.setdefault("num_labels", 1000)
    if kind == "hf:vit-base":
        options.setdefault("image_size", image)
    known = config_type()
    for field in options:
        if not hasattr(known, field):
            raise Error(f"{spec}: {config_type.__name__} has no field {field!r}")
    try:
        config = config_type(**options)
        model = model_type(config)
        if kind == "hf:gpt2":
            model.loss_type = "ForCausalLM"  # the default, which it would otherwise announce at every start
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as e:
        raise Error(f"{spec}: {model_type.__name__} cannot be built: {first_line(e)}") from e

    def pictures(n: int) -> Batch:
        return {"pixel_values": torch.randn(n, 3, image, image), "labels": torch.randint(0, config.num_labels, (n,))}

    def words(n: int) -> Batch:
        tokens = torch.randint(0, config.vocab_size, (n, length))
        return {"input_ids": tokens, "labels": tokens}

    return Workload(spec.removeprefix("hf:"), model, pictures if images else words)


def _options(spec: str, query: str) -> dict[str, int]:
    options: dict[str, int] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if not value.isascii() or not value.isdigit() or not int(value):
            raise Error(f"{spec}: {key}: expected a positive whole number, got {value!r}")
        options[_SHORT.get(key, key)] = int(value)
    if query and not options:
        raise Error(f"{spec}: expected field=number after the question mark, got {query!r}")
    return options


def _from_file(path: Path) -> Workload:
    module = _imported(path)
    for function, role in (
        ("model", "returns the module"),
        ("batch", "takes the number of samples and returns a batch"),
    ):
        if not callable(getattr(module, function, None)):
            raise InputError(path, function, f"missing, expected a function that {role}")
    from torch import nn

    from .batches import size

    try:
        model = module.model()
    except (Exception, SystemExit) as e:
        raise InputError(path, "model()", f"fails with {typed_line(e)}") from e
    if not isinstance(model, nn.Module):
        raise InputError(path, "model()", f"expected a torch.nn.Module, got {type(model).__name__}")

    def make_batch(n: int) -> Any:
        try:
            made = module.batch(n)
        except (Exception, SystemExit) as e:
            raise InputError(path, f"batch({n})", f"fails with {typed_line(e)}") from e
        if (samples := size(made)) != n:
            raise InputError(path, f"batch({n})", f"expected {n} samples, got {samples}")
        return made

    return Workload(path.stem, model, make_batch, getattr(module, "loss", None))


def _imported(path: Path) -> ModuleType:
    """Runs the file as a module. As with `python FILE`, it can import modules beside it."""
    if not path.is_file():
        raise InputError(path, "", "cannot be read: no such file" if not path.exists() else "expected a Python file")
    spec = importlib.util.spec_from_loader(f"dovetail_workload_{path.stem}", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        code = compile(path.read_bytes(), str(path), "exec")
        exec(code, module.__dict__)
    except SyntaxError as e:
        raise InputError(e.filename or path, f"line {e.lineno}", f"expected valid Python: {e.msg}") from None
    except ValueError as e:  # null bytes, wrong encoding
        raise InputError(path, "", f"expected Python source: {typed_line(e)}") from None
    except (Exception, SystemExit) as e:  # a training script that ends itself is no model either
        raise InputError(path, "", f"fails when imported, with {typed_line(e)}") from e
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module

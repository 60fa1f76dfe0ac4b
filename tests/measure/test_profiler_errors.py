"""What cannot be profiled gets one clear line."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.core.errors import Error
from dovetail.measure import profile


def compiled() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile(backend="eager")
    return module


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("model", "batch", "options", "expected"),
    [
        (lambda: nn.ReLU(), X, {}, "model ReLU: expected parameters that require gradients"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), X, {}, "expected parameters that require gradients"),
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), X, {}, "profile the module before torch.compile"),
        (compiled, X, {}, "part 0: compiled modules run no hooks"),
        (lambda: nn.LazyLinear(2), X, {}, "lazy parameters"),
        (lambda: "model", X, {}, "expected a torch.nn.Module, got str"),
        (lambda: nn.Linear(2, 2), "text", {}, "batch: expected a tensor, a tuple of tensors or a dict"),
        (lambda: nn.Linear(2, 2), (X, 3), {}, r"batch\[1\]: expected a tensor, got int"),
        (lambda: nn.Linear(2, 2), (), {}, "at least one tensor"),
        (lambda: nn.Linear(2, 2), torch.ones(()), {}, r"batch\[0\]: expected samples"),
        (lambda: nn.Linear(2, 2), {"a": X, "b": X[:1]}, {}, "a has 2, b has 1"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: y}, r"loss: expected a scalar tensor, got shape \(2, 2\)"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: 3.0}, "loss: expected a scalar tensor, got float"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: y.detach().sum()}, "requires no gradient"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: sys.exit()}, "fails on a batch of 2: SystemExit: no reason"),
        (lambda: nn.Linear(2, 2), X, {"loss": lambda y: 1 / 0}, "fails on a batch of 2: ZeroDivisionError: division"),
        (lambda: nn.Linear(2, 2), X, {"batches": []}, "batches: expected at least one size"),
        (lambda: nn.Linear(2, 2), X, {"batches": [0, 2]}, "batches: expected at least one size"),
        (lambda: nn.Linear(2, 2), X, {"steps": 0}, "steps and warmup"),
    ],
)
def test_what_cannot_be_profiled_gets_one_clear_line(model: Any, batch: Any, options: Any, expected: str) -> None:
    with pytest.raises(Error, match=expected) as caught:
        profile(model(), batch, **options)
    assert "\n" not in str(caught.value)

"""The quality study's one-process workers compute what workers in turn compute, and its runs are counted rightly."""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.paths import BENCHMARKS


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("partial_oracle")


def net() -> nn.ModuleList:
    torch.manual_seed(0)
    sizes = [6, 8, 8, 12, 8, 8, 10]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return nn.ModuleList(blocks).double()


@pytest.mark.parametrize("depths", [[1, 2, 3, 4], [4, 1, 1, 2], [4, 4, 4, 4]])
@pytest.mark.parametrize("batches", [[5, 5, 5, 5], [9, 5, 4, 2]])
def test_masks_give_the_mean_over_the_contributing_samples(
    study: ModuleType, depths: list[int], batches: list[int]
) -> None:
    x, y = torch.randn(20, 6, dtype=torch.float64), torch.randint(0, 10, (20,))
    results = []
    for way in ("masked", "in_turn"):
        oracle = study.Oracle(net(), x[:2])
        getattr(oracle, way)(x, y, depths, batches)
        results.append(torch.cat([p.grad.flatten() for p in oracle.net.parameters()]))
    assert float((results[0] - results[1]).norm() / results[1].norm()) <= 1e-12


def test_work_is_counted_in_full_runs(study: ModuleType) -> None:
    tasks = importlib.import_module("partial_tasks")
    inputs, targets = torch.randn(64, 6), torch.randint(0, 10, (64,))
    task = tasks.Task(
        name="made",
        build=lambda: net().float(),
        train=(inputs, targets),
        test=(inputs[:16], targets[:16]),
        batch=4,
        steps=8,
        optimiser=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )

    def work(**options: object) -> tuple[float, float]:
        done = study.train(task, study.Contestant("made", **options), 0)
        return done["work"], done["held"]

    assert work() == pytest.approx((1.0, 1.0))
    assert work(steps=0.75) == pytest.approx((0.75, 0.75))
    assert work(workers=((0.0, 4), (0.5, 2))) == pytest.approx((0.75, 0.75))
    spent, held = work(counts=study.LADDER)
    assert spent == pytest.approx(0.75, abs=0.05)
    assert held == pytest.approx(1.0)
    assert work(counts=study.LADDER, begins=0.5)[0] == pytest.approx((1 + spent) / 2)
    assert work(counts=study.LADDER, balanced=True)[1] < 0.85
    assert work(epsilon=0.9)[0] <= 1.0

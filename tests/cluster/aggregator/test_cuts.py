"""Cuts of a model for partial depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail.cluster.aggregator.cuts import divide
from dovetail.cluster.job.objects import Samples, make_model
from tests.cluster.job.test_objects import Functional, job, one_line


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

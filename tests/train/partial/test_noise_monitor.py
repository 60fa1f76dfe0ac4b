"""The guard's view of the user's optimiser."""

from __future__ import annotations

import torch
from torch import nn

from dovetail.train.partial.noise_monitor import OptimiserMetric
from dovetail.train.partial.segments import Leaf


def test_a_parameter_without_gradients_does_not_hide_the_optimisers_metric() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    leaves = [Leaf("used", 0, used, used), Leaf("unused", 0, unused, unused)]
    for optimizer, known in (
        (torch.optim.Adam([used, unused]), True),
        (torch.optim.SGD([used, unused], lr=0.1), False),
    ):
        metric = OptimiserMetric([used, unused])
        used.grad = torch.full((2,), 2.0)
        optimizer.step()
        metric.seen(optimizer)
        assert metric.known(leaves) == known
        assert unused not in optimizer.state
    metric.seen(torch.optim.Adam([used, unused]))
    assert not metric.known(leaves), "before its first step"

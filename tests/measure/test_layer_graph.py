"""The layer graph of real models: branches are seen, and what cannot be traced gets one line."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from dovetail.core.errors import Error
from dovetail.measure import load, profile
from dovetail.measure.layer_graph import layer_graph, with_graph
from dovetail.planning.burst import rules
from dovetail.planning.burst.cost import ProfileCost
from dovetail.planning.burst.graph import decompose
from dovetail.planning.burst.planner import BurstPlanner


class Fork(nn.Module):
    """A stem, two branches of which one forks again, a concatenation, a skip, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.inner = nn.Linear(8, 8)
        self.mix = nn.Linear(16, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        a = self.left(x)
        b = self.right(x)
        b = self.inner(b) * b.sigmoid()
        mixed = self.mix(torch.cat([a, b], dim=1))
        return self.head(mixed + x)  # type: ignore[no-any-return]


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_branches_skips_and_joins_are_seen() -> None:
    names = ["stem", "left", "right.0", "right.1", "inner", "mix", "head"]
    edges = layer_graph(Fork(), names)
    # The product joins at `inner`, the concatenation too (it ran last), and the skip at `mix`.
    assert edges == ((0, 1), (0, 2), (0, 5), (1, 4), (2, 3), (3, 4), (4, 5), (5, 6))
    assert decompose(len(names), edges).layers == 7, "series-parallel"


def test_a_profile_gets_the_edges_of_its_model() -> None:
    made = profile(Fork(), torch.randn(4, 8), steps=1, warmup=0, batches=[4])
    forked = with_graph(made, Fork())
    assert (0, 5) in forked.edges and forked.layers == made.layers
    chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = profile(chain, torch.randn(4, 4), steps=1, warmup=0, batches=[4])
    assert with_graph(plain, chain).edges == ()


def test_a_residual_network_is_series_parallel() -> None:
    workload = load("resnet50")
    made = profile(workload.model, workload.make_batch(2), loss=workload.loss, steps=1, warmup=0, batches=[2])
    forked = with_graph(made, workload.model)
    assert len(forked.edges) >= len(made.layers) + 15, "each of 16 blocks has a shortcut"
    assert decompose(len(made.layers), forked.edges).layers == len(made.layers)
    planner = BurstPlanner(forked, ProfileCost(forked, 16), 4)
    assert planner.fastest().prediction.iteration <= rules.by_name(planner, "best-dp").prediction.iteration * (1 + 1e-9)


def test_what_cannot_be_traced_gets_one_line() -> None:
    with pytest.raises(Error, match=r"Stubborn cannot be traced .* give `edges`") as caught:
        layer_graph(Stubborn(), ["layer"])
    assert "\n" not in str(caught.value)


def test_a_layer_that_runs_twice_is_refused() -> None:
    shared = nn.Linear(4, 4)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))  # type: ignore[no-any-return]

    with pytest.raises(Error, match="'layer' runs more than once"):
        layer_graph(Twice(), ["layer"])


def test_an_optional_argument_keeps_its_default() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            x = self.a(x)
            if mask is not None:
                x = x * mask
            return self.b(x)  # type: ignore[no-any-return]

    assert layer_graph(Optional(), ["a", "b"], inputs=["x"]) == tuple(pairwise(range(2)))

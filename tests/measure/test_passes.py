"""Every second of a pass counts to the right layer: on a clock that the models themselves move."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .fakes import FakeClock, Slow, Work, measured, times


def test_each_layer_gets_its_own_time_at_every_batch_size() -> None:
    clock = FakeClock()
    found = measured(nn.Sequential(Slow(clock, 1, 2), Slow(clock, 3, 5)), torch.ones(8, 2), clock=clock)
    assert [t.batch for t in found.layers[0].times] == [2, 4, 8]
    for batch in (2, 4, 8):
        assert times(found, batch) == {"0": (batch, 2 * batch), "1": (3 * batch, 5 * batch)}
    assert [(t.name, t.layer, t.ready) for t in found.tensors] == [("1.weight", 1, 40.0), ("0.weight", 0, 56.0)]
    assert (found.forward_time(), found.backward_time()) == (32, 56)
    assert [layer.activation_bytes for layer in found.layers] == [8, 8]


def test_work_between_two_layers_counts_to_the_earlier_one_in_both_directions() -> None:
    clock = FakeClock()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Slow(clock, 1, 2), Slow(clock, 3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Work.apply(x, clock, 100, 0)  # type: ignore[no-untyped-call]  # before the first layer: counts to it
            x = Work.apply(self.a(x), clock, 10, 20)  # type: ignore[no-untyped-call]
            return Work.apply(self.b(x), clock, 1000, 2000)  # type: ignore[no-any-return, no-untyped-call]

    assert times(measured(Net(), torch.ones(1, 1), clock=clock)) == {"a": (111, 22), "b": (1003, 2005)}


def test_a_nested_layer_hands_the_clock_back_to_the_one_around_it() -> None:
    clock = FakeClock()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.inner = Slow(clock, 1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Work.apply(x * self.scale, clock, 10, 20)  # type: ignore[no-untyped-call]
            return Work.apply(self.inner(x), clock, 100, 200)  # type: ignore[no-any-return, no-untyped-call]

    found = measured(nn.Sequential(Outer(), Slow(clock, 1000, 2000)), torch.ones(1, 1), clock=clock)
    assert times(found) == {"0": (110, 220), "0.inner": (1, 2), "1": (1000, 2000)}


def test_skips_leave_every_branch_its_own_time() -> None:
    clock = FakeClock()

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.skip = Slow(clock, 1, 2), Slow(clock, 10, 20), Slow(clock, 100, 200)
            self.head = Slow(clock, 1000, 2000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.head(self.body(x) + self.skip(x))  # type: ignore[no-any-return]

    found = measured(Residual(), torch.ones(1, 1), clock=clock)
    assert times(found) == {"stem": (1, 2), "body": (10, 20), "skip": (100, 200), "head": (1000, 2000)}
    assert [t.name for t in found.tensors] == ["head.weight", "skip.weight", "body.weight", "stem.weight"]


def test_a_layer_called_twice_gets_the_sum_and_its_gradient_is_ready_at_the_end() -> None:
    clock = FakeClock()
    twice = Slow(clock, 1, 2)
    found = measured(nn.Sequential(twice, Slow(clock, 10, 20), twice), torch.ones(1, 1), clock=clock)
    assert times(found) == {"0": (2, 4), "1": (10, 20)}
    assert [t.name for t in found.tensors] == ["1.weight", "0.weight"]


def test_a_gradient_that_comes_in_parts_is_ready_when_the_last_part_is() -> None:
    """A checkpoint of the re-entrant kind runs a backward pass of its own, which accumulates at once."""
    clock = FakeClock()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.once = Slow(clock, 1, 2), Slow(clock, 10, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.twice, x, use_reentrant=True)
            return checkpoint(self.twice, self.once(x), use_reentrant=True)  # type: ignore[no-any-return]

    found = measured(Net(), torch.ones(1, 1, requires_grad=True), clock=clock)
    assert [t.name for t in found.tensors] == ["once.weight", "twice.weight"]
    assert found.tensors[-1].ready == pytest.approx(20 + 2 * (1 + 2))


def test_a_recomputed_checkpoint_counts_to_the_layers_it_recomputes() -> None:
    clock = FakeClock()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Slow(clock, 1, 2), Slow(clock, 10, 20))
            self.head = Slow(clock, 100, 200)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]

    found = measured(Net(), torch.ones(1, 1, requires_grad=True), clock=clock)
    # torch stops recomputing where nothing more is needed: in body.1, before its work.
    assert times(found) == {"body.0": (1, 1 + 2), "body.1": (10, 20), "head": (100, 200)}


def test_a_module_that_uses_its_childs_weights_without_calling_it_gets_the_time() -> None:
    clock = FakeClock()

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(1))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Work.apply(x * self.weights[0], clock, 10, 20)  # type: ignore[no-any-return, no-untyped-call]

    found = measured(nn.Sequential(Slow(clock, 1, 2), Fused()), torch.ones(1, 1), clock=clock)
    assert times(found) == {"0": (1, 2), "1": (10, 20), "1.weights": (0, 0)}

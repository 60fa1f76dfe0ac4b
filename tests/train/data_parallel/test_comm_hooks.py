"""Communication hooks under planned buckets: their own arithmetic, their own errors, their memory kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from dovetail.train.data_parallel.comm_hooks import CarriedErrors, holds_tensors, waits
from dovetail.train.data_parallel.reducer import CommHook
from tests.ranks import run_all

from . import hook_scenarios

Runs = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Results of the scenarios, by name: one per rank. They run once, in the same two processes."""
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "16 bits": (hook_scenarios.same_as_torch, {"builtin": False}),
        "16 bits, built in": (hook_scenarios.same_as_torch, {"builtin": True}),
        "while trying": (hook_scenarios.while_trying, {}),
        "PowerSGD": (hook_scenarios.power_sgd, {"start": 3}),
        "fails early": (hook_scenarios.fails, {"step_of_failure": 2}),
        "fails late": (hook_scenarios.fails, {"step_of_failure": 15}),
        "remembers": (hook_scenarios.remembers, {}),
        "dropped": (hook_scenarios.dropped_with_a_hook, {}),
    }
    reports = run_all(list(calls.values()))
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


@pytest.mark.parametrize("name", ["16 bits", "16 bits, built in"])
def test_parameters_equal_those_of_torch_with_the_same_hook_under_planned_buckets(runs: Runs, name: str) -> None:
    for result in runs(name):
        assert result["different"] == [] and result["state"] == "done" and result["plan"]
        assert "stands for the communication hook" in result["explained"]


def test_a_hook_that_comes_while_planning_is_planned_with(runs: Runs) -> None:
    for result in runs("while trying"):
        assert result["then"] == "trying" and result["now"] == "measuring"
        assert result["different"] == [] and result["state"] == "done" and result["plan"]


def test_power_sgd_keeps_its_one_bucket_on_gloo_and_trains_as_under_torch(runs: Runs) -> None:
    for result in runs("PowerSGD"):
        assert result["state"] == "off" and "hangs with more than one bucket" in result["reason"]
        first, last = result["losses"]
        assert result["different"] == [] and last < first


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_hook_that_raises_ends_with_its_own_error(runs: Runs, when: str) -> None:
    for result in runs(f"fails {when}"):
        assert result["said"] == "no more gradients today"


def test_buckets_stay_as_they_are_under_a_hook_that_keeps_tensors(runs: Runs) -> None:
    for result in runs("remembers"):
        assert result["state"] == "off" and "keeps tensors" in result["reason"]
        assert result["sizes"] == [result["bytes"]]


def test_a_module_with_a_hook_that_nobody_holds_is_freed_at_every_stage_of_planning(runs: Runs) -> None:
    for freed in runs("dropped"):
        assert all(freed), freed


class FakeBucket:
    """A bucket of gradients as a hook sees it."""

    def __init__(self, index: int, parameters: list[nn.Parameter]) -> None:
        self._index, self._parameters = index, parameters

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


class FakeState:
    def __init__(self) -> None:
        self.error_dict: dict[int, torch.Tensor] = {}
        self.p_memory_dict: dict[int, torch.Tensor] = {}
        self.q_memory_dict: dict[int, torch.Tensor] = {}


@st.composite
def layouts(draw: st.DrawFn) -> list[list[list[int]]]:
    """For each iteration the parameters of its buckets, out of seven."""
    found: list[list[list[int]]] = []
    for _ in range(draw(st.integers(1, 6))):
        again: bool = draw(st.booleans())
        if found and again:
            found.append(found[-1])
            continue
        order, cuts = draw(st.permutations(range(7))), sorted(draw(st.sets(st.integers(1, 6))))
        found.append([list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, 7], strict=True)])
    return found


@given(layouts())
def test_errors_move_with_their_parameters_whatever_the_buckets(iterations: list[list[list[int]]]) -> None:
    parameters = [nn.Parameter(torch.zeros(n + 1)) for n in range(7)]
    state, expected = FakeState(), {n: torch.zeros(n + 1) for n in range(7)}

    def hook(state: FakeState, bucket: FakeBucket) -> Any:
        """As PowerSGD: what stands at the bucket's number is added, and what is left of it is remembered there."""
        members = [next(n for n, p in enumerate(parameters) if p is q) for q in bucket.parameters()]
        known = state.error_dict.get(bucket.index(), torch.zeros(sum(n + 1 for n in members)))
        assert torch.equal(known, torch.cat([expected[n] for n in members]))
        for n in members:
            expected[n] = torch.rand(n + 1)
        state.error_dict[bucket.index()] = torch.cat([expected[n] for n in members])

    carried = CarriedErrors(hook, state)
    for buckets in iterations:
        for number, members in enumerate(buckets):
            carried(state, FakeBucket(number, [parameters[n] for n in members]))


def test_planning_waits_for_the_phase_of_a_hook_that_lasts() -> None:
    powersgd = PowerSGDState(process_group=None, start_powerSGD_iter=3)
    local = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=3)
    for state in (powersgd, local):
        hook = CommHook(name="hook", call=None, state=state)
        assert waits(hook)
        state.iter = 3
        assert not waits(hook)
    assert not waits(None) and not waits(CommHook(name="hook", call=None))


def test_tensors_are_found_wherever_a_hook_keeps_them() -> None:
    tensor = torch.zeros(1)

    class State:
        def __init__(self, kept: object) -> None:
            self.kept = kept

        def hook(self, state: object, bucket: object) -> Any: ...

    class Slotted:
        __slots__ = ("kept",)

    slotted = Slotted()
    slotted.kept = [tensor]  # type: ignore[attr-defined]

    def closure(state: object, bucket: object) -> Any:
        return tensor

    def plain(state: object, bucket: object) -> Any: ...

    def of(call: Any = plain, state: object = None) -> bool:
        return holds_tensors(CommHook(name="hook", call=call, state=state))

    assert not of() and not of(state={"steps": 3}) and not of(State(3).hook) and not of(state=State({0: "a"}))
    assert of(closure) and of(state={0: tensor}) and of(State([tensor]).hook) and of(state=State({0: (tensor,)}))
    assert of(functools.partial(plain, tensor)) and of(state=slotted)

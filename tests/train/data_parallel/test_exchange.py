"""overlap="forward": whatever the order of passes, gradients are those of torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import exchange_scenarios
from .exchange_scenarios import IDLE_ORDERS, ORDERS
from .test_forward_overlap import CLOSE

SEED = 20261118


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each scenario came to on both ranks, by its name. They run once, in the same processes."""
    calls: dict[str, Any] = {
        **{order: (exchange_scenarios.played, {"order": order, "idle": False}) for order in ORDERS},
        **{order: (exchange_scenarios.played, {"order": order, "idle": True}) for order in IDLE_ORDERS},
        "thrown away": (exchange_scenarios.thrown_away, {}),
        "lone": (exchange_scenarios.lone, {}),
        "hollow": (exchange_scenarios.hollow, {}),
        "random": (exchange_scenarios.random_programs, {"seed": SEED, "count": 60}),
    }
    reports = run_all(list(calls.values()))
    return {name: [rank[k] for rank in reports] for k, name in enumerate(calls)}


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_that_are_zeroed_between_passes_do_not_come_back(found: dict[str, list[Any]], order: str) -> None:
    assert all(difference < CLOSE for difference in found[order])


@pytest.mark.parametrize("order", IDLE_ORDERS)
def test_what_was_used_only_inside_no_sync_is_sent_as_torch_sends_it(found: dict[str, list[Any]], order: str) -> None:
    assert all(difference < CLOSE for difference in found[order])


def test_a_gradient_thrown_away_inside_no_sync_leaves_its_parameter_alone(found: dict[str, list[Any]]) -> None:
    assert all(difference < CLOSE for difference in found["thrown away"])


def test_a_gradient_that_was_never_sent_is_refused_in_one_line(found: dict[str, list[Any]]) -> None:
    for first, second, read in found["lone"]:
        assert all("is this rank's own" in said and "\n" not in said for said in (first, second))
        assert read < CLOSE


def test_parameters_without_elements_are_trained_stored_and_moved(found: dict[str, list[Any]]) -> None:
    for result in found["hollow"]:
        assert result["empty"] == 0 and result["difference"] < CLOSE and result["same form"]


def test_random_orders_of_passes_zeroing_steps_and_new_buckets_give_torchs_parameters(
    found: dict[str, list[Any]],
) -> None:
    assert found["random"] == [[], []]

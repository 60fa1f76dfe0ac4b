"""Planning does not disturb what training scripts do besides plain iterations, on all ranks or on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import planning
from dovetail.core.network import Contention
from dovetail.core.plan import Overlap
from dovetail.train.data_parallel.tuning.packing import doubling
from dovetail.train.data_parallel.tuning.tuner import calibrated
from dovetail.train.data_parallel.tuning.tuning_report import halved
from tests.planning.merge.oracle import made_network, made_profile
from tests.ranks import run_all

from . import tuner_scenarios

Runs = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Results of the scenarios, by name: one per rank. They run once, in the same two processes."""
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        **{name: (tuner_scenarios.keeps, {"habit": name}) for name in tuner_scenarios.HABITS},
        "join": (tuner_scenarios.nothing_to_join, {}),
        "interrupted": (tuner_scenarios.interrupted, {}),
        "different": (tuner_scenarios.different_arguments, {}),
        "dropped": (tuner_scenarios.dropped_while_planning, {}),
        "attached, first": (tuner_scenarios.attached, {"position": 0}),
        "attached, last": (tuner_scenarios.attached, {"position": -1}),
        "attached, shard": (tuner_scenarios.attached, {"position": 0, "memory": "shard"}),
    }
    reports = run_all(list(calls.values()))
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


@pytest.mark.parametrize("habit", tuner_scenarios.HABITS)
def test_gradients_equal_torchs_and_planning_comes_to_its_end(runs: Runs, habit: str) -> None:
    for result in runs(habit):
        assert result == {"different": [], "state": "done", "kept": True}


def test_a_rank_without_inputs_stops_planning_with_the_others(runs: Runs) -> None:
    for result in runs("join"):
        assert result["same"] and "uneven" in result["reason"]


def test_an_interrupt_ends_planning_and_training_can_go_on(runs: Runs) -> None:
    for result in runs("interrupted"):
        assert result["caught"] == 1 and result["same"]
        assert result["state"] == "off" and "KeyboardInterrupt" in result["reason"]


def test_ranks_with_different_arguments_find_out_at_once(runs: Runs) -> None:
    first, second = runs("different")
    assert "another rank" in first[0] and "switched off" in second[0]
    for said in (first, second):
        assert "DDP_SET_LAST_BUCKET_CAP" in said[1]
        assert "expected the same on all ranks" in said[2]
        assert "bucket_cap_mb_list" in said[3]


def test_a_module_that_nobody_holds_is_freed_at_every_stage_of_planning(runs: Runs) -> None:
    for freed in runs("dropped"):
        assert all(freed), freed


def test_a_model_with_an_attached_optimiser_goes_back_to_torchs_reducer_where_that_wins(runs: Runs) -> None:
    for result in runs("attached, first"):
        assert result["state"] == "done" and result["kept"] == "torch's own buckets"
        assert result["plan"] is None and not result["exchange"]
        assert result["overlaps"][0] == "backward" and "forward" in result["overlaps"]
        assert result["apart"] < 1e-5


def test_a_model_with_an_attached_optimiser_keeps_the_exchange_where_that_wins(runs: Runs) -> None:
    for result in runs("attached, last"):
        assert result["state"] == "done" and result["plan"] == "forward" and result["exchange"]
        assert result["apart"] < 1e-5


def test_where_memory_counts_only_plans_with_split_buckets_compete(runs: Runs) -> None:
    for result in runs("attached, shard"):
        assert result["state"] == "done" and result["kept"] == "split buckets of torch's sizes"
        assert set(result["overlaps"]) == {"forward"} and all("split" in kinds for kinds in result["kinds"])
        assert result["plan"] == "forward" and result["exchange"] and result["apart"] < 1e-5


PROFILE = made_profile([4_000_000] * 8, [0.01] * 8)
NETWORK = made_network(0.001, 5e-9)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@given(share=st.floats(0.0, 0.5))
def test_the_network_is_calibrated_to_what_an_iteration_took(overlap: Overlap, share: float) -> None:
    links = halved(NETWORK)
    plan = planning.plan(PROFILE, links, policy="ddp", overlap=overlap)
    truth = msgspec.structs.replace(links, contention=Contention(collective=share))
    took = planning.predict(plan, PROFILE, truth).prediction.iteration
    found = calibrated(links, plan, PROFILE, took)
    assert planning.predict(plan, PROFILE, found).prediction.iteration == pytest.approx(took, rel=1e-5)


def test_a_calibration_stays_within_reason() -> None:
    plan = planning.plan(PROFILE, NETWORK, policy="ddp")
    predicted = plan.prediction.iteration

    def share(seconds: float) -> float:
        found = calibrated(NETWORK, plan, PROFILE, seconds).contention
        return found.collective if found is not None else -1.0

    assert share(predicted * 0.5) == 0.0 and share(predicted * 10) == 0.5
    idle = made_network(1e-6, 1e-12)
    hidden = planning.plan(PROFILE, idle, policy="ddp")
    assert calibrated(idle, hidden, PROFILE, 1.0) is idle, "where all is hidden nothing can be told"


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=60))
def test_buckets_to_time_a_hook_with_have_many_sizes(sizes: list[int]) -> None:
    found = [b.bytes for b in doubling(made_profile(sizes, [0.01] * len(sizes)), 2).buckets]
    assert sum(found) == sum(sizes) and len(found) <= 7
    if len(sizes) == 60 and len(set(sizes)) == 1:
        assert len(set(found)) >= 4

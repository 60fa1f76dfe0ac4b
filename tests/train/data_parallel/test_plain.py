"""Whatever torch's DDP takes is planned with, bit for bit as torch has it, or the reason why not is true."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.train.data_parallel import reducer
from tests.ranks import run_all

from . import plain_scenarios

Runs = Callable[[str], list[Any]]
WAYS = ["before", "after", "blocks", "in place"]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Results of the scenarios, by name: one per rank. They run once, in the same two processes."""
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        **{name: (plain_scenarios.case, {"name": name}) for name in plain_scenarios.CASES},
        **{f"compiled {way}": (plain_scenarios.compiled, {"way": way}) for way in WAYS},
        "again": (plain_scenarios.again, {}),
        "fused": (plain_scenarios.fused, {}),
        "nothing to plan": (plain_scenarios.nothing_to_plan, {}),
    }
    reports = run_all(list(calls.values()))
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


@pytest.mark.parametrize("name", plain_scenarios.CASES)
def test_gradients_equal_torchs_bit_for_bit_while_a_plan_is_made_and_kept(runs: Runs, name: str) -> None:
    for result in runs(name):
        assert result["different"] == []
        assert result["state"] == "done" and result["planned"], (result["reason"], result["explained"])
        assert len(result["planned"]) > 1


@pytest.mark.parametrize("name", [name for name in plain_scenarios.CASES if "sparse" not in name])
def test_the_buckets_of_the_reducer_are_those_of_the_plan(runs: Runs, name: str) -> None:
    for result in runs(name):
        assert result["in force"] == result["planned"]
        assert result["told"] == result["sizes"]


def test_dtypes_that_alternate_are_gathered_and_not_cut_at_every_change(runs: Runs) -> None:
    for result in runs("alternating dtypes"):
        norms = [bucket for bucket in result["planned"] if bucket[0].startswith("norms")]
        assert all(name.startswith("norms") for bucket in norms for name in bucket)
        assert len(norms) < 5


@pytest.mark.parametrize("way", WAYS)
def test_compiled_modules_are_planned_with_and_nothing_is_compiled_again(runs: Runs, way: str) -> None:
    for result in runs(f"compiled {way}"):
        assert result["different"] == [] and result["state"] == "done", result["reason"]
        assert result["heard"] == [] and result["later"] == 0
        assert result["graphs"][1] <= result["graphs"][0] and result["in force"] == len(result["planned"]) > 1


def test_a_kept_plan_is_followed_by_the_next_run_where_caps_do_not_say_what_its_buckets_are(runs: Runs) -> None:
    for result in runs("again"):
        assert all(found["equal"] and found["followed"] and found["buckets"] > 2 for found in result.values()), result


def test_optimisers_inside_the_hook_update_parameters_as_under_torch(runs: Runs) -> None:
    for result in runs("fused"):
        assert result["different"] == [] and result["state"] == "done" and result["plan"], result["reason"]


def test_where_nothing_is_left_to_plan_the_reason_says_so(runs: Runs) -> None:
    for reason in runs("nothing to plan"):
        assert "bucket_cap_mb_list" in reason


def test_a_torch_without_a_cap_for_each_bucket_is_named_with_the_first_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reducer.unsupported() is None
    today = inspect.signature(TorchDDP.__init__)
    before = today.replace(parameters=[p for n, p in today.parameters.items() if n != "bucket_cap_mb_list"])
    monkeypatch.setattr(TorchDDP.__init__, "__signature__", before, raising=False)
    assert "2.11" in (reducer.unsupported() or "")

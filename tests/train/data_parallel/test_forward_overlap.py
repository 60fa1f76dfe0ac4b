"""overlap="forward": torch's DistributedDataParallel to rounding, with 1/n of the optimiser's state on each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.emulate.launch import held_port
from tests.paths import ROOT
from tests.ranks import run_all

from . import overlap_edges, overlap_scenarios, overlap_state

Runs = Callable[[str], list[Any]]
CLOSE = 1e-11  # float64, after a handful of iterations
HANG = 280  # seconds after which a process counts as hung, also on a busy machine

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{name: (overlap_scenarios.follows, {"optimizer": name}) for name in overlap_scenarios.OPTIMIZERS},
    "all split": (overlap_scenarios.follows, {"optimizer": "adam", "kinds": "s"}),
    "all whole": (overlap_scenarios.follows, {"optimizer": "adam", "kinds": "w"}),
    "groups": (overlap_scenarios.grouped_and_scheduled, {}),
    "accumulated": (overlap_scenarios.accumulated, {}),
    "clipped": (overlap_scenarios.clipped, {}),
    "unused": (overlap_scenarios.unused, {"everywhere": True}),
    "used by one": (overlap_scenarios.unused, {"everywhere": False}),
    "read": (overlap_scenarios.read_between_steps, {}),
    "rebucketed": (overlap_state.rebucketed, {}),
    **{way: (overlap_scenarios.trains, {"way": way}) for way in overlap_scenarios.WAYS},
    "planned": (overlap_scenarios.planned, {}),
    "hinted": (overlap_scenarios.hinted, {}),
}
MORE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "refusals": (overlap_edges.refusals, {}),
    "dropped": (overlap_edges.dropped, {}),
    "given": (overlap_edges.given, {}),
    "by torch": (overlap_edges.by_torch, {}),
}


def _runs(calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]], ranks: int) -> Runs:
    reports = run_all(list(calls.values()), ranks=ranks)
    return lambda name: [rank[list(calls).index(name)] for rank in reports]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def two(kept: str) -> Runs:
    """Results of the scenarios on two ranks, by name: one per rank. They run once, in the same processes."""
    stored = {name: (getattr(overlap_state, name), {"folder": kept}) for name in ("stored", "resumed")}
    asked = {"named": (overlap_edges.named, {"folder": kept})}
    return _runs({**CALLS, **MORE, **stored, **asked}, 2)


@pytest.fixture(scope="module")
def four(two: Runs, kept: str) -> Runs:
    """The same on four ranks, which also go on from what two have stored."""
    names = ("sgd", "adam", "all split", "all whole", "accumulated", "clipped", "used by one", "rebucketed")
    return _runs({**{n: CALLS[n] for n in names}, "resumed": (overlap_state.resumed, {"folder": kept})}, 4)


@pytest.fixture(params=[2, 4])
def runs(request: pytest.FixtureRequest) -> tuple[int, Runs]:
    return request.param, request.getfixturevalue({2: "two", 4: "four"}[request.param])


@pytest.mark.parametrize("optimizer", overlap_scenarios.OPTIMIZERS)
def test_parameters_equal_torchs_with_every_elementwise_optimiser(two: Runs, optimizer: str) -> None:
    for result in two(optimizer):
        assert result["difference"] < CLOSE
        assert result["buckets"] > 3 and result["is torch's"]


def test_four_ranks_come_to_torchs_parameters_too(four: Runs) -> None:
    assert all(result["difference"] < CLOSE for name in ("sgd", "adam") for result in four(name))


def test_optimiser_state_takes_its_nth_of_the_memory(runs: tuple[int, Runs]) -> None:
    ranks, of = runs
    shares = [result["share"] for result in of("all split")]
    assert sum(shares) == pytest.approx(1.0) and max(shares) < 1.03 / ranks + 0.01
    assert [result["share"] for result in of("all whole")] == [1.0] * ranks
    assert all(1 / ranks < result["share"] < 1.0 for result in of("adam"))


def test_parameter_groups_and_schedulers_of_the_torch_optimiser_take_effect(two: Runs) -> None:
    assert all(found < CLOSE for found in two("groups"))


@pytest.mark.parametrize("way", overlap_scenarios.WAYS)
def test_what_scripts_do_besides_plain_iterations_works_as_with_torch(two: Runs, way: str) -> None:
    assert all(found < 1e-6 for found in two(way))  # float32


def test_gradients_add_up_over_passes_as_in_torch(runs: tuple[int, Runs]) -> None:
    for found in runs[1]("accumulated"):
        assert len(found) == 4 and all(difference < CLOSE for difference in found.values())


def test_clipping_by_the_norm_of_all_gradients_equals_torchs(runs: tuple[int, Runs]) -> None:
    for found in runs[1]("clipped"):
        assert all(found[kind] < CLOSE and found[f"norms {kind}"] < CLOSE for kind in ("2.0", "1.0", "inf"))


def test_a_step_of_the_optimiser_that_was_given_away_is_refused_in_one_line(two: Runs) -> None:
    for found in two("clipped"):
        assert "the optimiser that dovetail.optimizer has returned" in found["inner"] and "\n" not in found["inner"]
        assert found["looks"].startswith("ScatteredGradient(of")


def test_unused_parameters_are_left_alone_where_torch_leaves_them_alone(two: Runs, four: Runs) -> None:
    assert all(found < CLOSE for found in [*two("unused"), *two("used by one"), *four("used by one")])


def test_code_that_reads_a_parameter_between_iterations_sees_finished_values(two: Runs) -> None:
    for found in two("read"):
        assert found.pop("waited") and found.pop("type")
        assert len(found) == 12 and all(difference < CLOSE for difference in found.values()), found


def test_new_buckets_in_the_middle_of_training_change_nothing(runs: tuple[int, Runs]) -> None:
    for result in runs[1]("rebucketed"):
        assert result["difference"] < CLOSE and result["buckets"] == result["count"]


def test_planning_tries_bucketings_on_real_steps_and_uses_the_one_it_keeps(two: Runs) -> None:
    for result in two("planned"):
        assert result["difference"] < CLOSE
        assert (result["state"], result["reason"], result["watching"]) == ("done", "", False)
        assert result["layouts"] > 2 and result["reducers"] == 2 and result["used"] == result["kept"]
        assert "not wrapped with dovetail.optimizer yet" in result["before"]
        for line in ("reduce-scatter", "all-gather", "torch's own buckets", "kept"):
            assert line in result["explained"]
    assert two("planned")[0]["used"] == two("planned")[1]["used"]


def test_a_stored_plan_is_followed_from_the_first_step_on(two: Runs) -> None:
    for result in two("given"):
        assert result["difference"] < CLOSE
        assert result["used"] == result["planned"] and result["report"]
        assert "is only in" in result["other model"]


def test_a_plan_for_torchs_reducer_keeps_that_in_charge_with_a_second_line_too(two: Runs) -> None:
    for result in two("by torch"):
        assert result["difference"] < CLOSE and result["by torch"]
        assert result["elements"] == result["all"]


def test_a_plan_that_the_environment_names_is_followed_and_one_that_does_not_fit_refused(two: Runs) -> None:
    for result in two("named"):
        assert result["used"] == result["planned"] and result["report"]
        assert "is only in" in result["other"] and "no such file" in result["missing"]


def test_without_the_second_line_explain_says_what_it_would_gain(two: Runs) -> None:
    first, second = two("hinted")
    assert first == second and "a second line, dovetail.optimizer" in first and "predicted" in first


def test_state_is_stored_as_torch_stores_it_for_any_number_of_ranks(two: Runs, four: Runs, kept: str) -> None:
    for result in two("stored"):
        assert result["state"] < CLOSE and result["same form"]
    alone = _runs({"resumed": (overlap_state.resumed, {"folder": kept})}, 1)
    for result in [*alone("resumed"), *two("resumed"), *four("resumed")]:
        assert result["ours"] < CLOSE and result["plain"] < CLOSE


SAID = {
    "lbfgs": "LBFGS cannot be shared out by parameters",
    "twice": "in another optimiser already",
    "several": "expected one model, got several",
    "plain model": "wrapped with dovetail.DistributedDataParallel",
    "word": "expected one of 'forward', None, got 'backward'",
    "sparse": "sparse",
    "dtypes": "is for parameters of torch.float32, got torch.float64",
    "hook": "communication hook",
    "silent": "no_sync",
    "idle": "find_unused_parameters=True",
    "moved": "new memory",
    "different": "expected the same on all ranks, but rank 1",
}


@pytest.mark.parametrize("what", SAID)
def test_what_cannot_work_is_refused_in_one_line(two: Runs, what: str) -> None:
    for said in two("refusals"):
        assert SAID[what] in said[what] and "\n" not in said[what]


def test_a_model_that_nobody_holds_is_freed_even_with_parameters_on_their_way(two: Runs) -> None:
    assert all(all(freed) for freed in two("dropped"))


def test_a_killed_rank_ends_the_others_with_one_clear_line(tmp_path: Path) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.train.data_parallel.overlap_edges"]
    ranks = []
    with held_port() as port:
        shared["MASTER_PORT"] = str(port)
        try:
            for rank in range(3):
                with (tmp_path / str(rank)).open("wb") as said:
                    ranks.append(subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}, stderr=said))
            assert ranks[1].wait(HANG) == -9
            codes = [ranks[rank].wait(HANG) for rank in (0, 2)]  # the group's time-out is 45 s
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    assert all(code > 0 for code in codes), codes  # an exception, not a signal
    for rank in (0, 2):
        last = (tmp_path / str(rank)).read_text(encoding="utf-8").strip().splitlines()[-1]
        assert "Error: overlap: the " in last and f"failed on rank {rank}, is another rank lost?" in last

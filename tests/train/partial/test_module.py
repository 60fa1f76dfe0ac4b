"""PartialBackprop in real processes: gradients equal the masked oracle of one process, replicas stay identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.emulate.launch import LaunchError
from dovetail.planning.depth.guard import assign
from tests.ranks import run_all, run_ranks

from . import depth_changes as changes
from . import depth_scenarios as scenarios

Call = tuple[Callable[..., Any], dict[str, Any]]
Calls = dict[str, Call]
Runs = Callable[[str], list[Any]]


def exact(
    kind: str, segments: int, blocks: int, rounds: int = 2, **more: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    given = {"kind": kind, "segments": segments, "blocks": blocks, "rounds": rounds, **more}
    return scenarios.exact, given


TWO: Calls = {
    "exact: cnn": exact("cnn", 2, 8),
    "exact: transformer": exact("transformer", 3, 8),
    "exact: skips": exact("skips", 4, 8),
    "exact: tied": exact("tied", 3, 4),
    "exact: unused": exact("unused", 3, 4),
    "exact: checkpointed": exact("checkpointed", 3, 4),
    "exact: gpt2": exact("gpt2", 3, 4),
    "exact: bert": exact("bert", 3, 4),
    "refuses": (scenarios.refuses, {}),
}
FOUR: Calls = {
    "exact: cnn": exact("cnn", 4, 8, 3),
    "exact: transformer": exact("transformer", 4, 8, 2),
    "exact: skips": exact("skips", 4, 8, 3, uneven=True),
    "exact: tied": exact("tied", 4, 4, 2, uneven=True),
    "exact: rotated": exact("skips", 4, 8, 2, rotate="depth"),
    "accumulates": (scenarios.accumulates, {}),
    "mixed precision": (scenarios.mixed_precision, {}),
    "half precision": (scenarios.half_precision, {}),
    "statistics": (scenarios.statistics, {}),
    "stays out": (scenarios.stays_out, {}),
    "merged": (changes.merged, {}),
    "launched early": (changes.launched_early, {}),
    "phases": (changes.phases, {}),
    "guarded": (changes.guarded, {"steps": 14, "epsilon": 0.02}),
    "guarded, plain": (changes.guarded, {"steps": 10, "epsilon": 0.3, "optimizer": "SGD"}),
    "annealed": (changes.guarded, {"steps": 14, "epsilon": 0.02, "annealed": True}),
    "careless": (changes.guarded, {"steps": 10, "epsilon": 0.99}),
    "slow for a while": (changes.slow_for_a_while, {}),
}
EIGHT: Calls = {
    "exact: cnn": exact("cnn", 8, 8, 1),
    "exact: transformer": exact("transformer", 8, 8, 1),
    "exact: skips": exact("skips", 8, 8, 2, uneven=True),
}


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Results of the scenarios by "ranks: name". Each number of ranks starts its processes once, when first asked."""
    done: dict[int, list[list[Any]]] = {}

    def get(name: str) -> list[Any]:
        ranks, _, scenario = name.partition(": ")
        calls = {"2": TWO, "4": FOUR, "8": EIGHT}[ranks]
        if int(ranks) not in done:
            done[int(ranks)] = run_all(list(calls.values()), ranks=int(ranks), timeout=900)
        return [rank[list(calls).index(scenario)] for rank in done[int(ranks)]]

    return get


EXACT = [f"{k}: {name}" for k, calls in ((2, TWO), (4, FOUR), (8, EIGHT)) for name in calls if name.startswith("exact")]


@pytest.mark.parametrize("name", EXACT)
def test_gradients_equal_the_masked_oracle_and_replicas_are_identical(runs: Runs, name: str) -> None:
    for result in runs(name):
        assert result["worst"] <= 1e-12
        assert result["same"]


def test_accumulation_counts_all_samples_and_clipping_sees_the_averaged_gradients(runs: Runs) -> None:
    for result in runs("4: accumulates"):
        assert result["worst"] <= 1e-12 and result["norm"] <= 1e-12
        assert result["same"] and result["steps"] == 2


def test_autocast_gives_single_precision_gradients_and_an_overflow_reaches_every_rank(runs: Runs) -> None:
    for result in runs("4: mixed precision"):
        assert result["worst"] <= 1e-5 and result["same"]
        assert result["dtypes"] == ["torch.float32"] and result["overflowed"]


def test_half_precision_parameters_are_summed_in_single_precision(runs: Runs) -> None:
    for result in runs("4: half precision"):
        assert result["worst"] <= 2**-7 and result["same"]


def test_batch_norms_before_the_cut_see_every_batch_and_agree_after_the_step(runs: Runs) -> None:
    for result in runs("4: statistics"):
        assert result == {"moved": True, "equal": True, "same": True}


def test_evaluation_and_forward_without_backward_on_one_rank_change_nothing(runs: Runs) -> None:
    for result in runs("4: stays out"):
        assert result["equal"] and result["keys"][0].startswith("module.")


def test_buckets_of_the_merge_planner_give_the_same_gradients(runs: Runs) -> None:
    for result in runs("4: merged"):
        assert result["worst"] <= 1e-12 and result["same"]
        assert result["buckets"] == result["tensors"]
        assert result["sent"] == sorted(result["sent"], reverse=True), "the last segments first"


def test_the_last_segment_is_delivered_before_backward_reaches_the_first(runs: Runs) -> None:
    assert [result["arrived"] for result in runs("4: launched early")] == [[], [], [], [True, True]]


def test_phases_begin_at_their_step_on_all_ranks(runs: Runs) -> None:
    for result in runs("4: phases"):
        assert result["depths"] == [[4] * 4] * 3 + [[1, 2, 3, 4]] * 3 and result["same"]
        assert "has 2 phases: expected the training's `steps`" in result["without"]
        assert "cannot be copied" in result["copied"]
        assert result["resumed"] == "5 (1, 2, 3, 4)"


def test_the_guard_measures_in_the_optimisers_metric_and_follows_its_bound(runs: Runs) -> None:
    results = runs("4: guarded")
    for result in results:
        assert result["same"] and result["worst"] <= 1e-9
        assert result["depths"][:8] == [[4] * 4] * 8  # full until two measurements are in
        assert result["depths"][11] == [4] * 4  # measured
        assert result["counts"][0][0] > 1, "the first segment is too noisy for one worker"
        assert result["depths"][8] == result["depths"][9] == list(assigned(result["counts"][0]))
        assert "optimiser's metric" in result["lines"][0] and "contributors" in result["lines"][0]
        assert result["explained"].endswith(result["lines"][-1])
        assert result["depths"] == results[0]["depths"]
    for counts in results[0]["counts"]:
        assert counts == sorted(counts) and counts[-1] == 4


def assigned(counts: list[int]) -> tuple[int, ...]:
    return assign(counts, [3, 2, 1, 0])


def test_without_second_moments_the_plain_metric_is_used(runs: Runs) -> None:
    for result in runs("4: guarded, plain"):
        assert result["worst"] <= 1e-9 and result["same"]
        assert "plain metric" in result["lines"][0]


def test_an_annealed_guard_judges_noise_at_the_present_learning_rate(runs: Runs) -> None:
    for result in runs("4: annealed"):
        assert result["same"] and result["worst"] <= 1e-9
        # Seven and eleven steps after the first, at seven tenths each; the last step's rate is what counts.
        assert f"{0.7**6:.0%} of the peak rate" in result["lines"][0]
        assert f"{0.7**10:.0%} of the peak rate" in result["lines"][1]
        assert result["counts"][1] == [1, 2, 3, 4], "small steps average the noise out"


def test_a_guard_that_allows_everything_comes_to_the_plans_own_ladder(runs: Runs) -> None:
    for result in runs("4: careless"):
        assert result["counts"] == [[1, 2, 3, 4]]
        assert result["depths"][8:] == [[1, 2, 3, 4]] * 2


def test_a_slow_worker_gets_a_shallower_depth_and_gets_it_back(runs: Runs) -> None:
    for result in runs("4: slow for a while"):
        assert result["same"]
        assert result["depths"][0] == [1, 2, 3, 4]
        # The slowness of steps 2 to 4 is known in step 5 and counts from the next one on; the others move up.
        assert result["depths"][5:7] == [[1, 2, 3, 4], [2, 3, 4, 1]]
        assert result["depths"][-1] == [1, 2, 3, 4]


def test_what_a_cut_would_break_is_refused_in_one_line_on_every_rank(runs: Runs) -> None:
    shallow, deep = runs("2: refuses")
    assert "rank 0 at depth 1 of 2: the model cannot be cut before layer 'blocks.2'" in shallow["hooked"]
    assert "rank 0 has failed; its own message says why" in deep["hooked"]
    for said in (shallow, deep):
        assert "got a gradient in a backward pass inside another" in said["reentrant"]
        assert "use_reentrant=False" in said["reentrant"]
        assert "got a gradient on rank 1 (depth 2) but none on rank 0 (depth 1)" in said["lost"]
        assert "is for 3 workers: expected 2" in said["workers"]
        assert "does not fit this model: it has no layer" in said["other model"]
        assert "expected the same plan and options on all ranks" in said["other options"]
        assert said["rotate"] == "rotate: expected 'data' or 'depth', got 'both'"
        assert "is for 1 workers" in said["cut"]
        assert all("\n" not in line for line in said.values())


def test_a_killed_rank_ends_the_others_in_one_line() -> None:
    with pytest.raises(LaunchError, match="a rank was lost while gradients were on their way") as ended:
        run_ranks(changes.dies, ranks=3, step_of_death=3, patience=60)
    assert sum(r.code == 5 for r in ended.value.results) >= 1
    said = [line for r in ended.value.results for line in r.stderr if "a rank was lost" in line]
    assert said and not any(".cc:" in line or "GLHF" in line for line in said), "gloo's sources are not the user's"

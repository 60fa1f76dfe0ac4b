"""Burst execution: whatever the plan, what one process would compute; every rank holds only what it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dovetail import Burst
from dovetail.core.errors import Error
from dovetail.emulate import launch as launching
from dovetail.emulate.launch import LaunchError
from tests.ranks import run_all
from tests.train.burst import burst_scenarios as scenarios

EIGHT = 3000  # seeds apart from those of four ranks

GROWS_AND_SHRINKS: list[list[Any]] = [
    [4, 4, 2, 1, 1, 1],
    [1, 1, 4, 4, 2, 3],
    [[1, 3], [2], [0, 1, 2, 3], [3], [1, 2], [2, 3]],
]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Everything that four ranks do, in one process group: by name, what each rank reports."""
    folder = tmp_path_factory.mktemp("burst")
    calls: list[tuple[str, Any, dict[str, Any]]] = [
        ("matches", scenarios.matches, {"first": 0, "count": 16}),
        ("integers", scenarios.integers, {"first": 0, "count": 10}),
        *(
            (name, scenarios.replans, {"path": str(folder / name), "optimizer": name, "plans": GROWS_AND_SHRINKS})
            for name in scenarios.OPTIMIZERS
        ),
        ("accumulates", scenarios.accumulates, {}),
        ("unused", scenarios.unused, {}),
        ("records", scenarios.records, {}),
    ]
    by_rank = run_all([(function, given) for _, function, given in calls], ranks=4, timeout=500)
    return {name: [reports[i] for reports in by_rank] for i, (name, _, _) in enumerate(calls)}


@pytest.fixture(scope="module")
def eight() -> list[list[Any]]:
    calls: list[tuple[Any, dict[str, Any]]] = [
        (scenarios.matches, {"first": EIGHT, "count": 3}),
        (scenarios.integers, {"first": EIGHT, "count": 3}),
    ]
    return run_all(calls, ranks=8, timeout=500)


def check_matches(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["errors"]["grad"] <= 1e-12, one
        assert one["errors"]["parameters"] <= 1e-12, one
        assert one["errors"]["buffers"] <= 1e-12, one
        assert one["errors"]["loss"] <= 1e-12, one
        assert one["moved"] == one["predicted"], one
    assert sum(one["moved"] > 0 for one in found) >= len(found) // 4


def test_gradients_of_random_plans_are_those_of_one_process(four: dict[str, list[Any]]) -> None:
    check_matches(four["matches"][0])


def test_gradients_of_random_plans_on_eight_ranks_are_those_of_one_process(eight: list[list[Any]]) -> None:
    check_matches(eight[0][0])


def test_gradients_of_whole_numbers_are_equal_to_the_last_bit(
    four: dict[str, list[Any]], eight: list[list[Any]]
) -> None:
    for one in [*four["integers"][0], *eight[0][1]]:
        assert one["error"] == 0.0 and one["is"] > 0, one


def test_parameters_and_optimiser_state_are_only_where_their_layer_runs(four: dict[str, list[Any]]) -> None:
    for seed in range(len(four["matches"][0])):
        held = [four["matches"][rank][seed]["held"] for rank in range(4)]
        states = [four["matches"][rank][seed]["state"] for rank in range(4)]
        assert states == held
        assert all(any(ranks) for ranks in zip(*held, strict=True))
    everywhere = [all(all(h["held"]) for h in rank) for rank in four["matches"]]
    assert not any(everywhere)


@pytest.mark.parametrize("optimizer", list(scenarios.OPTIMIZERS))
def test_a_new_plan_loses_no_optimiser_state(four: dict[str, list[Any]], optimizer: str) -> None:
    for rank in four[optimizer]:
        assert all(rank["states"])
        for gradients, parameters in rank["errors"]:
            assert gradients <= 1e-11 and parameters <= 1e-11, rank


@pytest.mark.parametrize("optimizer", list(scenarios.OPTIMIZERS))
def test_a_checkpoint_goes_on_under_another_plan_and_in_the_plain_model(
    four: dict[str, list[Any]], optimizer: str
) -> None:
    for rank in four[optimizer]:
        elsewhere, plain = rank["loaded"]
        assert elsewhere <= 1e-11 and plain <= 1e-11


def test_gradients_add_up_over_steps_and_are_clipped_by_the_whole_models_norm(four: dict[str, list[Any]]) -> None:
    for rank in four["accumulates"]:
        assert rank["summed"][0] <= 1e-12 and rank["clipped"][0] <= 1e-12
        assert rank["norm"] == pytest.approx(rank["expected"], rel=1e-12)
        assert rank["predict"] <= 1e-12


def test_a_parameter_has_a_gradient_exactly_if_some_sample_used_it(four: dict[str, list[Any]]) -> None:
    assert four["unused"][0]["error"] <= 1e-12 and four["unused"][0]["unused"]


def test_a_recorded_step_shows_work_communication_and_idle_gaps(four: dict[str, list[Any]]) -> None:
    for rank, seen in enumerate(four["records"]):
        # Layers 0 and 1 on four ranks, layer 2 on rank 0 alone, layer 3 on two.
        assert seen["forward"] == ["layers 0–1", *["layer 2"] * (rank == 0), *["layer 3"] * (rank < 2)]
        assert {"forward", "backward", "communication", "idle"} <= set(seen["kinds"])
        assert seen["sent in spans"] == seen["sent"] and seen["source"] == "measured"


WORDS = {
    "too many ranks": "plan: layer 1: expected ranks among the job's 4, got 9",
    "wrong length": "layers: expected one for each of the plan's 3, got 2 layers",
    "other plan": "plan: expected the same on all ranks, but rank",
    "scalar loss": "loss: expected one value for each of",
    "rows": "labels: expected 5 rows for a global batch of 5, got [3]",
    "tied": "'0.weight' is used by layers 0 and 1",
    "unknown layer": "expected modules of the model, but it never calls 'hed'",
    "not a checkpoint": "expected a checkpoint written by Burst.save",
    "other model": "checkpoint does not fit this model: '1.bias' is only in the model",
    "no folder": "cannot be written",
    "a layer": "burst rank 2: step 0: layer 1: Breaks: no numbers today",
    "an interrupt": "burst rank 2: step 0: KeyboardInterrupt",
    "absent on one rank": "burst rank 1: load: ",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], list[str]]:
    """(what each rank said about every mistake, what the others said when rank 1 was killed)."""
    path = tmp_path_factory.mktemp("refused") / "said"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LaunchError, match="rank 1 was killed by SIGK") as caught:
        patch.setattr(launching, "GRACE", 120.0)  # the others may report it before they are ended
        run_all([(scenarios.refuses, {"path": str(path)})], ranks=4, timeout=500)
    lines = [path.with_name(f"said.{rank}") for rank in (0, 2, 3)]
    return [r.report[0] for r in caught.value.results], [p.read_text() if p.exists() else "" for p in lines]


@pytest.mark.parametrize("what", list(WORDS))
def test_a_failure_on_any_rank_ends_all_ranks_with_one_line(
    refused: tuple[list[dict[str, str]], list[str]], what: str
) -> None:
    for rank, said in enumerate(refused[0]):
        assert what in said, f"rank {rank} went on"
        assert WORDS[what] in said[what]
        assert said[what].startswith("burst rank ") and "\n" not in said[what]


def test_a_checkpoint_that_is_not_there_leaves_the_job_as_it_was(
    refused: tuple[list[dict[str, str]], list[str]],
) -> None:
    assert [said["afterwards"] for said in refused[0]] == ["trains"] * 4


class Strikes(nn.Linear):
    strikes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.strikes:
            raise KeyboardInterrupt("not now")
        return super().forward(x)


def alone(*layers: nn.Module, **options: Any) -> Burst:
    """A job of one rank."""
    return Burst(list(layers), [1] * len(layers), loss=partial(F.cross_entropy, reduction="none"), **options)


X, Y = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)


def test_an_interrupt_passes_unchanged_and_ends_the_job() -> None:
    layer = Strikes(4, 3)
    job = alone(layer)
    layer.strikes = True
    with pytest.raises(KeyboardInterrupt, match="not now"):
        job.step(X, Y)
    layer.strikes = False
    with pytest.raises(Error, match="burst rank 0: step 0: KeyboardInterrupt"):
        job.step(X, Y)


def test_training_starts_without_a_checkpoint_and_goes_on_with_one(tmp_path: Path) -> None:
    job = alone(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    torch.save({"model": nn.Linear(4, 3).state_dict()}, tmp_path / "other.pt")
    for wrong in ("absent.pt", "other.pt"):
        with pytest.raises(Error, match=r"expected a checkpoint written by Burst\.save"):
            job.load(tmp_path / wrong)
    job.save(tmp_path / "saved.pt")
    with pytest.raises(Error, match="optimizer: expected the state of an optimiser, but none was saved"):
        job.load(tmp_path / "saved.pt", optimizer)
    job.step(X, Y)
    assert job.steps == 1
    job.load(tmp_path / "saved.pt")
    assert job.steps == 0


def test_moved_bytes_can_be_predicted_once_a_step_was_taken() -> None:
    job = alone(nn.Linear(4, 4), nn.Linear(4, 3), bucket_bytes=1)
    with pytest.raises(Error, match="batch: expected that of a step that was taken, got 2"):
        job.predicted_moved_bytes(2)
    job.step(X, Y)
    assert job.predicted_moved_bytes(2) == 0


def test_when_a_rank_is_killed_the_others_end_with_one_line(refused: tuple[list[dict[str, str]], list[str]]) -> None:
    for line in refused[1]:
        assert line.startswith("burst rank ") and "a rank is lost or unreachable" in line and "\n" not in line


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_clipping_does_what_torch_does_whatever_the_norm_is(value: float) -> None:
    job, plain = alone(nn.Linear(4, 3)), nn.Linear(4, 3)
    for model in (job, plain):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.ones_like(p)
            p.grad.view(-1)[0] = value if i == 0 else 1.0
    norms = [job.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(plain.parameters(), 1.0)]
    assert torch.allclose(norms[0].float(), norms[1], equal_nan=True)
    for p, q in zip(job.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.allclose(p.grad, q.grad, equal_nan=True)


def test_clipping_can_refuse_a_norm_that_is_not_finite_and_training_goes_on() -> None:
    job = alone(nn.Linear(4, 3))
    job.step(X, Y)
    weight = next(job.parameters())
    assert weight.grad is not None
    weight.grad.fill_(float("nan"))
    with pytest.raises(Error, match="clip_grad_norm_: the norm of the gradients is nan"):
        job.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for p in job.parameters():
        p.grad = None
    assert job.step(X, Y).isfinite() and job.clip_grad_norm_(1.0, error_if_nonfinite=True).isfinite()

"""Optimisers that need whole tensors: equal to one process alone, and shared out among the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_all

from . import whole_scenarios

KINDS = ("muon", "adafactor", "shampoo")


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank reports of each scenario, by its name."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    names = []
    for kind in KINDS:
        calls += [(whole_scenarios.trains, {"kind": kind}), (whole_scenarios.resumes, {"kind": kind})]
        names += [f"{kind} trains", f"{kind} resumes"]
    calls += [
        (whole_scenarios.two_optimizers, {"muon_first": True}),
        (whole_scenarios.two_optimizers, {"muon_first": False}),
        (whole_scenarios.odd_shapes, {}),
        (whole_scenarios.in_fewer_bytes, {}),
        (whole_scenarios.shares, {"width": 48, "layers": 6}),
        (whole_scenarios.refusals, {}),
    ]
    names += ["muon, adamw", "adamw, muon", "odd shapes", "fewer bytes", "shares", "refusals"]
    reports = run_all(calls, ranks=request.param, timeout=600)
    return [dict(zip(names, report, strict=True)) | {"ranks": request.param} for report in reports]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_state_equal_those_of_one_process_with_the_whole_batch(
    found: list[dict[str, Any]], kind: str
) -> None:
    for rank in found:
        report = rank[f"{kind} trains"]
        assert report["difference"] < 1e-9 and report["state"] < 1e-9
        assert report["losses"][-1] < report["losses"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_to_a_plain_optimiser_and_back(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        report = rank[f"{kind} resumes"]
        assert report["keys"] == 8 and report["back"] == 0
        assert report["difference"] < 1e-9


@pytest.mark.parametrize("which", ["muon, adamw", "adamw, muon"])
def test_muon_and_adamw_of_one_model_equal_one_process_and_travel_apart(
    found: list[dict[str, Any]], which: str
) -> None:
    for rank in found:
        report = rank[which]
        assert report["difference"] < 1e-9 and report["state"] < 1e-9
        assert set(report["users"]) == {1}, "a bucket that both update would be gathered twice"


def test_tied_scalar_and_channels_last_parameters_and_accumulation_are_as_in_torch(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["odd shapes"]["difference"] < 1e-9


def test_in_fewer_bytes_all_ranks_hold_the_same_bits(found: list[dict[str, Any]]) -> None:
    for rank in found:
        report = rank["fewer bytes"]
        assert report["same"] and report["last"] < report["first"]


def test_state_and_arithmetic_of_muon_are_shared_out_evenly(found: list[dict[str, Any]]) -> None:
    ranks = found[0]["ranks"]
    for rank in found:
        assert rank["shares"]["state"] <= 1.2 / ranks and rank["shares"]["flops"] <= 1.2 / ranks
    assert sum(rank["shares"]["state"] for rank in found) == pytest.approx(1)


def test_what_mixes_parameters_is_refused_in_one_line_and_what_is_only_unknown_is_taken(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        said = rank["refusals"]
        assert "LBFGS" in said["lbfgs"] and "cannot be shared out" in said["lbfgs"]
        assert "depends on others" in said["norm"]
        assert "in its parameter groups" in said["counting"]
        assert "did not change" in said["flat"]
        assert said["shampoo"] == "nothing was refused"

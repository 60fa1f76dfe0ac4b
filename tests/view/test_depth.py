"""Depth plans for people: what they save and who does what, in 80 columns; and `dovetail plan --spb`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.core import files
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.timeline import Timeline
from dovetail.planning.depth.planner import compare, plan
from dovetail.view import depth, example
from tests.cli.command import run

from .test_tables import row, text


def test_savings_show_every_policy_and_mark_the_chosen_one() -> None:
    plans = compare(example.profile(layers=8), example.network(), workers=4)
    printed = text(depth.savings(plans, chosen=plans[1]))
    assert row(printed, "->")[1] == "ladder"
    assert row(printed, "full")[1:3] == ["0.0", "%"]
    assert row(printed, "->")[4:6] == ["-25.0", "%"], "traffic"
    assert max(map(len, printed.splitlines())) <= 80


def test_a_depth_plan_shows_what_each_worker_does() -> None:
    printed = text(depth.depths(plan(example.profile(layers=8), example.network(), workers=4, policy="late-ladder")))
    assert "from the start" in printed and "from 50.0 % of the training on" in printed
    assert "1 of 4" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_advice_names_the_equal_number_of_workers() -> None:
    (said,) = depth.advice(plan(example.profile(layers=8), workers=4))
    assert "3.0 workers at full depth" in said
    assert depth.advice(plan(example.profile(layers=8), workers=4, policy="full")) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write(tmp_path / "job.json", example.profile())
    files.write(tmp_path / "net.json", example.network())
    return tmp_path


def test_plan_lists_what_partial_backpropagation_would_save(folder: Path) -> None:
    done = run("plan", folder / "job.json", folder / "net.json", "--workers", "4", "-o", folder / "plan.json")
    assert done.exit_code == 0
    assert "balanced" in done.stdout and "late-ladder" in done.stdout
    done = run("plan", folder / "job.json", folder / "net.json", "--workers", "4", "-o", folder / "plan.json", "--json")
    saved = {p["policy"]: p["saves"] for p in json.loads(done.stdout)["partial"]}
    assert saved["ladder"]["sent"] == pytest.approx(0.25, abs=0.05)
    assert saved["full"]["compute"] == 0


def test_plan_writes_a_depth_plan_that_view_reads(folder: Path) -> None:
    out = folder / "depth.json"
    done = run("plan", folder / "job.json", folder / "net.json", "--workers", "4", "--spb", "balanced", "-o", out)
    assert done.exit_code == 0 and "workers at full depth" in " ".join(done.stdout.split())
    assert files.read(out, DepthPlan).policy == "balanced"
    assert "1 of 4" in run("view", out).stdout
    done = run("simulate", out, "-o", folder / "step.json", "--profile", folder / "job.json")
    assert done.exit_code == 0 and "1 of 4" in done.stdout
    timeline = files.read(folder / "step.json", Timeline)
    assert timeline.duration == pytest.approx(files.read(out, DepthPlan).phases[0].iteration)
    assert {s.track for s in timeline.spans} >= {f"rank {i}/compute" for i in range(4)}
    wrong = run("plan", folder / "job.json", folder / "net.json", "--spb", "stairs", "-o", folder / "no.json")
    assert wrong.exit_code == 1 and "no policy 'stairs'" in wrong.stderr
    assert not (folder / "no.json").exists()

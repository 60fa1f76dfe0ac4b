"""`dovetail plan --auto`: the best of everything, explained, written in the form that its runtime reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.inputs import read_plan
from dovetail.core import files
from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.plan import Plan
from dovetail.core.timeline import Timeline
from tests.planning.auto.auto_oracle import profile as random_profile
from tests.planning.auto.test_choice import uneven
from tests.planning.merge.oracle import made_profile

from .command import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write(tmp_path / "job.json", made_profile([30_000_000] * 8, [0.02] * 8, forward=[0.02] * 8))
    files.write(tmp_path / "uneven.json", uneven())
    files.write(tmp_path / "deep.json", random_profile(3, 6))
    return tmp_path


def auto(folder: Path, job: str, *more: str) -> dict[str, Any]:
    done = run("plan", folder / job, *more, "--auto", "-o", folder / "plan.json", "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_it_says_what_each_part_contributed_what_was_not_chosen_and_how_to_run_it(folder: Path) -> None:
    done = run("plan", folder / "job.json", "10gbe-8", "--auto", "-o", folder / "plan.json")
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    for words in (
        "torch's DDP",
        "+ planned merging",
        "-> + overlap with forward",
        "Not considered: burst: devices by layer: only one local batch (8) was measured",
        "--allow-statistics",
        "Chosen: overlap with forward on 8 devices, local batch 8: predicted",
        "dropped by lower bounds. None of them can be better.",
        "nothing ran",
        'model = dovetail.DistributedDataParallel(model, overlap="forward", plan=plan)',
        "optimizer = dovetail.optimizer(optimizer, model)",
    ):
        assert words in text, words
    prose, _, _ = done.stdout.partition("To run it")
    assert max(map(len, prose.splitlines())) <= 80, "code is as long as it is"
    plan = files.read(folder / "plan.json", Plan)
    assert (plan.overlap, plan.workers, plan.batch) == ("forward", 8, 8)


@pytest.mark.parametrize(
    ("job", "more", "technique", "kind"),
    [
        ("job.json", ["10gbe-8"], "overlap", Plan),
        ("uneven.json", ["10gbe-8"], "burst", BurstPlan),
        ("deep.json", ["nvlink-4", "--batch", "16", "--allow-statistics"], "balanced", DepthPlan),
        ("uneven.json", ["10gbe-8", "--objective", "device-time"], None, None),
        ("uneven.json", ["10gbe-8", "--objective", "throughput", "--task", "1"], None, None),
    ],
)
def test_simulate_gives_the_figure_that_the_choice_was_made_by(
    folder: Path, job: str, more: list[str], technique: str | None, kind: type | None
) -> None:
    found = auto(folder, job, *more)
    assert technique in (None, found["chosen"]["technique"])
    assert kind is None or isinstance(read_plan(folder / "plan.json"), kind)
    done = run("simulate", folder / "plan.json", "--profile", folder / job, "-o", folder / "t.json")
    assert done.exit_code == 0, done.stderr
    drawn = files.read(folder / "t.json", Timeline)
    assert drawn.duration == pytest.approx(found["chosen"]["iteration"], rel=1e-9)
    assert found["gap"] >= 0 and found["steps"][-1] == found["chosen"] and found["steps"][0] == found["baseline"]


def test_the_lines_of_python_find_the_plan_and_name_things_that_exist(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dovetail

    monkeypatch.chdir(folder)
    for job, more in (
        ("job.json", ["10gbe-8"]),
        ("uneven.json", ["10gbe-8"]),
        ("deep.json", ["nvlink-4", "--batch", "16", "--allow-statistics"]),
    ):
        done = run("plan", job, *more, "--auto", "--json")
        lines = json.loads(done.stdout)["run"]
        names: dict[str, Any] = {"dovetail": dovetail}
        for line in lines:
            compile(line, "recipe", "exec")
            if "dovetail.read" in line or line.startswith("from "):
                exec(line, names)
        assert names["plan"] == read_plan(Path("plan.json"))
        shown = run("plan", job, *more, "--auto", "-o", f'{"long" * 20} ".json').stdout
        assert all(f"  {line}\n" in shown for line in lines if "plan.json" not in line), "code is not broken in two"
        assert f"({json.dumps('long' * 20 + ' ' + chr(34) + '.json')}, " in shown
        assert any(name in lines[-1] + lines[-2] for name in ("DistributedDataParallel", "Burst", "PartialBackprop"))


def test_a_speed_and_a_memory_are_kept(folder: Path) -> None:
    found = auto(folder, "uneven.json", "10gbe-8", "--objective", "device-time", "--within", "0.05")
    assert found["within"] == 0.05 and found["chosen"]["iteration"] <= 0.05
    done = run("plan", folder / "uneven.json", "10gbe-8", "--auto", "--within", "0.0001", "-o", folder / "never.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "within: no plan" in done.stderr
    done = run("plan", folder / "uneven.json", "10gbe-8", "--auto", "--memory", "0.001", "-o", folder / "never.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "bytes each, expected at most" in done.stderr
    assert not (folder / "never.json").exists()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--objective", "throughput", "--within", "0"], "within: no plan for 'uneven' takes at most 0 s"),
        (["--objective", "device-time", "--within", "0"], "within: no plan for 'uneven' takes at most 0 s"),
        (["--memory", "0"], "bytes each, expected at most 0"),
        (["--memory", "0", "--allow-statistics"], "bytes each, expected at most 0"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_nothing_of_a_thing_is_one_line(folder: Path, extra: list[str], said: str) -> None:
    done = run("plan", folder / "uneven.json", "10gbe-8", "--auto", *extra, "-o", folder / "never.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert not (folder / "never.json").exists()


def test_tasks_that_take_next_to_no_time_fill_every_gap(folder: Path) -> None:
    short, none = (
        auto(folder, "uneven.json", "10gbe-8", "--objective", "throughput", "--task", task) for task in ("1e-320", "0")
    )
    assert short["chosen"] == none["chosen"]


@pytest.mark.parametrize(
    "extra",
    [
        ["--auto", "--burst"],
        ["--auto", "--spb", "ladder"],
        ["--auto", "--policy", "ddp"],
        ["--auto", "--workers", "4"],
        ["--auto", "--amplification", "2"],
        ["--auto", "--objective", "joy"],
        ["--objective", "throughput"],
        ["--allow-statistics"],
        ["--within", "1"],
        ["--auto", "--task", "5"],
        ["--auto", "--objective", "device-time", "--task", "5"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together_are_wrong_use(folder: Path, extra: list[str]) -> None:
    done = run("plan", folder / "job.json", "10gbe-8", *extra, "-o", folder / "never.json")
    assert done.exit_code == 2 and done.stdout == "" and not (folder / "never.json").exists()


def test_scale_shows_every_technique_and_the_best_of_all(folder: Path) -> None:
    job = folder / "uneven.json"
    done = run("scale", job, "--network", "10gbe-8", "--workers", "4,8", "--techniques", "--json")
    assert done.exit_code == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    for workers in (4, 8):
        here = {p["policy"]: p["iteration"] for p in points if p["workers"] == workers}
        assert set(here) == {"ddp", "merging", "overlap", "burst", "auto"}
        assert here["auto"] <= min(here.values()) * (1 + 1e-9)
    more = run("scale", job, "--network", "10gbe-8", "--workers", "4", "--techniques", "--allow-statistics")
    assert "balanced" in more.stdout and "ladder" in more.stdout and "auto" in more.stdout
    for wrong in (["--techniques", "--policies", "ddp"], ["--allow-statistics"]):
        assert run("scale", job, "--network", "10gbe-8", *wrong).exit_code == 2


def test_scale_covers_two_thousand_devices(folder: Path) -> None:
    done = run("scale", folder / "uneven.json", "--network", "100gbe-16", "--workers", "2048", "--techniques", "--json")
    assert done.exit_code == 0, done.stderr
    here = {p["policy"]: p["speedup"] for p in json.loads(done.stdout)["points"]}
    assert here["auto"] >= max(here.values()) * (1 - 1e-9) and "burst" in here

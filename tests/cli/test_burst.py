"""`dovetail plan --burst`: one command tells whether a model has uneven layers worth bursting, and what it frees."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dovetail.core import files
from dovetail.core.burst_plan import BurstPlan
from dovetail.core.profile import Profile
from dovetail.measure.presets import preset
from dovetail.planning.burst.cost import NetworkLinks, ProfileCost
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.planning.burst.rules import data_parallel
from dovetail.view.burst import freed_devices
from tests.planning.merge.oracle import made_profile

from .command import run


def uneven() -> Profile:
    """Four layers that halve well, and two with many parameters that do not."""
    return made_profile([400 << 20, 400 << 20, 4, 4, 4, 4], [1e-4, 1e-4, 4e-3, 4e-3, 4e-3, 4e-3])


def even() -> Profile:
    return made_profile([4] * 6, [20e-3] * 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write(tmp_path / "job.json", uneven())
    return tmp_path


def test_the_table_says_what_bursting_gains_and_frees(folder: Path) -> None:
    arguments = ("plan", folder / "job.json", "--burst", "--devices", "8", "--batch", "32")
    done = run(*arguments, "-o", folder / "plan.json", "--png", folder / "p.png")
    assert done.exit_code == 0, done.stderr
    words = ("dp:1", "dp:8", "deeppool:2", "-> burst fastest", "free of 8", "Worth bursting", "Predicted")
    for word in (*words, "Behind backward"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    plan = files.read(folder / "plan.json", BurstPlan)
    assert plan.devices == 8 and plan.batch == 32 and plan.counts[0] == 8 and plan.counts[-1] < 8
    seen = run("view", folder / "plan.json")
    assert seen.exit_code == 0 and "burst plan fastest for made" in seen.stdout and "layer5" in seen.stdout


def test_a_model_with_even_layers_is_told_not_to_burst(folder: Path) -> None:
    files.write(folder / "even.json", even())
    done = run("plan", folder / "even.json", "--burst", "--devices", "4", "--batch", "32", "-o", folder / "p.json")
    assert done.exit_code == 0 and "Not worth bursting" in done.stdout


def test_burst_as_json_is_nothing_but_json_and_keeps_the_limit(folder: Path) -> None:
    arguments: list[str | Path] = [
        "plan",
        folder / "job.json",
        "10gbe-4",
        "--burst",
        "--batch",
        "16",
        "--amplification",
        "1.2",
    ]
    done = run(*arguments, "-o", folder / "p.json", "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["chosen"] == "fastest:1.2" and result["written"].endswith("p.json")
    chosen = next(p for p in result["plans"] if p["policy"] == "fastest:1.2")
    used = chosen["prediction"]
    assert used["device_time"] <= 1.2 * used["one_device"] * (1 + 1e-9)
    assert chosen["devices"] == 4 and 0 <= chosen["useful_devices"] <= chosen["free_devices"] <= 4
    assert files.read(folder / "p.json", BurstPlan).network == "10gbe-4"


def test_a_static_partition_is_the_best_number_of_devices_at_a_speed() -> None:
    """Over a slow network fewer devices may be faster than all: the partition to compare with uses those."""
    planner = BurstPlanner(uneven(), ProfileCost(uneven(), 32, NetworkLinks(preset("10gbe-16"))), 8)
    plans = data_parallel(planner)
    better = 0
    for dp in plans:
        _, burst, static = freed_devices(planner, dp, plans)
        speed = dp.prediction.iteration
        as_fast = [p.counts[0] * p.prediction.iteration for p in plans if p.prediction.iteration <= speed]
        assert static == pytest.approx(8 - min(as_fast) / speed)
        assert burst >= static - 1e-9, "a static partition is a burst plan too"
        better += static > 8 - dp.counts[0] + 1e-9
    assert better


def test_branches_are_planned_and_crossing_branches_get_one_line(folder: Path) -> None:
    forked = msgspec.structs.replace(uneven(), edges=((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 5), (3, 5)))
    files.write(folder / "forked.json", forked)
    done = run("plan", folder / "forked.json", "--burst", "--batch", "32", "-o", folder / "p.json")
    assert done.exit_code == 0 and "deeppool" not in done.stdout and "burst fastest" in done.stdout
    crossed = msgspec.structs.replace(uneven(), edges=((0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5)))
    files.write(folder / "crossed.json", crossed)
    done = run("plan", folder / "crossed.json", "--burst", "-o", folder / "never.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "series-parallel" in done.stderr
    assert not (folder / "never.json").exists()


def test_memory_that_does_not_suffice_is_said(folder: Path) -> None:
    done = run("plan", folder / "job.json", "--burst", "--memory", "0.5", "-o", folder / "never.json")
    assert done.exit_code == 1 and "bytes per rank" in done.stderr and not (folder / "never.json").exists()
    assert done.stderr.count("\n") == 1 and "needs at least" in done.stderr


def test_a_profile_that_takes_no_time_is_one_line(folder: Path) -> None:
    files.write(folder / "zero.json", made_profile([4] * 3, [0.0] * 3, forward=[0.0] * 3))
    done = run("plan", folder / "zero.json", "--burst", "-o", folder / "zero-plan.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "profile 'made': expected layers that take time" in done.stderr and not (folder / "zero-plan.json").exists()


def test_more_devices_than_can_be_planned_are_one_line_with_a_way_out(folder: Path) -> None:
    arguments = ("plan", folder / "job.json", "--burst", "--devices", "100000", "--batch", "100000")
    done = run(*arguments, "-o", folder / "never.json")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "plan for fewer devices" in done.stderr


def test_a_profile_of_one_local_batch_is_said_to_tell_nothing_of_unevenness(folder: Path) -> None:
    done = run("plan", folder / "job.json", "--burst", "--devices", "4", "--batch", "32", "-o", folder / "p.json")
    assert done.exit_code == 0 and "Only one local batch (8) was measured" in done.stdout


def test_layers_in_which_deeppool_breaks_its_limit_are_counted(folder: Path) -> None:
    """Large outputs behind layers that halve well: the fastest way into the next layer costs it more than it may."""
    arguments = ("--burst", "--devices", "8", "--batch", "32", "--amplification", "1.5", "-o", folder / "p.json")
    assert "breaks its own limit" not in run("plan", folder / "job.json", *arguments).stdout
    wide = tuple(msgspec.structs.replace(layer, activation_bytes=50 << 20) for layer in uneven().layers)
    files.write(folder / "wide.json", msgspec.structs.replace(uneven(), layers=wide))
    done = run("plan", folder / "wide.json", *arguments)
    assert done.exit_code == 0 and "deeppool's rule breaks its own limit in" in done.stdout


@pytest.mark.parametrize(
    "extra", [["--devices", "8"], ["--amplification", "2"], []], ids=["devices", "amplification", "no network"]
)
def test_options_of_burst_without_it_are_wrong_use(folder: Path, extra: list[str]) -> None:
    network = ["10gbe-4"] if extra else []
    done = run("plan", folder / "job.json", *network, *extra, "-o", folder / "never.json")
    assert done.exit_code == 2 and done.stdout == "" and not (folder / "never.json").exists()


def test_a_profile_with_its_graph_is_planned_with_its_branches(folder: Path) -> None:
    model = """
import torch
class Fork(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b, self.head = (torch.nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        x = self.stem(x)
        return self.head(self.b(self.a(x)) + x)
def model(): return Fork()
def batch(size): return torch.randn(size, 8)
"""
    (folder / "fork.py").write_text(model)
    done = run("profile", folder / "fork.py", "--graph", "--batch", "4", "--steps", "1", "-o", folder / "fork.json")
    assert done.exit_code == 0, done.stderr
    assert files.read(folder / "fork.json", Profile).edges == ((0, 1), (0, 2), (1, 2), (2, 3))
    (folder / "stuck.py").write_text(model.replace("return self.head", "return x if x.sum() > 1e9 else self.head"))
    done = run("profile", folder / "stuck.py", "--graph", "--batch", "4", "--steps", "1", "-o", folder / "stuck.json")
    assert done.exit_code == 0 and "note: model Fork cannot be traced" in done.stderr
    assert files.read(folder / "stuck.json", Profile).edges == ()


def test_memory_that_binds_takes_the_narrow_plans_away(folder: Path) -> None:
    """Outputs of one sample are 4 bytes: 32 of them on one device are too many where 20 fit."""
    profile = uneven()
    state = 4 * sum(layer.parameter_bytes for layer in profile.layers)
    gib = (state + 6 * 4 * 20) / 2**30
    arguments = ("plan", folder / "job.json", "--burst", "--devices", "8", "--batch", "32", "--memory", repr(gib))
    done = run(*arguments, "-o", folder / "p.json")
    assert done.exit_code == 0, done.stderr
    assert files.read(folder / "p.json", BurstPlan).prediction.memory <= gib * 2**30

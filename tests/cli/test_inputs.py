"""What users type is checked before anything happens: no input is written over, no number is too large to be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.core import files
from dovetail.planning import plan
from dovetail.planning.depth import planner
from dovetail.view import example

from .command import run

TRACE = "arrival,workers,duration\n0,1,30\n5,2,60\n"
SCRIPT = "import torch\ndef model(): return torch.nn.Linear(4, 2)\ndef batch(size): return torch.randn(size, 4)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    profile, network = example.profile(), example.network()
    files.write(tmp_path / "job.json", profile)
    files.write(tmp_path / "net.json", network)
    files.write(tmp_path / "other.json", network)
    files.write(tmp_path / "plan.json", plan(profile, network, policy="optimal"))
    files.write(tmp_path / "depth.json", planner.plan(profile, network))
    (tmp_path / "t.csv").write_text(TRACE)
    (tmp_path / "t.png").write_text(TRACE)
    (tmp_path / "model.py").write_text(SCRIPT)
    (tmp_path / "link.json").symlink_to("plan.json")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "plan.json", "-o", "plan.json"],
        ["simulate", "plan.json", "-o", "./link.json"],
        ["simulate", "plan.json", "-o", "job.json"],
        ["simulate", "plan.json", "-o", "net.json"],
        ["simulate", "depth.json", "-o", "depth.json"],
        ["simulate", "plan.json", "--network", "other.json", "-o", "other.json"],
        ["schedule", "t.csv", "-o", "t.csv"],
        ["schedule", "t.csv", "--perfetto", "t.csv"],
        ["schedule", "t.png", "--png", "t.png", "--load", "0.5"],
        ["profile", "model.py", "-o", "model.py"],
    ],
    ids=" ".join,
)
def test_what_is_read_is_not_written_over(arguments: list[str], folder: Path) -> None:
    before = {path: path.read_text() for path in folder.iterdir()}
    done = run(*arguments)
    assert done.exit_code == 2 and done.stdout == "", done.stderr
    assert "written over what it is made from" in " ".join(done.stderr.replace("│", " ").split())
    assert {path: path.read_text() for path in folder.iterdir()} == before


def test_a_file_that_nothing_is_made_from_is_replaced(folder: Path) -> None:
    assert run("simulate", "plan.json", "-o", "t.csv").exit_code == 0
    assert run("profile", "m" * 5000, "-o", "t.csv").exit_code == 1  # no model, and no path either


@pytest.mark.parametrize("gib", ["1e300", "inf"])
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "job.json", "net.json", "--burst", "-o", "never.json"],
        ["plan", "job.json", "net.json", "--auto", "-o", "never.json"],
        ["schedule", "t.csv"],
        ["cluster", "up", "--home", "home"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_memory_without_end_is_refused(command: list[str], gib: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    done = run(*command, "--memory", gib)
    assert done.exit_code in (1, 2) and done.stdout == "" and "--memory: expected" in done.stderr, done.stderr
    assert sorted(folder.iterdir()) == before

"""The tutorial is run from its first block to its last, as a reader would, and prints what it says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from dovetail.view.page.html import BUNDLE
from tests.paths import ROOT

from .blocks import Step, blocks, follow, missing

TUTORIAL = ROOT / "docs" / "tutorial.md"
ALL = {"python", "sh", "text", "diff"}
FOR_READERS = {"console"}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    """(folder, steps) of a reader who has installed dovetail and follows the page."""
    folder = tmp_path_factory.mktemp("tutorial")
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "COLUMNS", "DOVETAIL_PLAN")}
    environment = {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1"}
    return folder, follow(TUTORIAL, folder, environment, timeout=240)


def commands(steps: list[Step]) -> list[str]:
    return [step.command.partition("\n")[0] for step in steps]


def test_every_block_of_the_tutorial_is_run_or_compared() -> None:
    found = blocks(TUTORIAL)
    assert {b.language for b in found} <= ALL | FOR_READERS
    assert [b.title for b in found if b.language == "text" and b.title] == ["for example"]
    assert [b.text for b in found if b.language in FOR_READERS] == [
        "$ pip install -c constraints.txt .        # in a checkout; torch 2.11 or newer\n"
    ]


def test_every_command_of_the_tutorial_works(followed: tuple[Path, list[Step]]) -> None:
    _, steps = followed
    last = steps[-1]
    if not (BUNDLE / "app.js").exists() and "--html" in last.command:
        assert (last.code, "make page" in last.printed) == (1, True)
        pytest.skip("all but the page, which is not built (make page)")
    assert last.code == 0, f"{last.command}\n{last.printed}"
    wanted = [b.text.partition("\n")[0] for b in blocks(TUTORIAL) if b.language in ("sh", "python") and not b.title]
    assert commands(steps) == wanted


def test_every_command_prints_what_the_tutorial_says(followed: tuple[Path, list[Step]]) -> None:
    _, steps = followed
    for step in steps:
        if step.code == 0:
            assert step.promised, f"the page does not say what this prints: {step.command}"
            assert missing(step.promised, step.printed) == [], f"{step.command}\n{step.printed}"


def test_the_changed_line_changes_no_loss(followed: tuple[Path, list[Step]]) -> None:
    _, steps = followed
    before, after = (step.printed for step in steps if "torchrun" in step.command)
    losses = re.findall(r"step \d+: loss [\d.]+", before)
    assert len(losses) == 4 and losses == re.findall(r"step \d+: loss [\d.]+", after)
    assert "dovetail" not in before and len(re.findall(r"^  (kept|tried) ", after, re.MULTILINE)) >= 2
    assert "  kept " in after and "  result " in after


def test_the_tutorial_ends_with_a_page_of_its_files(followed: tuple[Path, list[Step]]) -> None:
    folder, _ = followed
    if not (folder / "page.html").exists():
        pytest.skip("the page is not built (make page)")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "10gbe-16" in page and '"model"' in page
    assert {"job.json", "plan.json", "predicted.json"} <= {p.name for p in folder.iterdir()}

"""What CONTRIBUTING and its neighbours name is there."""

from __future__ import annotations

import re

import dovetail
from tests.paths import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_file_that_contributing_names_exists() -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]*)`", CONTRIBUTING)
    assert len(named) > 40
    made = ("out/", ".venv/")
    lost = [n for n in named if not ((ROOT / n).exists() or (ROOT / "src/dovetail" / n).exists() or n.startswith(made))]
    assert lost == []


def test_every_target_that_contributing_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make (?:-k )?(\w+)`", CONTRIBUTING))
    assert targets >= {"demo", "dev", "lint", "test", "coverage", "page", "docs", "bench", "picture"}
    assert [t for t in sorted(targets) if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


def test_the_index_answers_ten_questions_and_more() -> None:
    section = CONTRIBUTING.partition("## Where is")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| [A-Z][^|]+\? \|", section, re.MULTILINE)) >= 10


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[?(Unreleased\]: )?{re.escape(dovetail.__version__)}", text, re.MULTILINE)


def test_the_version_stands_in_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project and dovetail.__version__ not in project


def test_the_licence_statement_is_true_of_every_file() -> None:
    """Python and TypeScript carry no line of their own: LICENSE is theirs. C states it in its first line."""
    both, one = "Apache-2.0 OR GPL-2.0-only", "Apache-2.0"
    sources = [p for top in ("src", "benchmarks", "tests") for p in (ROOT / top).rglob("*.[ch]")]
    stated = {path: path.read_text(encoding="utf-8").splitlines()[0] for path in sources}
    folders = ("src/dovetail/fabric/bpf", "benchmarks/fabric_bpf")
    for path, line in stated.items():
        kernel = path.is_relative_to(ROOT / folders[0]) or path.name.endswith(".bpf.c")
        assert line == f"/* SPDX-License-Identifier: {both if kernel else one} */", path
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for stated_folder in (*folders, one, "GPL-2.0-only"):
        assert stated_folder in readme[readme.index("Licence:") :]

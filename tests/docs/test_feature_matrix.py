"""Every cell of the table of what works says how well it works and names a test that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = ROOT / "docs" / "integrations.md"
NAMED = re.compile(r"`(?P<file>test_\w+\.py)::(?P<name>test_\w+)(?:\[(?P<case>[^`]+)\])?`")
"""A test as a cell names it, a case of it in brackets."""

ONE, TWO = "one line", "two lines"


def rows(text: str) -> dict[str, dict[str, str]]:
    """Feature → column → cell, of all tables in the section."""
    section = text.partition("\n## What works\n")[2].partition("\n## ")[0]
    found: dict[str, dict[str, str]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and cells[1:] != [ONE, TWO]:
            assert len(cells) == 3 and cells[0] not in found, line
            found[cells[0]] = dict(zip((ONE, TWO), cells[1:], strict=True))
    return found


@cache
def files(name: str) -> list[Path]:
    return list((ROOT / "tests").rglob(name))


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of the functions in a file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


@cache
def sources(path: Path) -> str:
    """The text of a test file and of the modules beside it that it imports, where cases of tests have their names."""
    text = path.read_text(encoding="utf-8")
    beside = [path.parent / f"{name}.py" for name in re.findall(r"\w+", text)]
    return "\n".join([text, *(p.read_text(encoding="utf-8") for p in set(beside) if p != path and p.is_file())])


def problem(column: str, cell: str) -> str | None:
    """What is wrong with a cell, or None."""
    said, mark, tests = cell.partition("`test_")
    verdict, *why = re.findall(r"[^\s:,]+", said) or [""]
    if verdict not in ("works", "gathers", "cannot"):
        return f"expected works, gathers or cannot, got {verdict!r}"
    if verdict != "works" and not why:
        return f"expected what it {verdict}"
    if verdict == "cannot" and column == ONE and "torch's" not in why:
        return "one line may fail only where torch's DDP fails"
    if not tests:
        return "expected the name of a test"
    for test in re.findall(r"`[^`]*`|[^`\s]+", mark + tests):
        named = NAMED.fullmatch(test)
        if named is None:
            return f"{test}: expected file.py::test_name"
        homes = [path for path in files(named["file"]) if named["name"] in functions(path)]
        if len(homes) != 1:
            return f"{test}: expected one test of this name, found {len(homes)}"
        case, text = named["case"], sources(homes[0])
        if case and f'"{case}"' not in text and f"def _{case}(" not in text:
            return f"{test}: expected a case of this name"
    return None


def test_every_cell_says_how_well_it_works_and_names_a_test() -> None:
    found = rows(PAGE.read_text(encoding="utf-8"))
    wrong = {
        f"{feature}, {column}": said
        for feature, cells in found.items()
        for column, cell in cells.items()
        if (said := problem(column, cell)) is not None
    }
    assert len(found) > 40 and not wrong


GOOD = "test_features.py::test_one_line_equals_torch"


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        (ONE, f"works `{GOOD}[clipped]`", None),
        (TWO, f"gathers: `step()` waits `{GOOD}` `{GOOD}[muon]`", None),
        (TWO, "works", "name of a test"),
        (TWO, f"perhaps `{GOOD}`", "works, gathers or cannot"),
        (TWO, f"cannot `{GOOD}`", "expected what it cannot"),
        (ONE, f"cannot: not today `{GOOD}`", "only where torch's DDP fails"),
        (ONE, "works `test_features.py::test_nothing_of_the_sort`", "found 0"),
        (ONE, "works `test_nowhere.py::test_one_line_equals_torch`", "found 0"),
        (ONE, f"works `{GOOD}[no such case]`", "a case of this name"),
        (ONE, "works `test_features.py`", "file.py::test_name"),
    ],
)
def test_a_wrong_cell_is_found(column: str, cell: str, said: str | None) -> None:
    found = problem(column, cell)
    assert found is None if said is None else found is not None and said in found

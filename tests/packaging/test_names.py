"""One name stands for one thing, and rooms stay small: a stranger finds things by their names."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "src" / "dovetail"
MOST_LINES = 400
MOST_MODULES = 15

CLASSES: dict[str, str] = {}
"""Class names that may stand for two things, with the reason."""

MODULES = {
    "__main__": "Python's own name for what `python -m` runs",
    "main": "each process's entry point has this name in its own folder",
    "module": "each training technique's torch module has this name in its own folder",
    "planner": "each technique's planner has this name in its own folder",
    "policies": "each registry of policies has this name in its own folder",
    "cost": "each technique's cost model has this name in its own folder",
    "rules": "each technique's simple policies, to compare with, have this name in its own folder",
    "auto": "a technique: planned, simulated, viewed and its command",
    "burst": "a technique: simulated, viewed and its command",
    "depth": "a technique: simulated and viewed",
    "fabric": "the command, and the page's section of the same name",
    "run": "the commands that run something, and a run of the simulated cluster",
    "plan": "the noun, and the command of the same name",
    "schedule": "the view, and the command of the same name",
    "timeline": "the noun, and how it is drawn in a terminal",
}
"""Module names that may stand for two things, with the reason."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def repeated(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: sorted(places) for name, places in found.items() if len(set(places)) > 1}


def test_no_class_name_stands_for_two_things() -> None:
    found = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    several = repeated(found)
    assert {name: places for name, places in several.items() if name not in CLASSES} == {}
    assert CLASSES.keys() <= several.keys(), "an exception that nothing needs any more"


def test_no_module_name_stands_for_two_things() -> None:
    found = defaultdict(list)
    for path in modules():
        if path.name != "__init__.py":
            found[path.stem].append(str(path.parent.relative_to(PACKAGE)))
    several = repeated(found)
    assert {name: places for name, places in several.items() if name not in MODULES} == {}
    assert MODULES.keys() <= several.keys(), "an exception that nothing needs any more"


def test_no_file_is_longer_than_a_room() -> None:
    everything = [p for top in ("src", "tests", "benchmarks", "tools", "examples") for p in (ROOT / top).rglob("*.py")]
    lines = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in everything}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_no_folder_has_more_modules_than_one_can_read() -> None:
    count: dict[str, int] = defaultdict(int)
    for path in modules():
        count[str(path.parent.relative_to(PACKAGE))] += path.name != "__init__.py"
    assert {folder: n for folder, n in count.items() if n > MOST_MODULES} == {}


def test_every_room_says_what_it_is_for() -> None:
    silent = [
        path for path in modules() if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert [str(path.parent.relative_to(PACKAGE)) for path in silent] == []

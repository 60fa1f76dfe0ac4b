"""What documentation and docstrings point at exists, and private names stay in their modules."""

from __future__ import annotations

import ast
import importlib
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..paths import ROOT

SOURCE = ROOT / "src" / "dovetail"
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "web" / "README.md",
]
MODULES = sorted(SOURCE.rglob("*.py"))
HEADERS = sorted((SOURCE / "fabric" / "bpf").iterdir())
OURS = {"dovetail", "tests", "benchmarks", "tools", *(p.stem for p in (ROOT / "benchmarks").glob("*.py"))}
OTHERS = sorted(p for folder in ("tests", "benchmarks", "tools") for p in (ROOT / folder).rglob("*.py"))

YOURS = {"train.py", "script.py", "model.py", "my_model.py", "job.py", "module.py"}
"""Files that the reader writes, in examples."""
PATH = re.compile(r"(?<![\w/.<>-])((?:[\w.-]+/)*[\w-]+\.(?:py|h|c|md|tsx?|mjs))(?![\w(/.-])")
DOTTED = re.compile(r"(?<![\w./@-])(dovetail(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
ROOMS = "|".join(sorted(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()))
ROOM = re.compile(rf"`((?:{ROOMS})(?:\.[a-z_]\w*)+)(?:\([^`]*\))?`")
"""A module or a name in it, written without the package: `planning.merge.exact`."""
CALL = re.compile(r"^    ([A-Za-z_][\w.]*)\(", re.M)
"""An indented line of a docstring that begins with a call: an example."""
BACKQUOTED = re.compile(r"`([\w.]+)(?:\([^`]*\))?`")
FOREIGN = {"DDPStrategy", "ROLE", "prepare_model", "register_parameter"}
"""Names in backquotes that are not ours and that no code of ours uses."""
FILES = {"py", "tsx", "json", "toml", "db"}
"""Endings of file names, which look like attributes: `cluster.db`."""


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _prose(path: Path) -> Iterator[str]:
    """Docstrings and comments of a module."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.endswith('"""')):
                yield token.string


def _sections(page: Path) -> list[str]:
    """The page's text by headings, without blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.split(r"^#+ ", text, flags=re.M)


def _missing(text: str, *beside: Path) -> list[str]:
    """Paths in the text that exist neither below the package, the repository or the folders `beside`, nor below a
    folder of a path that the text has named before."""
    roots, missing = [SOURCE, ROOT, ROOT / "examples", *beside], []
    for path in PATH.findall(text):
        found = next((root / path for root in roots if (root / path).exists()), None)
        if found:
            roots += [folder for folder in found.parents if ROOT in folder.parents]
        elif Path(path).stem.islower() and path not in YOURS:
            missing.append(path)
    return missing


def _module(name: str) -> tuple[str, list[str]]:
    """The longest prefix of a dotted name that is a module, and the attributes that are left."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath("src", *parts[:count])
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return ".".join(parts[:count]), parts[count:]
    raise AssertionError(f"{name} begins with no module")


def _unresolved(text: str) -> list[str]:
    """Dotted names of the package in the text that do not exist. What lacks an optional package is believed."""
    missing = []
    for name in {*DOTTED.findall(text), *(f"dovetail.{name}" for name in ROOM.findall(text))}:
        module, attributes = _module(name)
        if not attributes or attributes[-1] in FILES or "ROLE" in attributes:  # ROLE stands for several modules
            continue
        try:
            found: object = importlib.import_module(module)
        except ImportError as error:
            assert error.name and not error.name.startswith("dovetail"), name
            continue
        for attribute in attributes:
            if not hasattr(found, attribute):
                missing.append(name)
                break
            found = getattr(found, attribute)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_path_in_a_page_exists(page: Path) -> None:
    assert [path for section in _sections(page) for path in _missing(section, page.parent, SOURCE / page.stem)] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_dotted_name_in_a_page_exists(page: Path) -> None:
    assert _unresolved(page.read_text(encoding="utf-8")) == []


def test_every_path_in_a_docstring_or_comment_exists() -> None:
    missing = {_name(p): found for p in [*MODULES, *OTHERS] if (found := _missing("\n".join(_prose(p)), p.parent))}
    missing |= {_name(p): found for p in HEADERS if (found := _missing(p.read_text(encoding="utf-8"), p.parent))}
    assert missing == {}


def test_every_dotted_name_in_a_docstring_or_comment_exists() -> None:
    assert {_name(p): found for p in [*MODULES, *OTHERS] if (found := _unresolved("\n".join(_prose(p))))} == {}


def test_every_name_in_backquotes_of_a_docstring_is_one_of_the_code() -> None:
    known = {part for p in SOURCE.rglob("*") for part in (p.name, p.stem)} | FOREIGN
    for path in [*MODULES, *OTHERS]:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME or (token.type == tokenize.STRING and len(token.string) < 80):
                    known.update(re.findall(r"\w+", token.string))
    stale = {
        _name(path): sorted({name for name in BACKQUOTED.findall(prose) if not {*name.split(".")} - {""} <= known})
        for path in MODULES
        if (prose := "\n".join(_prose(path)))
    }
    assert {path: names for path, names in stale.items() if names} == {}


@pytest.mark.parametrize("room", ["core", "measure", "planning", "simulate", "train", "emulate", "cluster", "view"])
def test_what_the_examples_in_docstrings_call_exists(room: str) -> None:
    for path in sorted((SOURCE / room).rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
        package = ".".join(("dovetail", *path.parent.relative_to(SOURCE).parts))
        for called in CALL.findall(text):
            module = importlib.import_module(package if path.stem == "__init__" else f"{package}.{path.stem}")
            first, _, rest = called.partition(".")
            if re.search(rf"^    {first}\b.* = ", text, re.M):
                continue  # made in the example itself
            owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
            if rest:  # of something imported here, or of a module beside this one: rules.by_name(…)
                beside = vars(module).get(first) or importlib.import_module(f"{package}.{first}")
                owners, called = [beside], rest
            assert any(hasattr(owner, called) for owner in owners), f"{path}: {called}"


def _private(path: Path) -> Iterator[str]:
    """Private names of other modules of this repository that a module uses; `_moved` is private to the package."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] in OURS):
            for alias in node.names:
                modules.add(alias.asname or alias.name)
                if alias.name.startswith("_") and alias.name not in ("_moved", "__version__"):
                    yield alias.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            if owner in modules and owner.islower() and name.startswith("_") and not name.endswith("__"):
                yield f"{owner}.{name}"


def test_no_private_name_crosses_a_module() -> None:
    found = {_name(p): names for p in [*MODULES, *OTHERS] if (names := set(_private(p)))}
    assert {path: sorted(names) for path, names in found.items() if names} == {}

"""What module docstrings of core, measure and planning tell the reader to call or to open exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import dovetail

ROOT = Path(dovetail.__file__).parent
MODULES = sorted(p for room in ("core", "measure", "planning") for p in (ROOT / room).rglob("*.py"))
_CALL = re.compile(r"^    ([A-Za-z_][\w.]*)\(", re.M)
"""An indented line of the docstring that begins with a call: an example."""
_OTHER = re.compile(r"`(?:dovetail\.)?((?:core|measure|planning|simulate|emulate|train|cluster|view|cli)(?:\.\w+)+)`")


def _name(path: Path) -> str:
    return ".".join(("dovetail", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_examples_and_other_modules_in_a_docstring_exist(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
    for called in _CALL.findall(text):
        module, first = importlib.import_module(_name(path)), called.partition(".")[0]
        if re.search(rf"^    {first}\b.* = ", text, re.M):
            continue  # made in the example itself
        owners = [module, *(v for v in vars(module).values() if isinstance(v, type))]
        if "." in called and not hasattr(module, first):  # a module beside this one: rules.by_name(…)
            owners = [importlib.import_module(f"{_name(path).rpartition('.')[0]}.{first}")]
            called = called.partition(".")[2]
        assert any(hasattr(owner, called) for owner in owners), f"{path}: {called}"
    for mentioned in _OTHER.findall(text):
        found = ROOT.joinpath(*mentioned.split("."))
        possible = (found, found.with_suffix(".py"), found.parent.with_suffix(".py"))
        assert any(p.exists() for p in possible), f"{path}: {mentioned}"

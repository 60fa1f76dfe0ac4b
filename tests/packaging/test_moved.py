"""What the documentation once named keeps working, with a warning that says what to write instead."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from dovetail import _moved

DOCUMENTED = [
    ("from dovetail.cluster.looking import Cluster", "dovetail.cluster.web.cluster_section.ClusterSource"),
    ("from dovetail.core.burst import BurstPlan", "dovetail.core.burst_plan"),
    ("from dovetail.core.store import read, write", "dovetail.core.files"),
    ("from dovetail.fabric.looking import Running", "dovetail.fabric.page_source.FabricSource"),
    ("from dovetail.planning.burst import BurstPlanner", "dovetail.planning.burst.planner.BurstPlanner"),
    ("from dovetail.planning.burst_cost import ProfileCost", "dovetail.planning.burst.cost"),
    ("from dovetail.planning.depth import plan", "dovetail.planning.depth.planner.plan"),
    ("from dovetail.planning.straggler import Stragglers", "dovetail.planning.depth.straggler"),
    ("from dovetail.simulate.channel import leave", "dovetail.emulate.channel"),
    ("from dovetail.simulate.device import emulated", "dovetail.emulate.device"),
    ("from dovetail.simulate.launch import launch, report", "dovetail.emulate.launch"),
    ("from dovetail.simulate.shaped import available", "dovetail.emulate.shaped_network"),
    ("from dovetail.train.burst_measure import measure_links", "dovetail.train.burst.measurement"),
    ("from dovetail.train.segments import cut", "dovetail.train.partial.segments"),
]
"""(the line of the documentation of 0.1, what the warning names)."""


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("line", "new"), DOCUMENTED, ids=lambda text: text)
def test_a_documented_import_still_works_and_names_the_new_one(line: str, new: str) -> None:
    done = run(line, "-W", "default::DeprecationWarning")
    assert done.returncode == 0, done.stderr
    warned = [text for text in done.stderr.splitlines() if "DeprecationWarning" in text]
    assert len(warned) == 1 and f" has moved: use {new} instead" in warned[0]


def test_the_warning_points_at_the_line_that_imports() -> None:
    done = run("\n\nfrom dovetail.core.store import read", "-W", "default::DeprecationWarning")
    assert done.stderr.startswith("<string>:3: DeprecationWarning: ")


def test_an_old_module_is_the_new_one_and_keeps_the_new_ones_name() -> None:
    code = "import dovetail.core.store as old, dovetail.core.files as new; print(old is new, old.__spec__.name)"
    assert run(code, "-W", "ignore").stdout == "True dovetail.core.files\n"


def test_every_new_name_is_there() -> None:
    for new in _moved.MODULES.values():
        assert find_spec(new), new
    for names in _moved.NAMES.values():
        for new in names.values():
            module, _, name = new.rpartition(".")
            assert hasattr(import_module(module), name), new


def test_a_name_that_nobody_documented_is_still_unknown() -> None:
    done = run("import dovetail.core.nonsense")
    assert done.returncode == 1 and "No module named 'dovetail.core.nonsense'" in done.stderr

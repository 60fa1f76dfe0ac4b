"""A wheel has all that its users need, and works with nothing but the base packages beside it."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import dovetail
from dovetail.core import files
from dovetail.view import example
from tests.paths import ROOT

from .base import build_wheel, install

EXTRAS = ("view", "fabric", "cluster", "examples", "docs", "dev")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building a wheel without a network needs hatchling (dovetail-train[dev])")
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a base installation."""
    return install(wheel, tmp_path_factory.mktemp("base") / "env")


@pytest.fixture
def run(python: Path, tmp_path: Path) -> Run:
    """Runs the installed command in a folder with a profile."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "COLUMNS")}
    environment = {**kept, "DOVETAIL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    files.write(tmp_path / "job.json", example.profile())

    def command(*words: str, program: str = "dovetail") -> subprocess.CompletedProcess[str]:
        called = [str(python.parent / program), *words]
        return subprocess.run(called, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)

    return command


def test_a_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "src"
    files = {str(p.relative_to(package)) for p in (package / "dovetail").rglob("*") if p.is_file()}
    assert names == {name for name in files if "__pycache__" not in name and not name.endswith(".pyc")}
    page = {f"dovetail/view/page/bundle/{name}" for name in ("app.js", "app.css")}
    plane = {"dovetail/fabric/bpf/frame.h", "dovetail/fabric/bpf/forward.h"}
    assert {"dovetail/py.typed", "dovetail/data/small-cluster.csv", *page, *plane} <= names
    assert any(name.endswith(".bpf.c") for name in names)


def test_a_wheel_names_itself_its_version_its_extras_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert {"Name: dovetail-train", f"Version: {dovetail.__version__}"} <= set(text.splitlines())
    assert {f"Provides-Extra: {extra}" for extra in EXTRAS} <= set(text.splitlines())
    assert len([line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]) == 5


def test_the_installed_command_plans_simulates_and_shows_the_page(run: Run, tmp_path: Path) -> None:
    for words in (
        ["--help"],
        ["plan", "job.json", "10gbe-16"],
        ["simulate", "plan.json", "-o", "predicted.json"],
        ["scale", "job.json", "--network", "10gbe-16", "--workers", "4,8"],
        ["view", "job.json", "plan.json", "predicted.json", "--html", "page.html"],
        ["schedule", "--devices", "64", "--json"],
    ):
        done = run(*words)
        assert done.returncode == 0, (words, done.stderr)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(page) > 50_000 and "10gbe-16" in page


def test_the_base_measures_a_real_model(run: Run, tmp_path: Path) -> None:
    done = run("profile", "mlp", "--batch", "4", "--batches", "4", "--steps", "1", "-o", "mlp.json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "mlp" and (tmp_path / "mlp.json").exists()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["plan", "job.json", "10gbe-16", "--png", "plan.png"], "view"),
        (["scale", "job.json", "--network", "10gbe-16", "--workers", "4", "--png", "scale.png"], "view"),
        (["cluster", "up"], "cluster"),
        (["fabric", "up", "topology.yaml"], "fabric"),
        (["demo", "--fabric"], "fabric"),
        (["profile", "hf:gpt2"], "examples"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else words,
)
def test_a_command_without_its_extra_names_it_in_one_line(words: list[str], extra: str, run: Run) -> None:
    done = run(*words)
    said = [line for line in done.stderr.splitlines() if not line.endswith("…")]  # progress
    assert done.returncode == 1 and len(said) == 1
    assert said[0].startswith("dovetail: ") and said[0].endswith(f"pip install 'dovetail-train[{extra}]'")


WALK = """
import importlib, pkgutil, dovetail
from dovetail.core.errors import MissingExtra
for module in pkgutil.walk_packages(dovetail.__path__, "dovetail.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except MissingExtra as e:
        print(module.name, "one line")
    except ImportError as e:
        print(module.name, e.name)
"""
SERVER = {
    "dovetail.cluster.web.api": "fastapi",
    "dovetail.cluster.service": "uvicorn",
    "dovetail.cluster.web.page_server": "fastapi",
}
"""What runs inside `dovetail cluster up`, which has looked for both before."""


def test_every_module_imports_with_the_base_packages_or_names_its_extra(run: Run) -> None:
    done = run("-c", WALK, program="python")
    assert done.returncode == 0, done.stderr
    missed = dict(line.rsplit(" ", 1) for line in done.stdout.replace("one line", "line").splitlines())
    plain = {name: lacks for name, lacks in missed.items() if lacks != "line"}
    assert plain.items() <= SERVER.items()
    assert all(name.startswith(("dovetail.fabric", "dovetail.cluster")) for name in missed)

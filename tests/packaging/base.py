"""An environment as `pip install dovetail-train` makes it, offline: the wheel, and its base packages by links."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built with the packages that are here."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, "-w", str(folder), str(ROOT)], capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def required(names: list[str]) -> dict[str, Distribution]:
    """These distributions and all that they require in turn, by name; what no platform of ours needs is left out."""
    found: dict[str, Distribution] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # a driver package of a GPU's torch where the CPU's is installed
        todo += [Requirement(text) for text in found[name].requires or []]
    return found


def install(wheel: Path, folder: Path) -> Path:
    """A virtual environment that has the wheel and its base packages, nothing else; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    scheme = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    pip = [sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-compile", str(wheel)], check=True, capture_output=True, timeout=120, cwd=folder)
    (installed,) = packages.glob("dovetail_train-*.dist-info")
    base = [r for r in Distribution.at(installed).requires or [] if "extra ==" not in r]
    for found in required(base).values():
        for top in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    return python

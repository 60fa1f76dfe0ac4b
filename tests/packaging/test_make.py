"""`make demo` is light, `make test` runs everything, and what a machine would get is named in the README."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools import run_tests

from tests import conftest
from tests.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
HEAVY = ("frr", "clang", "chromium", "nodejs", "npm", "ray", "lightning", "transformers", "matplotlib", "[dev]")


def needs_make() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")


def test_the_demo_installs_the_base_and_nothing_else() -> None:
    needs_make()
    call = ["make", "-n", "-B", "VENV=/nonexistent/venv", "demo"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "-e '.'" in done.stdout, done.stderr
    assert not [name for name in HEAVY if name in done.stdout]


def test_every_system_package_is_named_in_the_readme() -> None:
    packages = {name for names in re.findall(r"\|\| echo ([a-z0-9 -]+?)[;)]", MAKEFILE) for name in names.split()}
    assert {"iproute2", "python3-venv", "frr", "chromium", "clang"} <= packages
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(packages) if f"`{name}`" not in readme] == []
    assert re.findall(r"apt-get install (?!-y -qq --no-install-recommends \$\$missing)-", MAKEFILE) == []


def report(path: Path, **counts: int) -> Path:
    fields = " ".join(f'{name}="{count}"' for name, count in counts.items())
    path.write_text(f"<testsuites><testsuite {fields}></testsuite></testsuites>")
    return path


def test_a_part_is_counted_from_its_report(tmp_path: Path) -> None:
    found = report(tmp_path / "a.xml", tests=10, failures=2, errors=1, skipped=3)
    result = run_tests.counted("fabric", 61.4, 1, found)
    assert (result.passed, result.failed, result.skipped) == (4, 3, 3)
    assert result.line() == "fabric     4 passed, 3 failed, 3 skipped in 61 s"


def test_a_part_that_ends_without_a_report_has_failed(tmp_path: Path) -> None:
    assert run_tests.counted("fabric", 1.0, 134, tmp_path / "none.xml").failed == 1
    clean = report(tmp_path / "a.xml", tests=10, failures=0, errors=0, skipped=0)
    assert run_tests.counted("fabric", 1.0, 3, clean).failed == 1, "it failed outside its tests"
    assert run_tests.counted("fabric", 1.0, 0, clean).failed == 0


def test_every_part_runs_whatever_the_others_found_and_the_sum_is_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    called: list[str] = []

    def part(name: str, *arguments: str) -> run_tests.Result:
        called.append(name)
        return run_tests.Result(name, 1.0, int(name == "together"), passed=5, failed=int(name == "together"), skipped=1)

    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    monkeypatch.setattr(run_tests, "lint", lambda: run_tests.Result("lint", 1.0, 2, failed=1))
    monkeypatch.setattr(run_tests, "tests", part)
    assert run_tests.main() == 1
    assert called == ["together", *run_tests.ALONE]
    last = capsys.readouterr().out.splitlines()[-len(called) - 2 :]
    assert last[0].startswith("lint       failed") and last[1].startswith("together   5 passed, 1 failed, 1 skipped")
    assert last[-1] == "15 passed, 2 failed, 3 skipped"


def test_the_files_that_are_named_exist() -> None:
    assert [path for path in run_tests.ALONE.values() if not (ROOT / path).exists()] == []
    assert [name for name in conftest.LONGEST if not (ROOT / "tests" / name).exists()] == []

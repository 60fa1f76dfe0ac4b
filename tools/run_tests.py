"""`make test`: runs every part, whatever the others found, and ends with one line per part and the sum.

The tests run three files at a time, since many of them wait. By themselves run those that watch kernels forward packets
and those that kill processes of a cluster: neighbours would disturb them.
"""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "out" / "tests"
ALONE = {"fabric": "tests/fabric", "chaos": "tests/cluster/test_chaos.py"}


@dataclass(frozen=True)
class Result:
    part: str
    seconds: float
    exit_code: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def line(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        if self.part == "lint":
            counts = "failed" if self.exit_code else "passed"
        return f"{self.part:10} {counts} in {self.seconds:.0f} s"


def lint() -> Result:
    begin = time.monotonic()
    code = subprocess.run(["make", "--no-print-directory", "-k", "lint"], cwd=ROOT).returncode
    return Result("lint", time.monotonic() - begin, code, failed=int(code != 0))


def tests(part: str, *arguments: str) -> Result:
    """Runs pytest. A part that ends without a report, or fails outside its tests, counts as one failure."""
    report = REPORTS / f"{part}.xml"
    report.unlink(missing_ok=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT).returncode
    return counted(part, time.monotonic() - begin, code, report)


def counted(part: str, seconds: float, code: int, report: Path) -> Result:
    """The result of one pytest run, from its exit code and its JUnit report."""
    total = failed = skipped = 0
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
            total += count["tests"]
            failed += count["failures"] + count["errors"]
            skipped += count["skipped"]
    passed = max(total - failed - skipped, 0)
    return Result(part, seconds, code, passed, failed or int(code != 0), skipped)


def main() -> int:
    REPORTS.mkdir(parents=True, exist_ok=True)
    together = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    results = [lint(), tests("together", *together, *(f"--ignore={path}" for path in ALONE.values()))]
    results += [tests(part, path) for part, path in ALONE.items()]
    print()
    for result in results:
        print(result.line())
    passed, failed, skipped = (sum(getattr(r, name) for r in results) for name in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(any(r.exit_code for r in results))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""`make torch-tests`: every DDP test of torch's with every contestant, compared with `expected.json`.

    python -m tests.torch_suite.runner [--write] [--contestant plain] [test …]

Ends with 1 where an outcome is not the expected one. `--write` stores the outcomes that were seen and makes
docs/torch-tests.md anew; review what it changes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.paths import ROOT

from .page import CONTESTANTS, Outcomes, page

EXPECTED = Path(__file__).parent / "expected.json"
PAGE = ROOT / "docs" / "torch-tests.md"
LOGS = ROOT / "out" / "torch-tests"
EVERYBODY = (*CONTESTANTS, "second line")
LONGEST = 3600.0
"""Seconds after which one contestant's run is given up."""


def run(contestant: str, names: Sequence[str] = (), *, timeout: float = LONGEST) -> Iterator[dict[str, Any]]:
    """Name, outcome, reason and seconds of these tests, or of all, as they come."""
    folder = LOGS / contestant.replace(" ", "-")
    command = [sys.executable, "-m", "tests.torch_suite.ranks", contestant, str(folder)]
    process = subprocess.Popen(
        ["timeout", "--kill-after", "10", str(timeout), *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        json.dump(list(names), process.stdin)
        process.stdin.close()
        for line in process.stdout:
            found: dict[str, Any] = json.loads(line)
            yield found | {"reason": told(found["reason"])}
    if process.returncode:
        raise RuntimeError(f"torch's tests with {contestant}: the process ended with {process.returncode}")


def told(reason: str) -> str:
    """One line without what differs from run to run."""
    reason = re.sub(r"0x[0-9a-f]+|\b\d+\.\d+ seconds|pid: \d+|(?<=\s)/\S+/", "…", " ".join(reason.split()))
    return reason if len(reason) <= 160 else reason[:159] + "…"


def stored() -> tuple[str, Outcomes]:
    """(torch's version, the expected outcomes)."""
    if not EXPECTED.exists():
        return "", {}
    found = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found["torch"], found["tests"]


def store(tests: Outcomes, torch_version: str) -> None:
    ordered = {name: {c: tests[name][c] for c in CONTESTANTS if c in tests[name]} for name in sorted(tests)}
    text = json.dumps({"torch": torch_version, "tests": ordered}, indent=1, ensure_ascii=False)
    EXPECTED.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(page(ordered, torch_version), encoding="utf-8")


def broken(tests: Outcomes) -> list[str]:
    """The tests that torch's class passes and dovetail's does not."""
    outcome = {(name, c): of.get(c, {}).get("outcome") for name, of in tests.items() for c in CONTESTANTS}
    return [name for name in tests if outcome[name, "torch"] == "passes" != outcome[name, "plain"]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", help="names of tests; all that construct a DDP if none is given")
    parser.add_argument("--contestant", choices=EVERYBODY, action="append", help="those whose outcomes are stored")
    parser.add_argument("--write", action="store_true", help="store the outcomes as the expected ones")
    given = parser.parse_args(arguments)
    known = stored()[1]
    seen: dict[str, dict[str, dict[str, str]]] = {}
    differing = []
    for contestant in given.contestant or CONTESTANTS:
        for found in run(contestant, given.tests):
            name, outcome, reason = found["test"], found["outcome"], found["reason"]
            print(f"{contestant:12} {outcome:12} {found['seconds']:5.1f} s  {name}  {reason}", flush=True)
            seen.setdefault(name, {})[contestant] = {"outcome": outcome, "reason": reason}
            before = known.get(name, {}).get(contestant, {}).get("outcome", "nothing")
            if before != outcome:
                differing.append(f"{contestant}: {name}: expected {before}, {outcome}: {reason}")
    if given.write:
        store({name: {**known.get(name, {}), **seen.get(name, {})} for name in {**known, **seen}}, version("torch"))
        return 0
    print("\n".join(differing) or f"{sum(map(len, seen.values()))} outcomes, all as expected")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

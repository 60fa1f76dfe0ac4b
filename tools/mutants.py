"""`make mutants`: takes away, one at a time, what keeps training right on an accelerator, and counts who is caught.

Every mutation (`mutations.py`) is applied to a copy of the sources. The ways to train that it concerns then run on the
emulated accelerator as `tests/train/test_accelerator.py` runs them: on the second device, with two backends and kernels
of any length, in a stream beside the default one or on a device that is not the current one. A mutant is caught if the
race detector, the process group or a time-out ends it, if its losses differ from those of the unchanged code, or if a
host waits where none did.
Run: python -m tools.mutants [WORD …]   (only mutations with one of these words in their names)
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
MOST_SURVIVORS = 1
PATIENCE = 180.0
"""Seconds after which a mutant counts as one that does not end."""
TRAINING = """
import json, sys
from tests.train.accelerator_scenarios import trains
from tests.ranks import run_all
way, where = sys.argv[1:]
given = dict(way=way, where=where, jitter=3e-4)
found = run_all([(trains, given)], device="emu:1", backend="cpu:gloo,emu:eccl")
print("RESULT " + json.dumps(found))
"""

Results = list[dict[str, Any]]
"""What each rank came to."""


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    expected: dict[tuple[str, bool], Results] = {}
    survivors = []
    for number, mutation in enumerate(chosen, 1):
        for way in mutation.ways:
            if (way, mutation.beside) not in expected:
                found, said = trained(way, mutation.beside, ROOT)
                assert found is not None, f"{way} without a mutation: {said}"
                expected[way, mutation.beside] = found
        with tempfile.TemporaryDirectory(prefix="dovetail-mutant-") as folder:
            why = caught(mutation, expected, mutated(mutation, Path(folder)))
        if not why:
            survivors.append(mutation.name)
        print(f"{number:3} {'caught  ' if why else 'SURVIVES'}  {mutation.name}: {why}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are caught")
    return int(len(survivors) > MOST_SURVIVORS)


def mutated(mutation: Mutation, folder: Path) -> Path:
    """A copy of the project with the mutation."""
    for part in ("src", "tests", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.before) == 1, f"{mutation.name}: {mutation.file} has changed"
    file.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    return folder


def caught(mutation: Mutation, expected: dict[tuple[str, bool], Results], project: Path) -> str:
    """What gave the mutant away; nothing if it survives."""
    for way in mutation.ways:
        found, said = trained(way, mutation.beside, project)
        if found is None:
            return f"{way}: {said}"
        for result, wanted in zip(found, expected[way, mutation.beside], strict=True):
            if result["losses"] != wanted["losses"]:
                return f"{way}: other losses"
            if result["waits"] != wanted["waits"]:
                return f"{way}: the host waits: {result['waits']}"
    for test in mutation.tests:
        code, said = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test], project)
        if code:
            return f"{test}: {told(said)}"
    return ""


def trained(way: str, beside: bool, project: Path) -> tuple[Results | None, str]:
    """What the ranks came to, or None and the line that says why they did not."""
    code, said = run(["-c", TRAINING, way, "side" if beside else ""], project)
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    if code or not lines:
        return None, told(said)
    return [rank[0] for rank in json.loads(lines[0].removeprefix("RESULT "))], ""


def run(arguments: list[str], project: Path) -> tuple[int, str]:
    """(exit code, all that was said) of a Python process in the project's copy; its children end with it."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": f"{project / 'src'}{os.pathsep}{project}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return 1, f"it did not end within {PATIENCE:.0f} s"
    return process.returncode, said


def told(said: str) -> str:
    """The telling line of what a process said: a race, or the last error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "nothing orders" in line or "record_stream" in line]
    errors = [line for line in lines if "Error" in line or "did not end" in line]
    return next(iter([*telling, *reversed(errors), *reversed(lines)]), "no word")[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs torch's DDP tests for one contestant: `python -m tests.torch_suite.ranks CONTESTANT FOLDER < names`.

Writes one JSON object per test to stdout, and what its ranks print to FOLDER. Ranks are forked from this process, which
has imported everything and computed nothing: spawning them anew, as torch does, takes three seconds more per test.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANKS = 2
SETTINGS = {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(RANKS),
    "GLOO_SOCKET_IFNAME": "lo",
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
    "TORCH_SHOW_CPP_STACKTRACES": "0",
}

HANGING = {"test_ddp_uneven_inputs": "not run: with the CPU in the place of devices it hangs with torch's class too"}


def ddp_tests(module: Any) -> list[str]:
    """The tests of torch's file that construct a DistributedDataParallel, themselves or in a method that they call."""
    tree = ast.parse(inspect.getsource(module.DistributedTest))
    methods = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    names = {name: {n.attr for n in ast.walk(f) if isinstance(n, ast.Attribute)} for name, f in methods.items()}
    plain = {name: {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} for name, f in methods.items()}
    found = {name for name in methods if "DistributedDataParallel" in names[name] | plain[name]}
    while more := {name for name in methods if name not in found and names[name] & found}:
        found |= more
    return sorted(name for name in found if name.startswith("test_"))


def test_case(module: Any) -> type[unittest.TestCase]:
    """torch's tests as a class whose ranks are forked and have the CPU for a device."""
    import torch

    from .host_device import OnHost

    class ForkedRanks(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            with OnHost():
                super()._run(*args, **kwargs)

    return ForkedRanks


@contextlib.contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Everything that this process and its ranks print meanwhile goes into this file."""
    kept = os.dup(1), os.dup(2)
    with path.open("w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, old in enumerate(kept, 1):
                os.dup2(old, number)
                os.close(old)


def outcome(result: unittest.TestResult) -> tuple[str, str]:
    """("passes", "skipped", "refused" or "fails", the reason) of one test."""
    if result.skipped:
        return "skipped", result.skipped[0][1]
    for _, text in [*result.errors, *result.failures]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("dovetail.core.errors.Error: ")]
        if ours:
            return "refused", ours[0].removeprefix("dovetail.core.errors.Error: ")
        # The ranks' own exceptions stand below a line "… Process 0 exited with error code …".
        told = [line for line in lines if _is_exception(line) and "exited with error code" not in line]
        return "fails", (told or lines)[0]
    return "passes", ""


def _is_exception(line: str) -> bool:
    name, colon, _ = line.partition(": ")
    return bool(colon) and name.replace(".", "").replace("_", "").isalnum() and name.endswith(("Error", "Exception"))


def main(contestant: str, folder: str) -> None:
    names: list[str] = json.load(sys.stdin)
    os.environ.update(SETTINGS)
    import torch

    from . import contestants, host_device

    torch.set_num_threads(1)
    host_device.stand_in(RANKS)
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    contestants.put_in_place(contestant)
    case = test_case(distributed_test)
    logs = Path(folder)
    logs.mkdir(parents=True, exist_ok=True)
    case.setUpClass()
    common_distributed.TIMEOUT_OVERRIDE.clear()
    for name in names or ddp_tests(distributed_test):
        if name in HANGING:
            print(json.dumps({"test": name, "outcome": "skipped", "reason": HANGING[name], "seconds": 0}), flush=True)
            continue
        result = unittest.TestResult()
        log = logs / f"{name}.log"
        begin = time.monotonic()
        contestants.QuickDDP.haste = None if name in contestants.PATIENT else contestants.QUICK
        with written_to(log):
            case(name).run(result)
            for _, text in [*result.errors, *result.failures]:
                print(text)
        kind, reason = outcome(result)
        text = log.read_text(encoding="utf-8", errors="replace")
        if kind == "passes" and contestant == "second line" and contestants.SHARED not in text:
            kind, reason = "no optimiser", "the test steps no optimiser of a wrapped model"
        seconds = round(time.monotonic() - begin, 1)
        print(json.dumps({"test": name, "outcome": kind, "reason": reason, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

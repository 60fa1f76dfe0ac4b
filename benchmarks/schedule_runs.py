"""Runs of benchmarks/schedule.py in processes of their own: timed simulations of published traces, and the example."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from dovetail.planning.sharing.pack import ClusterSize
from dovetail.simulate.cluster import report, simulate
from dovetail.simulate.cluster.study import contenders
from dovetail.simulate.traces import read_trace

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "traces"
T = TypeVar("T")
R = TypeVar("R")


def on_all_cores(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Runs a function on all items, on all cores; for runs that are not timed."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(pool.map(function, items))


def invariants() -> tuple[str, bool]:
    """The property tests of the task level, as they are run by `make test`."""
    tests = ["tests/simulate/cluster/test_tasks.py", "-k", "invariants"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    lines = run.stdout.strip().splitlines()
    return (lines[-1] if lines else "did not run"), run.returncode == 0


def example(arguments: str) -> list[str]:
    """What the command prints in 80 columns, as a block for docs/."""
    command = [sys.executable, "-m", "dovetail", *arguments.split()]
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=env)
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    return ["```", f"$ dovetail {arguments}", *lines, "```"]


def full_scale(name: str, devices: int, who: str) -> dict[str, Any]:
    """One published trace in a process of its own: seconds of reading and simulating, and its peak memory."""
    command = [sys.executable, str(Path(__file__).resolve()), name, str(devices), who]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def full_scale_of(item: tuple[str, int, str]) -> dict[str, Any]:
    return full_scale(*item)


def one(name: str, devices: int, who: str) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[os.getpid() % len(os.sched_getaffinity(0))]})  # one core
    began, cpu = time.perf_counter(), time.process_time()
    trace = read_trace(DATA / name)
    read = time.perf_counter() - began
    (c,) = contenders(who)
    r = report(simulate([j.with_depths(c.depths) for j in trace.jobs], ClusterSize(devices=devices), c.policy))
    found = {
        "trace": name,
        "devices": devices,
        "policy": c.name,
        "jobs": r.jobs,
        "seconds": time.perf_counter() - began,
        "read": read,
        "cpu": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "report": r.to_json(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    one(sys.argv[1], int(sys.argv[2]), sys.argv[3])

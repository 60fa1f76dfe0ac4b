"""`dovetail train`: starts torchrun for an unchanged DistributedDataParallel script, and ends it with all its ranks.

torchrun starts `python -m dovetail.train.run` once per rank (see `__main__`), and that runs the script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error, InputError
from dovetail.core.files import read
from dovetail.core.plan import Plan
from dovetail.core.processes import dying_with_us
from dovetail.core.scratch import scratch
from dovetail.train.integrations import check_environment

POLICIES = ("guard", "ladder", "balanced")
_RUN = "DOVETAIL_RUN"  # names one run of `train` in the environment of all its processes


def train(
    script: str | Path,
    *,
    workers: int,
    plan: str | Path | None = None,
    spb: str | None = None,
    epsilon: float | None = None,
    steps: int | None = None,
    args: Sequence[str] = (),
) -> int:
    """Trains with `workers` ranks on this machine and returns the exit code: torchrun's, or 128 + signal.

    The inputs are checked before anything starts. torchrun then runs the script once per rank, with the caller's own
    standard output and error. SIGINT, SIGTERM and SIGHUP are passed on once, so that torchrun ends its ranks in order;
    a second one ends everything at once. If this process itself is killed, the kernel sends torchrun SIGTERM.

    With `spb` ("guard", "ladder" or "balanced") the script runs under partial backpropagation; `plan` is then a depth
    plan, `epsilon` the guard's bound and `steps` the length of the training, for a plan with phases.
    """
    given = PartialOptions(policy=spb, plan=plan, epsilon=epsilon, steps=steps) if spb else None
    check_inputs(script, plan, given)
    if given is None and (epsilon is not None or steps is not None):
        raise Error("epsilon, steps: expected together with spb, which they belong to")
    if workers < 1:
        raise Error(f"workers: expected at least 1, got {workers}")
    stack = contextlib.ExitStack()
    logs = stack.enter_context(scratch("train"))  # torchrun would leave a folder of its own behind
    command = [sys.executable, "-m", "dovetail.train.run.agent", "--standalone"]
    command += [f"--nproc-per-node={workers}", f"--log-dir={logs}"]
    options = {"--plan": plan, "--spb": spb, "--epsilon": epsilon, "--steps": steps}
    given_options = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    command += ["-m", "dovetail.train.run", *given_options, str(script), *args]
    run = uuid.uuid4().hex
    defaults = {
        "OMP_NUM_THREADS": "1",
        # Ranks that share torchrun's own store find stale keys in it after a restart, and gloo fails.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    torchrun = subprocess.Popen(
        dying_with_us(command, signal.SIGTERM),
        env={**defaults, **os.environ, _RUN: run},
        start_new_session=True,  # so that Ctrl-C in a terminal reaches it only through us, once
    )
    received: list[int] = []
    try:
        with _forwarding(torchrun, received):
            code = torchrun.wait()
    finally:
        if torchrun.poll() is None:
            torchrun.kill()
            torchrun.wait()
        stack.close()
        if torchrun.returncode < 0 or received:
            _kill_all(run)
    if received:
        return 128 + received[0]
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class PartialOptions:
    """How to run a script under partial backpropagation."""

    policy: str
    plan: str | Path | None = None
    epsilon: float | None = None
    steps: int | None = None

    def depths(self) -> DepthPlan | None:
        """The stored plan, if one is given. Raises an Error for options that do not fit together."""
        if self.policy not in POLICIES:
            raise Error(f"spb: expected {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, got {self.policy!r}")
        if self.epsilon is not None and (self.policy != "guard" or not 0 <= self.epsilon < 1):
            raise Error("epsilon: expected with spb guard, at least 0 and below 1")
        if self.plan is not None:
            return read(self.plan, DepthPlan)
        if self.policy == "balanced":
            raise Error("spb balanced: expected --plan with local batches, from `dovetail plan … --spb balanced`")
        return None


def check_inputs(script: str | Path, plan: str | Path | None, partial: PartialOptions | None = None) -> None:
    """Raises an Error for a script, plan or environment with which training cannot start."""
    if not Path(script).is_file():
        raise InputError(script, "", "expected a Python script, found no such file")
    if partial is not None:
        partial.depths()
    elif plan is not None:
        read(plan, Plan)
    check_environment()


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes], received: list[int]) -> Iterator[None]:
    """Passes the first signal on to `process`, which then ends its own children; a second one kills it."""

    def forward(signum: int, _frame: object) -> None:
        received.append(signum)
        if len(received) == 1:
            process.send_signal(signum)
        else:
            process.kill()

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals
        return
    wanted = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, forward) for s in wanted}  # ignored signals (nohup) stay ignored
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _kill_all(run: str) -> None:
    """Kills the processes that torchrun left when it was ended early: those whose environment names our run."""
    mark = f"{_RUN}={run}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)

"""Runs an unchanged DistributedDataParallel script, planned.

`python -m dovetail.train.run [--plan plan.json] [--spb POLICY] SCRIPT [args…]` is for use under torchrun, which `train`
starts. Inside this runner, and only there, whoever constructs torch's DistributedDataParallel gets dovetail's; with
--spb, partial backpropagation (see `adopt`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error, InputError
from dovetail.core.files import read
from dovetail.core.plan import Plan
from dovetail.core.scratch import scratch
from dovetail.train.integrations import check_environment

# A process runs this first and then becomes `python *argv[2:]`: from now on the kernel sends it SIGTERM when the parent
# that argv[1] names is gone (1 is PR_SET_PDEATHSIG). Without effect where there is no prctl, outside Linux.
_DYING_WITH_PARENT = """
import ctypes, os, signal, sys
getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
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

    The inputs are checked before anything starts. torchrun then runs this module once per rank, with the caller's own
    standard output and error. SIGINT, SIGTERM and SIGHUP are passed on once, so that torchrun ends its ranks in order;
    a second one ends everything at once. If this process itself is killed, the kernel tells torchrun.

    With `spb` ("guard", "ladder" or "balanced") the script runs under partial backpropagation; `plan` is then a depth
    plan, `epsilon` the guard's bound and `steps` the length of the training, for a plan with phases.
    """
    given = Partial(policy=spb, plan=plan, epsilon=epsilon, steps=steps) if spb else None
    _check(script, plan, given)
    if given is None and (epsilon is not None or steps is not None):
        raise Error("epsilon, steps: expected together with spb, which they belong to")
    if workers < 1:
        raise Error(f"workers: expected at least 1, got {workers}")
    stack = contextlib.ExitStack()
    logs = stack.enter_context(scratch("train"))  # torchrun leaves its own behind
    command = [sys.executable, "-c", _DYING_WITH_PARENT, str(os.getpid())]
    command += ["-m", "dovetail.train.run.agent", "--standalone", f"--nproc-per-node={workers}", f"--log-dir={logs}"]
    options = {"--plan": plan, "--spb": spb, "--epsilon": epsilon, "--steps": steps}
    told = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    command += ["-m", "dovetail.train.run", *told, str(script), *args]
    run = uuid.uuid4().hex
    defaults = {
        "OMP_NUM_THREADS": "1",
        # Ranks that rendezvous through torchrun's own store meet stale keys after a restart and fail with gloo.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    torchrun = subprocess.Popen(
        command,
        env={**defaults, **os.environ, _RUN: run},
        start_new_session=True,  # Ctrl-C in a terminal reaches it through us only, once
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


def adopt() -> None:
    """From now on, constructing torch's DistributedDataParallel makes dovetail's.

    The class itself stays where it is and only learns to make its subclass. So code that imported it earlier is served
    too, and every `isinstance(model, DistributedDataParallel)`, torch's own included, is as true as before; swapping
    the name in torch's modules would break torch's own bookkeeping for torch.compile and uneven inputs. Subclasses that
    others derived from it are left alone, and so is an object that is being unpickled (it has no arguments).
    """
    from torch.nn.parallel import DistributedDataParallel as Torchs

    from dovetail.train.data_parallel.module import DistributedDataParallel as Planned

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return object.__new__(Planned if cls is Torchs and (args or kwargs) else cls)

    Torchs.__new__ = staticmethod(new)  # type: ignore[method-assign]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dovetail.train.run",
        description="Runs a DistributedDataParallel script under torchrun, planned.",
    )
    parser.add_argument("--plan", metavar="plan.json", help="follow this plan instead of measuring and choosing one")
    parser.add_argument("--spb", metavar="POLICY", help="partial backpropagation: guard, ladder or balanced")
    parser.add_argument("--epsilon", type=float, help="with --spb: progress per step that the guard may give away")
    parser.add_argument("--steps", type=int, help="with --spb: length of the training, for a plan with phases")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on to the script")
    given = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Without torchrun a rank would only hang: the kernel ends it when torchrun dies.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    partial = Partial(given.spb, given.plan, given.epsilon, given.steps) if given.spb else None
    try:
        _check(given.script, given.plan, partial)
    except Error as e:
        print(f"dovetail: {e}", file=sys.stderr)
        sys.exit(2)
    if partial is not None:
        from .adopt import adopt_partial

        adopt_partial(partial)
    else:
        if given.plan:
            os.environ["DOVETAIL_PLAN"] = str(Path(given.plan).resolve())
        adopt()
    _run(given.script, given.args)


@dataclass(frozen=True)
class Partial:
    """How to run a script under partial backpropagation."""

    policy: str
    plan: str | Path | None = None
    epsilon: float | None = None
    steps: int | None = None

    def depths(self) -> DepthPlan | None:
        """The stored plan, if there is one. Raises for what cannot work."""
        if self.policy not in POLICIES:
            raise Error(f"spb: expected {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, got {self.policy!r}")
        if self.epsilon is not None and (self.policy != "guard" or not 0 <= self.epsilon < 1):
            raise Error("epsilon: expected with spb guard, at least 0 and below 1")
        if self.plan is not None:
            return read(self.plan, DepthPlan)
        if self.policy == "balanced":
            raise Error("spb balanced: expected --plan with local batches, from `dovetail plan … --spb balanced`")
        return None


def _check(script: str | Path, plan: str | Path | None, partial: Partial | None = None) -> None:
    if not Path(script).is_file():
        raise InputError(script, "", "expected a Python script, found no such file")
    if partial is not None:
        partial.depths()
    elif plan is not None:
        read(plan, Plan)
    check_environment()


def _run(script: str, args: Sequence[str]) -> None:
    """The script as `python SCRIPT args…` would run it: its own arguments, its own folder first on the path."""
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)

    def without_us(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    sys.excepthook = without_us
    runpy.run_path(script, run_name="__main__")


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
        yield  # only the main thread may handle signals; its own handling applies
        return
    wanted = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, forward) for s in wanted}  # what is ignored (nohup) stays ignored
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _kill_all(run: str) -> None:
    """Ends what torchrun left when it was ended early: the processes that carry our run's name."""
    mark = f"{_RUN}={run}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)

"""Runs an unchanged DistributedDataParallel script, planned.

`python -m dovetail.train.run [--plan plan.json] SCRIPT [args…]` is for use under torchrun, which `train` starts.
Inside this runner, and only there, whoever constructs torch's DistributedDataParallel gets dovetail's.
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
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.core.errors import Error, InputError
from dovetail.core.plan import Plan
from dovetail.core.store import read
from dovetail.train.integrations import check_environment

# A process runs this first and then becomes `python *argv[2:]`: from now on the kernel sends it SIGTERM when the parent
# that argv[1] names is gone (1 is PR_SET_PDEATHSIG). Without effect where there is no prctl, outside Linux.
_DYING_WITH_PARENT = """
import ctypes, os, signal, sys
getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_RUN = "DOVETAIL_RUN"  # names one run of `train` in the environment of all its processes


def train(script: str | Path, *, workers: int, plan: str | Path | None = None, args: Sequence[str] = ()) -> int:
    """Trains with `workers` ranks on this machine and returns the exit code: torchrun's, or 128 + signal.

    The inputs are checked before anything starts. torchrun then runs this module once per rank, with the caller's own
    standard output and error. SIGINT, SIGTERM and SIGHUP are passed on once, so that torchrun ends its ranks in order;
    a second one ends everything at once. If this process itself is killed, the kernel tells torchrun.
    """
    _check(script, plan)
    if workers < 1:
        raise Error(f"workers: expected at least 1, got {workers}")
    logs = tempfile.TemporaryDirectory(prefix="dovetail-train-")  # torchrun leaves its own behind
    command = [sys.executable, "-c", _DYING_WITH_PARENT, str(os.getpid())]
    command += ["-m", "dovetail.train.agent", "--standalone", f"--nproc-per-node={workers}", f"--log-dir={logs.name}"]
    command += ["-m", "dovetail.train.run", *(["--plan", str(plan)] if plan else []), str(script), *args]
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
        logs.cleanup()
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

    from dovetail.train.ddp import DistributedDataParallel as Planned

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return object.__new__(Planned if cls is Torchs and (args or kwargs) else cls)

    Torchs.__new__ = staticmethod(new)  # type: ignore[method-assign]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dovetail.train.run",
        description="Runs a DistributedDataParallel script under torchrun, planned.",
    )
    parser.add_argument("--plan", metavar="plan.json", help="follow this plan instead of measuring and choosing one")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on to the script")
    given = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Without torchrun a rank would only hang: the kernel ends it when torchrun dies.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    try:
        _check(given.script, given.plan)
    except Error as e:
        print(f"dovetail: {e}", file=sys.stderr)
        sys.exit(2)
    if given.plan:
        os.environ["DOVETAIL_PLAN"] = str(Path(given.plan).resolve())
    adopt()
    _run(given.script, given.args)


def _check(script: str | Path, plan: str | Path | None) -> None:
    if not Path(script).is_file():
        raise InputError(script, "", "expected a Python script, found no such file")
    if plan is not None:
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


if __name__ == "__main__":
    main()

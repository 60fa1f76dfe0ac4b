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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error, InputError
from dovetail.core.files import read
from dovetail.core.plan import Plan
from dovetail.core.processes import dying_with_us
from dovetail.core.scratch import scratch
from dovetail.train.integrations import check_environment

from . import closing_line
from .rendezvous import Rendezvous

POLICIES = ("guard", "ladder", "balanced")
_RUN = "DOVETAIL_RUN"  # names one run of `train` in the environment of all its processes


def _to_stderr(line: str) -> None:
    print(f"dovetail: {line}", file=sys.stderr, flush=True)


def train(
    script: str | Path,
    *,
    workers: int | None = None,
    module: bool = False,
    rendezvous: Rendezvous | None = None,
    spawns: bool = False,
    plan: str | Path | None = None,
    spb: str | None = None,
    epsilon: float | None = None,
    steps: int | None = None,
    args: Sequence[str] = (),
    tell: Callable[[str], None] = _to_stderr,
) -> int:
    """Trains with `workers` ranks (2) on this machine and returns the exit code: torchrun's, or 128 + signal.

    The inputs are checked before anything starts. torchrun then runs the script once per rank, with the caller's own
    standard output and error. SIGINT, SIGTERM and SIGHUP are passed on once, so that torchrun ends its ranks in order;
    a second one ends everything at once. If this process itself is killed, the kernel sends torchrun SIGTERM. At the
    end `tell` is given one line on what was kept, on the machine with rank 0, however the training ended.

    With `module`, `script` is the name of a module, as for `python -m`. `rendezvous` is for several machines, each with
    a launcher of its own. With `spawns` the script starts its ranks itself (torch.multiprocessing.spawn, say): it runs
    once and without torchrun.

    With `spb` ("guard", "ladder" or "balanced") the script runs under partial backpropagation; `plan` is then a depth
    plan, `epsilon` the guard's bound and `steps` the length of the training, for a plan with phases.
    """
    given = PartialOptions(policy=spb, plan=plan, epsilon=epsilon, steps=steps) if spb else None
    check_inputs(script, plan, given, module=module)
    if given is None and (epsilon is not None or steps is not None):
        raise Error("epsilon, steps: expected together with spb, which they belong to")
    if spawns and (workers is not None or rendezvous is not None or spb is not None):
        raise Error("spawns: the script starts its ranks itself; expected no workers, no nnodes and no spb")
    if workers is not None and workers < 1:
        raise Error(f"workers: expected at least 1, got {workers}")
    options = {"--plan": plan, "--spb": spb, "--epsilon": epsilon, "--steps": steps}
    rank = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    rank = ["-m", "dovetail.train.run", *rank, *(["-m"] if module else []), str(script), *args]
    where = ["--standalone"] if rendezvous is None else rendezvous.arguments()
    with scratch("train") as folder:
        torchrun = ["-m", "dovetail.train.run.agent", *where, f"--nproc-per-node={workers or 2}"]
        torchrun += [f"--log-dir={folder}"]  # torchrun would leave a folder of its own behind
        line = folder / "closing-line"
        try:
            return _run([sys.executable, *([] if spawns else torchrun), *rank], line, together=spawns)
        finally:
            if line.is_file():
                tell(line.read_text(encoding="utf-8"))


def _run(command: list[str], line: Path, *, together: bool) -> int:
    """Runs the command to its end and returns its exit code; `together`: signals go to all its processes at once."""
    run = uuid.uuid4().hex
    defaults = {
        "OMP_NUM_THREADS": "1",
        # Ranks that share torchrun's own store find stale keys in it after a restart, and gloo fails.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    process = subprocess.Popen(
        dying_with_us(command, signal.SIGTERM),
        env={**({} if together else defaults), **os.environ, _RUN: run, closing_line.FILE: str(line)},
        start_new_session=True,  # so that Ctrl-C in a terminal reaches it only through us, once
    )
    received: list[int] = []
    try:
        with _forwarding(process, received, together=together):
            code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.returncode < 0 or received:
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


def check_inputs(
    script: str | Path, plan: str | Path | None, partial: PartialOptions | None = None, *, module: bool = False
) -> None:
    """Raises an Error for a script, plan or environment with which training cannot start."""
    if module:
        # Python imports a package to find what is inside it; that is for the ranks to do.
        top, path = str(script).partition(".")[0], [str(Path.cwd()), *sys.path]
        if top not in sys.builtin_module_names and PathFinder.find_spec(top, path) is None:
            raise Error(f"{script}: expected a module, found none in the current folder or on Python's path")
    elif not Path(script).is_file():
        raise InputError(script, "", "expected a Python script, found no such file")
    if partial is not None:
        partial.depths()
    elif plan is not None:
        read(plan, Plan)
    check_environment()


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes], received: list[int], *, together: bool) -> Iterator[None]:
    """Passes the first signal on to `process`, which then ends its own children; a second one kills it.

    `together` passes it on to the children as well, as a terminal does.
    """

    def forward(signum: int, _frame: object) -> None:
        received.append(signum)
        if len(received) == 1 and together:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        elif len(received) == 1:
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

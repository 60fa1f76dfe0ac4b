"""Loading a granted job into an executor, and letting go of it again.

Everything here runs the job's own code, so it happens in the main thread, between tasks: a model that is being made
draws from the same random numbers as a task that runs.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .messages import Done, Grant, Task, Welcome

if TYPE_CHECKING:
    from .channel import Channel
    from .task import Runner


class Runs(Protocol):
    """A job that is loaded."""

    def run(self, task: Task) -> Done | None:
        """Runs it; None where nobody wants the result any more."""
        ...

    def close(self) -> None:
        """Gives its memory back."""
        ...


Opener = Callable[[Grant, Welcome, bool, str], Runs]
"""(grant, welcome, emulated, this machine's address as the aggregator sees it)."""


class Loaded:
    """A job's runner, with the tensor channel where the aggregator is on another machine."""

    def __init__(self, runner: Runner, channel: Channel | None, module: str) -> None:
        self._runner: Runner | None = runner
        self._channel, self._module = channel, module

    def run(self, task: Task) -> Done | None:
        from .task import Stale

        assert self._runner is not None, "closed"
        try:
            return self._runner.run(task)
        except Stale:
            return None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._runner = self._channel = None
        sys.modules.pop(self._module, None)
        give_back()


def open_job(grant: Grant, welcome: Welcome, emulated: bool, local: str) -> Loaded:
    """Runs the job file, makes the model and binds it to the job's tensors."""
    from . import channel, jobs, starting, task

    folder = Path(grant.folder)
    before = set(sys.modules)
    job = jobs.load(folder / "job.py", starting.submission(folder))
    module = next((name for name in sys.modules.keys() - before if name.startswith("dovetail_job_")), "")
    # A machine that shares no memory with the job's.
    through = None if welcome.memory else channel.join(welcome.store, welcome.channel, local=local)
    try:
        runner = task.open_runner(job, welcome.memory, emulated=emulated, header=welcome.header, channel=through)
    except BaseException:
        if through is not None:
            through.close()
        raise
    return Loaded(runner, through, module)


def give_back() -> None:
    """Frees what nobody refers to, and tells the system so. What was there before the first job is not looked at."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

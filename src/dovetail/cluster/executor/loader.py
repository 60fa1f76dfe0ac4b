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

from dovetail.cluster.transport.messages import Done, Grant, Task, Welcome

if TYPE_CHECKING:
    from dovetail.cluster.job.tensor_channel import Channel

    from .task import Runner


class Runs(Protocol):
    """A job that is loaded."""

    def claim(self, task: Task) -> bool:
        """Whether it is ours, of all that share the job's memory. `forget` lets go of all smaller numbers."""
        ...

    def forget(self, number: int) -> None: ...

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

    def __init__(self, runner: Runner, channel: Channel | None, file: Path) -> None:
        self._runner: Runner | None = runner
        self._channel, self._file = channel, file
        self._settings = (*_settings()[:-1], 1)

    def claim(self, task: Task) -> bool:
        assert self._runner is not None, "closed"
        return self._runner.arena.claim(task.worker, task.claim)

    def forget(self, number: int) -> None:
        assert self._runner is not None, "closed"
        self._runner.arena.forget(number)

    def run(self, task: Task) -> Done | None:
        from .task import Stale

        assert self._runner is not None, "closed"
        before = _settings()
        _set(self._settings, before)
        try:
            return self._runner.run(task)
        except Stale:
            return None
        finally:
            _set(before, _settings())

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._runner is not None:
            self._runner.arena.close()
        self._runner = self._channel = None
        _forget(self._file)
        give_back()


def open_job(grant: Grant, welcome: Welcome, emulated: bool, local: str) -> Loaded:
    """Runs the job file, makes the model and binds it to the job's tensors."""
    from dovetail.cluster.job import spec, tensor_channel
    from dovetail.cluster.job.submission import stored_options

    from . import task

    file = Path(grant.folder) / "job.py"
    settings, through = _settings(), None
    try:
        job = spec.load(file, stored_options(file.parent))
        if not welcome.memory:  # a machine that shares no memory with the job's
            through = tensor_channel.join(welcome.store, welcome.channel, local=local)
        runner = task.open_runner(job, welcome.memory, emulated=emulated, header=welcome.header, channel=through)
        return Loaded(runner, through, file)
    except BaseException:
        if through is not None:
            through.close()
        _forget(file)
        raise
    finally:
        _set(settings, _settings())


def _settings() -> tuple[bool, bool, str, int]:
    """What a job may change for the whole process and with it what others compute; its own tasks find it again.

    How many threads there are is not its choice: a device is one core, and sums depend on it.
    """
    import torch

    strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return strict, warn, torch.get_float32_matmul_precision(), torch.get_num_threads()


def _set(wanted: tuple[bool, bool, str, int], now: tuple[bool, bool, str, int]) -> None:
    """Changes what differs; some of it takes long."""
    import torch

    if wanted[:2] != now[:2]:
        torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])
    if wanted[2] != now[2]:
        torch.set_float32_matmul_precision(wanted[2])
    if wanted[3] != now[3]:
        torch.set_num_threads(wanted[3])


def _forget(file: Path) -> None:
    """The job file's module, and with it whatever the file keeps."""
    for name, module in list(sys.modules.items()):
        if name.startswith("dovetail_job_") and getattr(module, "__file__", "") == str(file):
            del sys.modules[name]


def give_back() -> None:
    """Frees what nobody refers to, and tells the system so. What was there before the first job is not looked at."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

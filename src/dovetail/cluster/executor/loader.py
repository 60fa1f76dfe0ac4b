"""A job in this process: loading it, running its tasks, and dropping it again.

Everything here runs the job's own code, so it happens in the main thread, between tasks: making a model draws from the
same random numbers as a running task. `task_runner` runs one task.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch

from dovetail.cluster.job import objects, spec, tensor_channel
from dovetail.cluster.job.arena import Arena
from dovetail.cluster.job.spec import TrainingJob
from dovetail.cluster.job.submission import stored_options
from dovetail.cluster.job.tensor_channel import Channel
from dovetail.cluster.transport.messages import Done, GrantLease, Task, Welcome

from .device.device_runner import DeviceRunner
from .device.task_device import TaskDevice
from .task_runner import Stale, TaskRunner


class LoadedJob:
    """A `tenant.JobRunner`: a job's task runner, with the tensor channel where the aggregator is on another machine."""

    def __init__(self, runner: TaskRunner, channel: Channel | None, file: Path) -> None:
        self._runner: TaskRunner | None = runner
        self._channel, self._file = channel, file
        self._settings = (*_settings()[:-1], 1)

    def claim(self, task: Task) -> bool:
        assert self._runner is not None, "closed"
        return self._runner.arena.claim(task.worker, task.claim)

    def forget(self, number: int) -> None:
        assert self._runner is not None, "closed"
        self._runner.arena.forget(number)

    def run(self, task: Task) -> Done | None:
        assert self._runner is not None, "closed"
        before = _settings()
        _set(self._settings, before)
        try:
            return self._runner.run(task)
        except Stale:
            return None
        finally:
            _set(before, _settings())

    def prefetch(self, iteration: int) -> None:
        assert self._runner is not None, "closed"
        self._runner.prefetch(iteration)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        on_accelerator = isinstance(self._runner, DeviceRunner)
        if self._runner is not None:
            self._runner.close()
        self._runner = self._channel = None
        _unload(self._file)
        _free_memory()
        if on_accelerator:
            torch.accelerator.empty_cache()


def open_job(
    lease: GrantLease, welcome: Welcome, emulated: bool, local: str, *, on: TaskDevice | None = None
) -> LoadedJob:
    """Runs the job file, makes the model and binds it to the job's tensors (see `main.Opener`); `on` an accelerator."""
    file = Path(lease.folder) / "job.py"
    settings, channel = _settings(), None
    try:
        job = spec.load(file, stored_options(file.parent))
        if not welcome.memory:  # the aggregator is on another machine
            channel = tensor_channel.join(welcome.store, welcome.channel, local=local)
        runner = open_runner(job, welcome.memory, emulated=emulated, header=welcome.header, channel=channel, on=on)
        return LoadedJob(runner, channel, file)
    except BaseException:
        if channel is not None:
            channel.close()
        _unload(file)
        raise
    finally:
        _set(settings, _settings())


def _settings() -> tuple[bool, bool, str, int]:
    """What a job may set for the whole process, and would change other jobs' results; its own tasks find it again.

    The number of threads is not its choice: a device is one core, and sums depend on it.
    """
    strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return strict, warn, torch.get_float32_matmul_precision(), torch.get_num_threads()


def _set(wanted: tuple[bool, bool, str, int], now: tuple[bool, bool, str, int]) -> None:
    """Sets only what differs, since some of it is slow."""
    if wanted[:2] != now[:2]:
        torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])
    if wanted[2] != now[2]:
        torch.set_float32_matmul_precision(wanted[2])
    if wanted[3] != now[3]:
        torch.set_num_threads(wanted[3])


def _unload(file: Path) -> None:
    """Drops the job file's module, and with it everything that the file keeps."""
    for name, module in list(sys.modules.items()):
        if name.startswith("dovetail_job_") and getattr(module, "__file__", "") == str(file):
            del sys.modules[name]


def _free_memory() -> None:
    """Frees what is unreferenced and returns it to the system. Objects older than the first job are not scanned."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def open_runner(
    job: TrainingJob,
    memory: str,
    *,
    emulated: bool,
    header: str = "",
    channel: Channel | None = None,
    on: TaskDevice | None = None,
) -> TaskRunner:
    """Makes the job's model and binds it to the arena `memory`, or to a private one like `header` (see Welcome)."""
    before = torch.get_default_dtype()
    try:
        objects.use_defaults(job)
        model = objects.make_model(job)
        arena = Arena.attach(memory, model) if memory else Arena.apart(header, model)
        if on is not None:
            return DeviceRunner(job, arena, on, channel=channel)
        return TaskRunner(job, arena, emulated=emulated, channel=channel)
    finally:
        torch.set_default_dtype(before)

"""A job in this process: loading it, running its tasks, and dropping it again.

Everything here runs the job's own code, so it happens in the main thread, between tasks: making a model draws from the
same random numbers as a running task.

A task is one worker's part of one iteration: it takes the weights, runs forward, runs backward as deep as asked, and
hands over the gradients. The parameters are the arena's and are never copied. The runner has its own buffers and fills
them from the arena before every task, so that workers on several devices do not disturb each other; worker 0 leaves its
buffers in the arena after its task, and they become the job's at the barrier. All random numbers are seeded from (seed,
iteration, worker) before the first sample is read: a task that is run again, here or elsewhere, gives the same bits.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from pathlib import Path

import torch
from torch import nn

from dovetail.cluster.job import objects, spec, tensor_channel
from dovetail.cluster.job.arena import Arena
from dovetail.cluster.job.objects import JobError, Samples, job_errors, mixed, own_defaults, seed_everything
from dovetail.cluster.job.spec import TrainingJob
from dovetail.cluster.job.submission import stored_options
from dovetail.cluster.job.tensor_channel import Channel
from dovetail.cluster.transport.messages import Done, GrantLease, Task, Welcome

SPIN = 0.0002
"""Seconds before an emulated task's end in which we poll the clock instead of sleeping."""


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

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._runner is not None:
            self._runner.arena.close()
        self._runner = self._channel = None
        _unload(self._file)
        _free_memory()


def open_job(lease: GrantLease, welcome: Welcome, emulated: bool, local: str) -> LoadedJob:
    """Runs the job file, makes the model and binds it to the job's tensors (see `main.Opener`)."""
    file = Path(lease.folder) / "job.py"
    settings, channel = _settings(), None
    try:
        job = spec.load(file, stored_options(file.parent))
        if not welcome.memory:  # the aggregator is on another machine
            channel = tensor_channel.join(welcome.store, welcome.channel, local=local)
        runner = open_runner(job, welcome.memory, emulated=emulated, header=welcome.header, channel=channel)
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


class Stale(Exception):
    """Another executor has got the task meanwhile: its gradients are not wanted, and Done must not be sent."""


class TaskRunner:
    """Runs a job's tasks in this process, one at a time, on an arena that it reads and writes."""

    def __init__(self, job: TrainingJob, arena: Arena, *, emulated: bool, channel: Channel | None = None) -> None:
        """`emulated`: a task takes as long as the job's profile or `task_seconds` says, whatever this machine needs.

        `channel`: the channel to the aggregator's arena, if `arena` is a separate one.
        """
        if emulated and not arena.division.timed:
            raise JobError("profile: expected one, or task_seconds, since the devices are emulated")
        self.job, self.arena, self.model = job, arena, arena.model
        self._emulated, self._dtype, self._channel = emulated, torch.get_default_dtype(), channel
        self._samples = Samples(job)
        self._areas = [arena.gradients(worker) for worker in range(arena.workers)]
        self._own = arena.layout.buffers.private()
        self._places: list[tuple[nn.Module, str, torch.Tensor]] = []
        arena.bind(self.model)
        self._bind_buffers()

    @property
    def bytes(self) -> int:
        """Bytes of weights and buffers, which stay on the device while no task runs."""
        return self.arena.layout.parameters.bytes + self.arena.layout.buffers.bytes

    def run(self, task: Task) -> Done:
        """Runs a task and leaves its gradients in the arena. Raises JobError if the job's own code fails, and Stale."""
        if self._channel is not None and task.fresh:
            self._channel.receive(self.arena.outgoing())
        start = time.monotonic()
        seconds = self.arena.division.seconds(task.worker, task.depth) if self._emulated else 0.0
        if self._emulated:
            time.sleep(seconds * compute_start(task.worker))
        try:
            with own_defaults(self._dtype), job_errors():
                loss = self._compute(task)
            self._hand_over(task)
        finally:
            for leaf in self.arena.leaves:
                leaf.tensor.grad = None
        if self._emulated:
            wait_until(start + seconds)
        samples = task.samples[1] - task.samples[0]
        stop = time.monotonic()
        if self._channel is not None:
            self._channel.send(self.arena.incoming(task.worker))
        return Done(
            iteration=task.iteration, worker=task.worker, loss=loss * samples, samples=samples, start=start, stop=stop
        )

    def _compute(self, task: Task) -> float:
        self._fill_buffers()
        seed_everything(mixed(self.job.seed, 2, task.iteration, task.worker))
        batch = self._samples.batch(task.iteration, *task.samples)
        segments = self.arena.segments
        if segments is None:
            return self._passes(batch)
        segments.freeze(task.depth or segments.count)
        try:
            with segments.aliases():
                return self._passes(batch)
        finally:
            segments.thaw()

    def _passes(self, batch: object) -> float:
        loss = self.job.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise JobError(f"loss: expected a scalar tensor, the mean over the batch, got {got}")
        if not loss.requires_grad:
            raise JobError("loss: expected one that depends on the model's parameters, got one without gradient")
        loss.backward()
        return float(loss.detach())

    def _hand_over(self, task: Task) -> None:
        """Writes the gradients that the task's depth reaches, and one byte per parameter: whether it has one."""
        if self.arena.name and task.claim and not self.arena.current(task.worker, task.claim):
            raise Stale
        area, gradients = self._areas[task.worker], [leaf.tensor.grad for leaf in self.arena.leaves]
        first = self.arena.layout.segments - (task.depth or self.arena.layout.segments)
        places, values, flags = [], [], []
        for leaf, view, gradient in zip(self.arena.leaves, area.views, gradients, strict=True):
            flags.append(gradient is not None)
            if leaf.segment < first:
                continue
            if gradient is None:
                view.zero_()  # other workers' samples may use it: this worker's gradient counts as zero
                continue
            if gradient.layout != torch.strided:
                raise JobError(f"parameter {leaf.name!r}: sparse gradients cannot be averaged")
            places.append(view)
            values.append(gradient)
        with torch.no_grad():
            torch._foreach_copy_(places, values)
            area.flags.copy_(torch.tensor(flags, dtype=torch.uint8))
            if task.worker == 0:
                for dtype, flat in self._gathered_buffers().items():
                    self.arena.next_buffers[dtype].copy_(flat)

    # -- buffers --

    def _bind_buffers(self) -> None:
        """Makes the model's buffers views of private memory in the arena's layout, so that one copy fills them all."""
        named: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    named.setdefault(id(buffer), []).append((module, name))
        views = self.arena.layout.buffers.views(self._own)
        for buffer, view in zip(list(self.model.buffers()), views, strict=True):
            self._places += [(module, name, view) for module, name in named[id(buffer)]]
        for module, name, view in self._places:
            module._buffers[name] = view

    def _fill_buffers(self) -> None:
        for dtype, flat in self._own.items():
            flat.copy_(self.arena.buffers[dtype])
        for module, name, view in self._places:  # an earlier task may have put another tensor there
            module._buffers[name] = view

    def _gathered_buffers(self) -> dict[torch.dtype, torch.Tensor]:
        for module, name, view in self._places:
            now = module._buffers[name]
            if now is not view:
                if now is None or now.shape != view.shape:
                    raise JobError(f"buffer {name!r}: expected to keep its shape {tuple(view.shape)}")
                view.copy_(now)
        return self._own


def open_runner(
    job: TrainingJob, memory: str, *, emulated: bool, header: str = "", channel: Channel | None = None
) -> TaskRunner:
    """Makes the job's model and binds it to the arena `memory`, or to a private one like `header` (see Welcome)."""
    before = torch.get_default_dtype()
    try:
        objects.use_defaults(job)
        model = objects.make_model(job)
        arena = Arena.attach(memory, model) if memory else Arena.apart(header, model)
        return TaskRunner(job, arena, emulated=emulated, channel=channel)
    finally:
        torch.set_default_dtype(before)


def compute_start(worker: int) -> float:
    """When an emulated task really computes, as a share of its time; it differs from worker to worker.

    Emulated devices share a core. If all computed at once, they would do so when the iteration's other tasks are handed
    out, and claims would wait for the core, as they do not where every device has its own.
    """
    return 0.05 + 0.45 * (worker * 0.618 % 1.0)


def wait_until(deadline: float) -> None:
    """Sleeps until just before a time.monotonic() and polls the clock for the rest: sleeping is not exact enough."""
    while (left := deadline - time.monotonic()) > SPIN:
        time.sleep(left - SPIN)
    while time.monotonic() < deadline:
        pass

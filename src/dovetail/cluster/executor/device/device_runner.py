"""One task on an accelerator. What a task is, `task_runner` says; this is what is different where memory is not shared.

1. The job takes its place on the device; others are evicted if there is too little memory (`memory_budget`).
2. Parameters and buffers begin to come in (`device_tensors`), unless they are there since the task before or were
   brought while another job's task ran. Meanwhile the host makes the batch. The computing stream waits for both.
3. Forward and backward are launched. Gradients leave as they become ready (`leaving_gradients`), the loss last.
4. While the device computes, the parameters of the job that will probably be next come in (`TaskDevice.meanwhile`).
5. The host waits once, until all has left, and writes the gradients to the arena.

A task that runs out of the device's memory is run again alone there; the second time it is the job's failure.
"""

from __future__ import annotations

import contextlib
import gc

import msgspec
import torch
from torch import nn

from dovetail.cluster.executor.task_runner import TaskRunner, check_dense
from dovetail.cluster.job.arena import Arena
from dovetail.cluster.job.objects import JobError, job_errors
from dovetail.cluster.job.spec import TrainingJob
from dovetail.cluster.job.tensor_channel import Channel
from dovetail.cluster.transport.messages import Done, Task

from .device_tensors import DeviceTensors
from .leaving_gradients import LeavingGradients
from .task_device import TaskDevice, moved


class DeviceRunner(TaskRunner):
    """Runs a job's tasks on a device; an `Occupant` of its memory."""

    def __init__(self, job: TrainingJob, arena: Arena, on: TaskDevice, *, channel: Channel | None = None) -> None:
        self._on, self._staged = on, list[torch.Tensor]()
        layout = arena.layout
        self._working = layout.gradients.bytes + arena.division.activations
        """Bytes that a task needs beside the job's tensors: first a guess, then the most that was measured."""
        self._measured = False
        super().__init__(job, arena, emulated=False, channel=channel)

    def run(self, task: Task) -> Done:
        try:
            return self._run_once(task)
        except JobError as e:
            if not _out_of_memory(e):
                raise
        # Here the failed attempt's tensors can be freed: the exception held them.
        gc.collect()
        self._on.budget.make_room(self, self._on.budget.limit)
        torch.accelerator.empty_cache()
        try:
            return self._run_once(msgspec.structs.replace(task, fresh=False))
        except JobError as e:
            if not _out_of_memory(e):
                raise
            raise JobError(f"{self._too_large()}: {e}", e.trace) from None

    def _run_once(self, task: Task) -> Done:
        try:
            return super().run(task)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                self._on.synchronize()
            raise
        finally:
            self._staged.clear()

    def prefetch(self, iteration: int) -> None:
        """Never evicts another job; what fails here is tried again, and told, when the task runs."""
        if not self.arena.name:
            return  # the parameters come with the task, from another machine
        with contextlib.suppress(RuntimeError):
            if self._tensors.present or self._on.budget.free >= self._tensors.bytes:
                self._occupy()
                self._tensors.bring(iteration)

    def close(self) -> None:
        self.evict()
        super().close()

    # -- the job's place on the device --

    def evict(self) -> None:
        """Leaves the device; the job's parameters are in the arena, and come back with its next task."""
        self._on.budget.left(self)
        self._tensors.drop()
        self._own, self._places = {}, []
        for parameter in self.model.parameters():
            parameter.data = self._nothing(parameter)
        for leaf in self.arena.leaves:
            if leaf.alias:
                leaf.tensor.data = self._nothing(leaf.tensor)
        for module, name, _ in self._homes:
            buffer = module._buffers[name]
            module._buffers[name] = None if buffer is None else self._nothing(buffer)

    def _occupy(self) -> None:
        """Allocates the job's tensors on the device, unless they are there, and binds the model to them."""
        if not self._tensors.present:
            self._tensors.place()
            assert self._tensors.parameters is not None
            views = self.arena.layout.parameters.views(self._tensors.parameters)
            for parameter, view in zip(self.model.parameters(), views, strict=True):
                parameter.data = view
            self._bind_buffers(self._tensors.own_buffers)
        self._on.budget.used(self)

    def _nothing(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=like.dtype, device=self._on.device)

    # -- the parts of a task --

    def _bind(self) -> None:
        """Makes the model one of the device, without any memory there yet."""
        known = [id(parameter) for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)
        with job_errors(f"model: cannot be moved to {self._on.name}"):
            self._on.move(self.model)
        if [id(parameter) for parameter in self.model.parameters()] != known:
            raise JobError(f"model: {type(self.model).__name__} makes other parameters when it is moved to a device")
        for leaf in self.arena.leaves:
            if leaf.alias:
                leaf.tensor = nn.Parameter(leaf.parameter.detach())
        layout = self.arena.layout
        self._tensors = DeviceTensors(self.arena, self._on)
        self._leaving = LeavingGradients(layout.gradients, self.arena.leaves, self._on)
        self._leaving_buffers = {
            dtype: torch.zeros(n, dtype=dtype, pin_memory=True) for dtype, n in layout.buffers.sizes.items()
        }
        self.evict()

    def _fill(self, task: Task) -> None:
        self._on.begin_task()
        need = self._working + (0 if self._tensors.present else self._tensors.bytes)
        if not self._on.budget.make_room(self, need) and self._measured:
            self._reclaim(need)
        self._occupy()
        self._tensors.bring(task.iteration)
        self._tensors.await_arrival()
        self._before = self._on.count_peak()
        self._fill_buffers(self._tensors.buffers)
        self._leaving.begin()

    def _reclaim(self, need: int) -> None:
        """No other job has tensors of ours to evict: what is left is what jobs' own code keeps on the device."""
        gc.collect()
        if self._on.budget.free < need:
            kept = (self._on.budget.limit - self._on.budget.free) / 2**20
            raise JobError(f"{self._too_large()}, of which {kept:,.1f} MiB are kept by the code of jobs there")

    def _seed(self, seed: int) -> None:
        super()._seed(seed)
        self._on.seed(seed)

    def _batch(self, task: Task) -> object:
        return moved(super()._batch(task), self._on.device, self._staged)

    def _hand_over(self, task: Task, loss: torch.Tensor) -> float:
        gradients = [leaf.tensor.grad for leaf in self.arena.leaves]
        first = self.arena.layout.segments - (task.depth or self.arena.layout.segments)
        wanted = []
        for index, (leaf, gradient) in enumerate(zip(self.arena.leaves, gradients, strict=True)):
            if leaf.segment >= first and gradient is not None:
                check_dense(leaf.name, gradient)
                wanted.append(index)
        place = self._leaving.loss_place(loss.dtype)
        with torch.no_grad(), job_errors():
            others = [(place, loss.reshape(()))]
            if task.worker == 0:
                others += [(self._leaving_buffers[dtype], flat) for dtype, flat in self._gathered_buffers().items()]
            self._leaving.copy(wanted, others)
            self._measure()
            self._on.meanwhile()
            self._leaving.wait()
        self._check_current(task)
        self._write(task.worker, first, gradients)
        return float(place)

    def _write(self, worker: int, first: int, gradients: list[torch.Tensor | None]) -> None:
        """Copies from pinned memory to the arena, from segment `first` on."""
        for view, gradient in zip(self._leaving.views, gradients, strict=True):
            if gradient is None:
                view.zero_()  # other workers' samples may use it: this worker's gradient counts as zero
        area = self._areas[worker]
        for dtype, flat in self._leaving.flats.items():
            begin = self.arena.layout.gradients.bounds[dtype][first]
            area.flats[dtype][begin:].copy_(flat[begin:])
        area.flags.copy_(torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8))
        if worker == 0:
            for dtype, flat in self._leaving_buffers.items():
                self.arena.next_buffers[dtype].copy_(flat)

    def _measure(self) -> None:
        """Learns what a task needs: by now everything that it allocates has been allocated."""
        needed = self._on.peak() - self._before
        self._working = max(self._working, needed) if self._measured else needed
        self._measured = True
        if self._tensors.bytes + self._working > self._on.budget.limit:
            raise JobError(self._too_large())

    def _too_large(self) -> str:
        need, limit = (self._tensors.bytes + self._working) / 2**20, self._on.budget.limit / 2**20
        return f"memory of {self._on.name}: a task needs {need:,.1f} MiB there, jobs may use {limit:,.1f} MiB"


def _out_of_memory(error: JobError) -> bool:
    return isinstance(error.__cause__, torch.OutOfMemoryError)

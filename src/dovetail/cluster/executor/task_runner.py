"""One task in this process: it takes the weights, runs forward, runs backward as deep as asked, hands over gradients.

A task is one worker's part of one iteration. The parameters are the arena's and are never copied (on an accelerator:
`device.device_runner`). The runner has its own buffers and fills them from the arena before every task, so that workers
on several devices do not disturb each other; worker 0 leaves its buffers in the arena after its task, and they become
the job's at the barrier. All random numbers are seeded from (seed, iteration, worker) before the first sample is read:
a task that is run again, here or elsewhere, gives the same bits.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from dovetail.cluster.job.arena import Arena, Flats
from dovetail.cluster.job.objects import JobError, Samples, job_errors, mixed, own_defaults, seed_everything
from dovetail.cluster.job.spec import TrainingJob
from dovetail.cluster.job.tensor_channel import Channel
from dovetail.cluster.transport.messages import Done, Task

SPIN = 0.0002
"""Seconds before an emulated task's end in which we poll the clock instead of sleeping."""


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
        self._homes = _buffer_homes(self.model)
        self._bind()

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
                unread = self._compute(task)
            loss = self._hand_over(task, unread)
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

    def prefetch(self, iteration: int) -> None:
        """Brings an iteration's parameters to the device ahead of its task; here they are in shared memory already."""

    def close(self) -> None:
        """Gives up the claims, and whatever the job has on a device."""
        self.arena.close()

    def _compute(self, task: Task) -> torch.Tensor:
        """Runs both passes; the loss, which a device may not have computed yet."""
        self._fill(task)
        self._seed(mixed(self.job.seed, 2, task.iteration, task.worker))
        batch = self._batch(task)
        segments = self.arena.segments
        if segments is None:
            return self._passes(batch)
        segments.freeze(task.depth or segments.count)
        try:
            with segments.aliases():
                return self._passes(batch)
        finally:
            segments.thaw()

    def _seed(self, seed: int) -> None:
        seed_everything(seed)

    def _batch(self, task: Task) -> Any:
        return self._samples.batch(task.iteration, *task.samples)

    def _passes(self, batch: Any) -> torch.Tensor:
        loss = self.job.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise JobError(f"loss: expected a scalar tensor, the mean over the batch, got {got}")
        if not loss.requires_grad:
            raise JobError("loss: expected one that depends on the model's parameters, got one without gradient")
        loss.backward()
        return loss.detach()

    def _hand_over(self, task: Task, loss: torch.Tensor) -> float:
        """Writes the gradients that the task's depth reaches, and one byte per parameter: whether it has one.

        Returns the loss, as a number.
        """
        value = float(loss)
        self._check_current(task)
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
            check_dense(leaf.name, gradient)
            places.append(view)
            values.append(gradient)
        with torch.no_grad():
            torch._foreach_copy_(places, values)
            area.flags.copy_(torch.tensor(flags, dtype=torch.uint8))
            if task.worker == 0:
                for dtype, flat in self._gathered_buffers().items():
                    self.arena.next_buffers[dtype].copy_(flat)
        return value

    def _check_current(self, task: Task) -> None:
        if self.arena.name and task.claim and not self.arena.current(task.worker, task.claim):
            raise Stale

    # -- parameters and buffers --

    def _bind(self) -> None:
        """Makes the model's parameters and buffers views of the memory that tasks use."""
        self.arena.bind(self.model)
        self._bind_buffers(self.arena.layout.buffers.private())

    def _bind_buffers(self, own: Flats) -> None:
        """Makes the model's buffers views of flat memory in the arena's layout, so that one copy fills them all."""
        views = self.arena.layout.buffers.views(own)
        self._own, self._places = own, [(module, name, views[index]) for module, name, index in self._homes]
        for module, name, view in self._places:
            module._buffers[name] = view

    def _fill(self, task: Task) -> None:
        """Gives the model the parameters and buffers of the task's iteration."""
        self._fill_buffers(self.arena.buffers)

    def _fill_buffers(self, given: Flats) -> None:
        for dtype, flat in self._own.items():
            flat.copy_(given[dtype])
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


def _buffer_homes(model: nn.Module) -> list[tuple[nn.Module, str, int]]:
    """Where each buffer is found, perhaps in several modules: (module, name there, its number in `model.buffers()`)."""
    numbers = {id(buffer): number for number, buffer in enumerate(model.buffers())}
    return [
        (module, name, numbers[id(buffer)])
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def check_dense(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout != torch.strided:
        raise JobError(f"parameter {name!r}: sparse gradients cannot be averaged")


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

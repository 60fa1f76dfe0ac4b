"""One worker's part of one iteration: take the weights, forward, backward as deep as asked, hand over the gradients.

The parameters are the arena's and are never copied. Buffers are the runner's own, filled from the arena before every
task, so that workers on several devices do not disturb each other; after its task worker 0 leaves its own in the arena,
and they become the job's at the barrier. Everything random is seeded from (seed, iteration, worker) before the first
sample is read: a task that is run again, here or elsewhere, gives the same bits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.cluster.job import objects
from dovetail.cluster.job.arena import Arena
from dovetail.cluster.job.objects import JobError, Samples, blaming, mixed, own_defaults, seed_everything
from dovetail.cluster.job.spec import TrainingJob
from dovetail.cluster.transport.messages import Done, Task

if TYPE_CHECKING:
    from dovetail.cluster.job.tensor_channel import Channel

__all__ = ["JobError", "Runner", "Stale", "open_runner"]

SPIN = 0.0002
"""Seconds before an emulated task's end in which we look at the clock instead of sleeping."""


class Stale(Exception):
    """The task was given to somebody else meanwhile: its gradients are not wanted, and Done must not be said."""


class Runner:
    """Runs a job's tasks in this process, one at a time. Bound to an arena, which it reads and writes."""

    def __init__(self, job: TrainingJob, arena: Arena, *, emulated: bool, channel: Channel | None = None) -> None:
        """`emulated`: a task takes what the job's profile or `task_seconds` says, however quick this machine is.

        `channel`: to the aggregator's arena, where this one is not it.
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
        """What it holds on its device while no task runs: the weights and buffers."""
        return self.arena.layout.parameters.bytes + self.arena.layout.buffers.bytes

    def run(self, task: Task) -> Done:
        """Leaves the gradients in the arena. JobError: the job's own code is at fault. Stale: say nothing."""
        if self._channel is not None and task.fresh:
            self._channel.receive(self.arena.outgoing())
        start = time.monotonic()
        seconds = self.arena.division.seconds(task.worker, task.depth) if self._emulated else 0.0
        if self._emulated:
            time.sleep(seconds * place(task.worker))
        try:
            with own_defaults(self._dtype), blaming():
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
        """Gradients of what the task's depth reaches, and a byte for each that says whether there is one."""
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
                view.zero_()  # used for other samples only, perhaps: it counts as zero beside the others'
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
        """The model's buffers become views of memory of our own, in the arena's layout: one copy fills them all."""
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
        for module, name, view in self._places:  # a task before may have put another tensor there
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
) -> Runner:
    """Makes the job's model and binds it to the arena `memory`, or to one of its own like `header` (see Welcome)."""
    before = torch.get_default_dtype()
    try:
        objects.use_defaults(job)
        model = objects.make_model(job)
        arena = Arena.attach(memory, model) if memory else Arena.apart(header, model)
        return Runner(job, arena, emulated=emulated, channel=channel)
    finally:
        torch.set_default_dtype(before)


def place(worker: int) -> float:
    """Where in an emulated task's time its real computing begins, as a share of it: elsewhere for every worker.

    Devices that share a core would all compute just when the iteration's other tasks are handed out, and claims would
    wait for the core. What is handed out is then as it is for devices that compute by themselves.
    """
    return 0.05 + 0.45 * (worker * 0.618 % 1.0)


def wait_until(deadline: float) -> None:
    """Sleeps to shortly before a time.monotonic() and looks at the clock for the rest: many devices share a core."""
    while (left := deadline - time.monotonic()) > SPIN:
        time.sleep(left - SPIN)
    while time.monotonic() < deadline:
        pass

"""One job's parameters and buffers on a device: brought in from the arena, evicted, brought in again.

An iteration's parameters travel in chunks: the host copies a chunk from the arena into pinned memory, and while the
device copies it from there, on the stream for incoming copies, the host goes on with the next chunk. An event says
when all have arrived. They come once for all tasks of an iteration that run here, and may come ahead of the first: they
do not change between the iteration's offer and its barrier, and a task of it can be claimed before the barrier only, so
a copy that was made after the offer is whole if such a claim succeeds later.

The device has the arriving buffers apart from those that the model uses: a task changes the latter, and the next task
of the same iteration begins with the former.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.cluster.job.arena import Arena, Flats
from dovetail.cluster.job.tensor_layout import FlatLayout

from .task_device import TaskDevice

CHUNK = 4 << 20
"""Bytes that the host copies before the device begins to copy them."""


@dataclass(frozen=True)
class _Chunk:
    """Elements [start, stop) of one dtype, with pinned memory of their own."""

    dtype: torch.dtype
    start: int
    stop: int
    pinned: torch.Tensor


class DeviceTensors:
    """A job's tensors on the device, in the arena's layout. Evicted at first."""

    def __init__(self, arena: Arena, on: TaskDevice) -> None:
        self._arena, self._on = arena, on
        layout = arena.layout
        self._parameter_chunks, self._buffer_chunks = _chunks(layout.parameters), _chunks(layout.buffers)
        self._arrived = on.event()
        self.iteration = -1
        """The iteration whose parameters are here, or on their way; -1 for none."""
        self.parameters: Flats | None = None
        self.buffers: Flats = {}
        """The iteration's buffers as they came from the arena."""
        self.own_buffers: Flats = {}
        """The buffers that the model uses."""

    @property
    def bytes(self) -> int:
        """Bytes that bringing them in allocates."""
        layout = self._arena.layout
        return layout.parameters.bytes + 2 * layout.buffers.bytes

    @property
    def present(self) -> bool:
        return self.parameters is not None

    def place(self) -> None:
        """Allocates the device's memory, of the incoming stream, which writes it first."""
        layout, device = self._arena.layout, self._on.device
        with self._on.inward:
            parameters, buffers = _empty(layout.parameters, device), _empty(layout.buffers, device)
        self.own_buffers = _empty(layout.buffers, device)
        self.parameters, self.buffers, self.iteration = parameters, buffers, -1

    def bring(self, iteration: int) -> None:
        """Begins to copy the iteration's parameters and buffers to the device, unless they are there."""
        assert self.parameters is not None, "place() comes first"
        if self.iteration == iteration:
            return
        if not self._arrived.query():  # those of an iteration of which no task ran here
            self._arrived.synchronize()
        self.iteration = -1  # if copying fails
        with torch.no_grad(), self._on.inward:
            for chunks, source, target in (
                (self._buffer_chunks, self._arena.buffers, self.buffers),
                (self._parameter_chunks, self._arena.parameters, self.parameters),
            ):
                for chunk in chunks:
                    chunk.pinned.copy_(source[chunk.dtype][chunk.start : chunk.stop])
                    target[chunk.dtype][chunk.start : chunk.stop].copy_(chunk.pinned, non_blocking=True)
            self._arrived.record(self._on.inward)
        self.iteration = iteration

    def await_arrival(self) -> None:
        """Lets the computing stream wait for what `bring` has begun; the host does not wait."""
        self._on.compute.wait_event(self._arrived)

    def drop(self) -> None:
        """Frees the device's memory, between tasks: the host has waited for the last one, so none still computes on it.

        Copies of a `bring` may still come in; only the stream that they are on can reuse the memory meanwhile.
        """
        self.parameters, self.buffers, self.own_buffers, self.iteration = None, {}, {}, -1


def _empty(layout: FlatLayout, device: torch.device) -> Flats:
    return {dtype: torch.empty(n, dtype=dtype, device=device) for dtype, n in layout.sizes.items()}


def _chunks(layout: FlatLayout) -> list[_Chunk]:
    found = []
    for dtype, n in layout.sizes.items():
        step = CHUNK // dtype.itemsize
        for start in range(0, n, step):
            stop = min(start + step, n)
            pinned = torch.empty(stop - start, dtype=dtype, pin_memory=True)
            found.append(_Chunk(dtype, start, stop, pinned))
    return found

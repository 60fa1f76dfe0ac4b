"""A task's gradients on their way from the device to pinned memory, some while backward still computes the others.

Hooks tell when a gradient is complete. When enough bytes are, an event is recorded behind them in the computing stream.
After backward has been launched the copies are, each group behind its event, on the stream for outgoing copies; the
host waits for none of them. A gradient that is added to a second time (a backward pass inside the loss) leaves last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from dovetail.cluster.job.tensor_layout import FlatLayout
from dovetail.train.partial.segments import Leaf

from .task_device import TaskDevice

GROUP = 1 << 20
"""Bytes of gradients that leave together."""


class LeavingGradients:
    """The gradients of one job's tasks, in pinned memory of the arena's layout."""

    def __init__(self, layout: FlatLayout, leaves: Sequence[Leaf], on: TaskDevice) -> None:
        self._leaves, self._on = leaves, on
        self.flats = {dtype: torch.zeros(n, dtype=dtype, pin_memory=True) for dtype, n in layout.sizes.items()}
        self.views = layout.views(self.flats)
        """One per leaf."""
        self._losses: dict[torch.dtype, torch.Tensor] = {}
        self._events: list[torch.Event] = []
        self._computed, self._gone = on.event(), on.event()
        self._reset()
        for index, leaf in enumerate(leaves):
            leaf.tensor.register_post_accumulate_grad_hook(partial(self._ready, index))

    def begin(self) -> None:
        """A task begins: its gradients are counted from now on."""
        self._reset()
        self._open = True

    def _reset(self) -> None:
        self._open = False
        self._pending: list[int] = []
        self._bytes = 0
        self._groups: list[list[int]] = []
        self._times = [0] * len(self._leaves)

    def _ready(self, index: int, tensor: torch.Tensor) -> None:
        """Called by autograd, perhaps in a thread of its own, when a gradient has been launched."""
        gradient = tensor.grad
        if not self._open or gradient is None:
            return
        self._times[index] += 1
        self._pending.append(index)
        self._bytes += gradient.numel() * gradient.element_size()
        if self._bytes >= GROUP:
            if len(self._groups) == len(self._events):
                self._events.append(self._on.event())
            self._events[len(self._groups)].record(torch.accelerator.current_stream(self._on.device))
            self._groups.append(self._pending)
            self._pending, self._bytes = [], 0

    def copy(self, wanted: Sequence[int], others: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Launches the copies of the leaves with these indices, and of others as (pinned memory, tensor).

        To be called when backward, and whatever makes `others`, has been launched. `wait` waits for all.
        """
        self._open = False
        left = set(wanted)
        self._computed.record(torch.accelerator.current_stream(self._on.device))
        with torch.no_grad(), self._on.outward as stream:
            for event, group in zip(self._events, self._groups, strict=False):
                early = [index for index in group if self._times[index] == 1 and index in left]
                if early:
                    stream.wait_event(event)
                for index in early:
                    self._copy(index)
                    left.remove(index)
            stream.wait_event(self._computed)
            for index in sorted(left):
                self._copy(index)
            for place, tensor in others:
                place.copy_(tensor, non_blocking=True)
            self._gone.record(stream)

    def _copy(self, index: int) -> None:
        gradient = self._leaves[index].tensor.grad
        assert gradient is not None, "only gradients that there are, are wanted"
        self.views[index].copy_(gradient, non_blocking=True)

    def wait(self) -> None:
        """Waits until everything is in pinned memory: the one time that the host waits for the device in a task."""
        self._gone.synchronize()

    def loss_place(self, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory for the loss."""
        if dtype not in self._losses:
            self._losses[dtype] = torch.zeros((), dtype=dtype, pin_memory=True)
        return self._losses[dtype]

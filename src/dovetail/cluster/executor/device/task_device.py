"""The accelerator of an executor: one device with a stream for each direction of copies, and its memory's budget.

Tasks compute on the device's current stream. Parameters come in on one stream of their own and gradients leave on
another one, both through pinned host memory; events order them with the computation. Nothing here is of one vendor:
torch.accelerator, torch.Stream and torch.Event know every device that torch knows, the emulated one included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from dovetail.cluster import accelerators

from .memory_budget import MemoryBudget


class TaskDevice:
    """One device of this process. Its methods are called by one thread."""

    def __init__(self, name: str, limit: int) -> None:
        """`limit`: bytes that jobs may use of the device together; torch's allocator enforces it where it can."""
        self.name = name
        accelerators.load([name], limit)
        self.device = accelerators.open_device(name)
        self.compute = torch.accelerator.current_stream(self.device)
        self.inward, self.outward = torch.Stream(device=self.device), torch.Stream(device=self.device)
        self.budget = MemoryBudget(limit, lambda: torch.accelerator.memory_allocated(self.device))
        self.meanwhile: Callable[[], None] = lambda: None
        """Called while a task computes and the host has nothing else to do."""
        self._module: Any = torch.get_device_module(self.device)
        self._limit_allocator(limit)

    def _limit_allocator(self, limit: int) -> None:
        """Where the device's allocator takes a limit, no job can exceed the budget even for a moment."""
        if hasattr(self._module, "set_per_process_memory_fraction"):
            _, total = torch.accelerator.get_memory_info(self.device)
            self._module.set_per_process_memory_fraction(min(1.0, limit / total), self.device)

    def event(self) -> torch.Event:
        return torch.Event(device=self.device)

    def seed(self, seed: int) -> None:
        """Seeds the device's own random numbers."""
        self._module.manual_seed(seed)

    def begin_task(self) -> None:
        """Sets the current device and stream, which another job's code may have changed."""
        torch.accelerator.set_device_index(self.device)
        torch.accelerator.set_stream(self.compute)

    def count_peak(self) -> int:
        """Begins to count the peak of the memory anew; returns the bytes that are allocated now."""
        torch.accelerator.reset_peak_memory_stats(self.device)
        return torch.accelerator.memory_allocated(self.device)

    def peak(self) -> int:
        """The most bytes that were allocated at once since `count_peak`."""
        return torch.accelerator.max_memory_allocated(self.device)

    def synchronize(self) -> None:
        """Waits for everything that was launched: after an error, before memory is used for something else."""
        torch.accelerator.synchronize(self.device)

    def move(self, model: nn.Module) -> None:
        """Makes the model one of this device. Every parameter stays the object that it was, tied ones stay tied."""
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swaps or not self._takes_data())
        try:
            model.to(self.device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def _takes_data(self) -> bool:
        """Whether a parameter of the CPU can be given this device's memory; otherwise torch has to swap tensors."""
        try:
            nn.Parameter(torch.empty(0)).data = torch.empty(0, device=self.device)
        except (RuntimeError, TypeError):
            return False
        return True


def moved(batch: Any, device: torch.device, staged: list[torch.Tensor]) -> Any:
    """The batch on the device, copied asynchronously through pinned memory. `staged` gets the pinned tensors.

    Tensors are found in tuples, lists and mappings; objects that have a method `to` move themselves, others stay.
    """
    if isinstance(batch, torch.Tensor):
        if batch.device.type != "cpu":
            return batch.to(device)
        staged.append(batch.pin_memory())
        return staged[-1].to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, tuple):
        parts = [moved(part, device, staged) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [moved(part, device, staged) for part in batch]
    if isinstance(batch, MutableMapping):
        like = copy.copy(batch)  # a mapping of the same kind: its constructor may want something else
        like.update({key: moved(part, device, staged) for key, part in batch.items()})
        return like
    return batch

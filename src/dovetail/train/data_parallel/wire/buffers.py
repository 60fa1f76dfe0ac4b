"""Memory that is used again: what was touched before is several times faster than new memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class BufferPool:
    """Buffers that nobody uses now; `most` is how many are kept, the largest ones. Any number of threads may use it."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, shape: torch.Size | int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor with any content: of the buffers that are large enough the smallest, or new memory."""
        wanted = torch.empty(shape, dtype=dtype, device="meta")
        nbytes = wanted.numel() * wanted.element_size()
        with self._lock:
            fits = [k for k, b in enumerate(self._free) if b.device == device and b.numel() >= nbytes]
            buffer = self._free.pop(min(fits, key=lambda k: self._free[k].numel())) if fits else None
        if buffer is None:
            buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
        return buffer[:nbytes].view(dtype).view(wanted.shape)

    def give(self, taken: torch.Tensor) -> None:
        """Takes the memory of a tensor from `take` back."""
        whole = torch.empty(0, dtype=torch.uint8, device=taken.device).set_(taken.untyped_storage())
        with self._lock:
            self._free.append(whole)
            if self._most is not None and len(self._free) > self._most:
                self._free.pop(min(range(len(self._free)), key=lambda k: self._free[k].numel()))

    @contextmanager
    def lend(self, shape: torch.Size | int, dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
        """A tensor for the time of the block. After an exception nobody gets its memory again."""
        taken = self.take(shape, dtype, device)
        yield taken
        self.give(taken)


SCRATCH = BufferPool(most=4)
"""For transfers: two of them overlap, and a process has seldom more than one lane."""

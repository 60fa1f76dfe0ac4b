"""Memory that is used again: what was touched before is several times faster than new memory.

On an accelerator a buffer comes back while work on it is still queued in the giver's device stream. It is lent again in
that stream, or once that work is over, or after `adopt`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dovetail.train import device_streams


@dataclass
class _SpareBuffer:
    memory: torch.Tensor
    stream: torch.Stream | None
    """In which it may be used at once; None on the CPU."""
    given: torch.Event | None
    """Once this is over it may be used in any stream."""

    def is_free(self, stream: torch.Stream | None) -> bool:
        return self.stream == stream or self.given is None or self.given.query()


class BufferPool:
    """Buffers that nobody uses now; `most` is how many are kept, the largest ones. Any number of threads may use it."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._free: list[_SpareBuffer] = []
        self._lock = threading.Lock()

    def take(self, shape: torch.Size | int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor with any content: of the buffers that are large enough the smallest, or new memory."""
        wanted = torch.empty(shape, dtype=dtype, device="meta")
        nbytes, stream = wanted.numel() * wanted.element_size(), device_streams.current(device)
        with self._lock:
            fits = [
                k
                for k, b in enumerate(self._free)
                if b.memory.device == device and b.memory.numel() >= nbytes and b.is_free(stream)
            ]
            buffer = self._free.pop(min(fits, key=lambda k: self._free[k].memory.numel())).memory if fits else None
        if buffer is None:
            buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
        device_streams.hold_for(stream, [buffer])
        return buffer[:nbytes].view(dtype).view(wanted.shape)

    def give(self, taken: torch.Tensor) -> None:
        """Takes the memory of a tensor from `take` back."""
        whole = torch.empty(0, dtype=torch.uint8, device=taken.device).set_(taken.untyped_storage())
        spare = _SpareBuffer(whole, device_streams.current(taken.device), device_streams.mark(taken.device))
        device_streams.hold_for(spare.stream, [whole])
        with self._lock:
            self._free.append(spare)
            if self._most is not None and len(self._free) > self._most:
                self._free.pop(min(range(len(self._free)), key=lambda k: self._free[k].memory.numel()))

    def adopt(self, device: torch.device) -> None:
        """The device's current stream has waited for all that was given back so far, and may use it from now on."""
        stream = device_streams.current(device)
        with self._lock:
            for spare in self._free:
                if spare.memory.device == device:
                    spare.stream = stream

    @contextmanager
    def lend(self, shape: torch.Size | int, dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
        """A tensor for the time of the block. After an exception nobody gets its memory again."""
        taken = self.take(shape, dtype, device)
        yield taken
        self.give(taken)


SCRATCH = BufferPool(most=4)
"""For transfers: two of them overlap, and a process has seldom more than one lane."""

"""What the emulated accelerator has seen: races, waits of the host, kernels; and the switch of the race detector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import handovers, torch_module


@dataclass(frozen=True)
class HostSync:
    """A line of Python that made the host wait for a device, and how often it did."""

    what: str
    """"item()", "copy to the host", "copy to the device", "synchronize()", or an operator whose shapes need data."""
    where: str
    """The innermost line outside torch, as "folder/name:12 in function". Empty where no line of Python runs."""
    count: int


@dataclass
class SyncCount:
    """The host's waits inside a `with count_syncs()` block."""

    records: list[HostSync] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(record.count for record in self.records)

    def __str__(self) -> str:
        return "; ".join(f"{r.count} x {r.what} at {r.where}" for r in self.records) or "none"


def set_detector(mode: str) -> None:
    """Switches the race detector: "raise" raises Race at the launch that races, "collect" lists it, "off" is fast."""
    handovers.set_mode(torch_module.loaded(), mode)


def detector() -> str:
    """What a race does now: "raise", "collect" or "off"."""
    return str(torch_module.loaded().detector())


@contextlib.contextmanager
def detecting(mode: str) -> Iterator[None]:
    """Another mode of the race detector inside a `with` block."""
    before = detector()
    set_detector(mode)
    try:
        yield
    finally:
        set_detector(before)


def races(*, clear: bool = False) -> list[str]:
    """The races found so far, raised ones included, one line each; at most a thousand different ones are kept."""
    return list(torch_module.loaded().races(clear))


def host_syncs(*, clear: bool = False) -> list[HostSync]:
    """Where the host has waited for a device so far."""
    return [HostSync(*record) for record in torch_module.loaded().host_syncs(clear)]


@contextlib.contextmanager
def count_syncs() -> Iterator[SyncCount]:
    """Counts the host's waits inside a `with` block, of all threads; what it yields is filled when the block ends."""
    before = {(s.what, s.where): s.count for s in host_syncs()}
    counted = SyncCount()
    try:
        yield counted
    finally:
        for s in host_syncs():
            if more := s.count - before.get((s.what, s.where), 0):
                counted.records.append(HostSync(s.what, s.where, more))


def kernels_launched() -> int:
    """How many kernels and copies were launched in this process."""
    return int(torch_module.loaded().kernels_launched())


def kernel_counts() -> dict[str, int]:
    """Launches by the name of the kernel, "aten::add.Tensor" for instance."""
    return {name: launches for name, launches, _ in torch_module.loaded().kernel_counts() if launches}


def without_meta_kernel() -> dict[str, int]:
    """How often the host waited for an operator whose shapes only its data tells, or that has no meta kernel."""
    return {name: waits for name, _, waits in torch_module.loaded().kernel_counts() if waits}


def set_memory_limit(limit: int, device: torch_module.DeviceLike = None) -> None:
    """Gives a device `limit` bytes of memory; what does not fit raises torch.OutOfMemoryError."""
    torch_module.loaded().set_memory_limit(torch_module.index_of(device), limit)

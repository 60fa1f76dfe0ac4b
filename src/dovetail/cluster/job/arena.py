"""A job's tensors in shared memory: parameters and buffers once, gradients once for every worker.

    claim words | flags | parameters | buffers | buffers of worker 0's task | gradients of worker 0, 1, …

The aggregator creates the arena. Executors on the same machine attach to it, and their models' parameters are views of
it: once the optimiser has stepped in place, they have the new parameters. Between two barriers tasks read parameters
and buffers, and each writes its own worker's gradients; at the barrier only the aggregator reads and writes. An
executor on another machine has an arena of its own with the same layout, filled by a tensor channel.

The arena also decides which executor runs a task, without a round trip. The aggregator offers each task of an iteration
under a number that was never used before and writes it to the worker's *claim word*. An executor takes the task by
locking the byte of that number in the arena's file, and has it if the word still holds the number. The word of a task
that is done, withdrawn, or offered again because its executor is lost, holds another number, and gradients that were
computed under an old number are refused. Locks are kept until the next iteration is offered. So only one executor can
have a task, however old the messages are on which the others act.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn

from dovetail.cluster.home import FLOCK
from dovetail.cluster.transport.messages import Task
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.files import decode
from dovetail.train.partial.segments import Leaf, Segments

from .division import Division
from .tensor_layout import FlatLayout, ModelLayout, layout_of, leaves_of

FOLDER = Path("/dev/shm")
_MAGIC = b"dovetail arena 1"
_HEAD = 1 << 12
_PAGE = 1 << 12
Flats = dict[torch.dtype, torch.Tensor]


class ArenaHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of the arena, from which an executor on another machine makes one with the same layout."""

    workers: int
    division: Division
    fingerprint: str


@dataclass(frozen=True)
class Gradients:
    """One worker's part of the arena."""

    flats: Flats
    views: list[torch.Tensor]
    """One per leaf, in the order of `Arena.leaves`."""
    flags: torch.Tensor
    """One byte per leaf: whether the worker's task computed a gradient for it."""


class Arena:
    """A job's tensors and claims. Made by `create`, `attach` or `apart`."""

    def __init__(
        self,
        name: str,
        memory: mmap.mmap,
        model: nn.Module,
        header: ArenaHeader,
        *,
        offset: int,
        parts: _Parts,
        handle: int = -1,
    ) -> None:
        self.name, self.model, self.header = name, model, header
        self._handle = handle
        self.close: Callable[[], object] = weakref.finalize(self, os.close, handle) if handle >= 0 else lambda: None
        """Gives up all claims. The memory is freed with its last user."""
        self.workers, self.division = header.workers, header.division
        self.segments, self.leaves, self.layout = parts.segments, parts.leaves, parts.layout
        take = _Taker(memory, offset)
        self.words = take.tensor(torch.int64, self.workers).numpy()
        self.flags = take.tensor(torch.uint8, self.workers * len(self.leaves)).view(self.workers, len(self.leaves))
        self.parameters = take.flats(self.layout.parameters)
        self.buffers = take.flats(self.layout.buffers)
        self.next_buffers = take.flats(self.layout.buffers)
        sizes = self.layout.gradients.sizes
        self.rows: Flats = {d: take.tensor(d, self.workers * n).view(self.workers, n) for d, n in sizes.items()}

    @classmethod
    def create(cls, name: str, model: nn.Module, workers: int, *, division: Division | None = None) -> Arena:
        """Creates an arena under a name in /dev/shm, zero but for the header. An Error if there is too little memory.

        `division` defaults to full depth.
        """
        division = division or Division(batches=(1,) * workers)
        parts = _Parts.of(model, division)
        header = ArenaHeader(workers=workers, division=division, fingerprint=parts.layout.fingerprint)
        text = msgspec.json.encode(header)
        offset = _HEAD + _rounded(len(text))
        size = offset + parts.bytes(workers)
        free = shutil.disk_usage(FOLDER).free
        if size > free:
            raise Error(_no_room(size, free))
        path = FOLDER / name
        path.unlink(missing_ok=True)  # left by a process that was killed: no other one has this job and attempt
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            os.pwrite(handle, text, _HEAD)
            os.pwrite(handle, _MAGIC + len(text).to_bytes(8, "little") + size.to_bytes(8, "little"), 0)
            memory = mmap.mmap(handle, size)
        except OSError as e:
            os.close(handle)
            path.unlink()
            if e.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise Error(_no_room(size, shutil.disk_usage(FOLDER).free)) from None
            raise
        return cls(name, memory, model, header, offset=offset, parts=parts, handle=handle)

    @classmethod
    def attach(cls, name: str, model: nn.Module) -> Arena:
        """Opens the arena of an aggregator on this machine."""
        try:
            handle = os.open(FOLDER / name, os.O_RDWR)
        except OSError:
            raise Error(f"shared memory {name}: not found: its aggregator has ended") from None
        try:
            head = os.pread(handle, len(_MAGIC) + 16, 0)
            length, size = int.from_bytes(head[-16:-8], "little"), int.from_bytes(head[-8:], "little")
            if head[:-16] != _MAGIC or os.fstat(handle).st_size < size:
                raise Error(f"shared memory {name}: expected a dovetail arena of this release")
            header = msgspec.json.decode(os.pread(handle, length, _HEAD), type=ArenaHeader)
            memory = mmap.mmap(handle, size)
            parts = _Parts.of(model, header.division)
            _check(header, parts)
        except BaseException:
            os.close(handle)
            raise
        return cls(name, memory, model, header, offset=_HEAD + _rounded(length), parts=parts, handle=handle)

    @classmethod
    def apart(cls, header: str, model: nn.Module) -> Arena:
        """A private arena, for an executor that shares no memory with the aggregator. `header`: see `described`."""
        given = msgspec.json.decode(header, type=ArenaHeader)
        parts = _Parts.of(model, given.division)
        _check(given, parts)
        memory = mmap.mmap(-1, max(_PAGE, parts.bytes(given.workers)))
        return cls("", memory, model, given, offset=0, parts=parts)

    @property
    def described(self) -> str:
        """The header as JSON, for `apart` on another machine."""
        return msgspec.json.encode(self.header).decode()

    def bind(self, model: nn.Module) -> None:
        """Makes the model's parameters views of the arena. Their own values are dropped: `publish` them before."""
        assert model is self.model, "the leaves are this model's"
        views = self.layout.parameters.views(self.parameters)
        for parameter, view in zip(model.parameters(), views, strict=True):
            parameter.data = view

    def publish(self) -> None:
        """Copies the model's parameters and buffers into the arena."""
        with torch.no_grad():
            places = self.layout.parameters.views(self.parameters) + self.layout.buffers.views(self.buffers)
            for place, tensor in zip(places, [*self.model.parameters(), *self.model.buffers()], strict=True):
                place.copy_(tensor)

    def gradients(self, worker: int) -> Gradients:
        flats = {dtype: rows[worker] for dtype, rows in self.rows.items()}
        return Gradients(flats, self.layout.gradients.views(flats), self.flags[worker])

    def outgoing(self) -> list[torch.Tensor]:
        """The tensors that an executor on another machine gets before its first task of an iteration."""
        return [*self.parameters.values(), *self.buffers.values()]

    def incoming(self, worker: int) -> list[torch.Tensor]:
        """The tensors that it sends back at a task's end."""
        flats = [*(rows[worker] for rows in self.rows.values()), self.flags[worker]]
        return flats + list(self.next_buffers.values()) if worker == 0 else flats

    # -- claims --

    def offer(self, tasks: Iterable[Task]) -> None:
        """Lets executors take the tasks, under their numbers."""
        for task in tasks:
            self.words[task.worker] = task.claim

    def withdraw(self, workers: Iterable[int]) -> None:
        """These workers' tasks can no longer be taken."""
        for worker in workers:
            self.words[worker] = 0

    def claim(self, worker: int, number: int) -> bool:
        """Takes the task if it is free. If so, it is ours until `forget` or until this process ends."""
        try:
            self._lock(fcntl.F_WRLCK, number, 1)
        except (BlockingIOError, PermissionError):  # another executor has it
            return False
        if self.current(worker, number):
            return True
        self._lock(fcntl.F_UNLCK, number, 1)
        return False

    def current(self, worker: int, number: int) -> bool:
        """Whether the task is still offered, or taken, under this number."""
        return int(self.words[worker]) == number

    def forget(self, number: int) -> None:
        """Unlocks all smaller numbers: their tasks were offered under new ones, or their iteration is over."""
        self._lock(fcntl.F_UNLCK, 0, number)

    def _lock(self, kind: int, start: int, length: int) -> None:
        """A lock of the open file, not of the process: closing the file elsewhere does not release it."""
        fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, start, length, 0))

    def unlink(self) -> None:
        """Removes the name: no executor can attach any more."""
        if self.name:
            (FOLDER / self.name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Parts:
    """What follows from the model and its division."""

    segments: Segments | None
    leaves: list[Leaf]
    layout: ModelLayout

    @classmethod
    def of(cls, model: nn.Module, division: Division) -> _Parts:
        segments = Segments(model, decode(division.plan, DepthPlan)) if division.plan else None
        leaves = leaves_of(model, segments)
        return cls(segments, leaves, layout_of(model, leaves, segments.count if segments else 1))

    def bytes(self, workers: int) -> int:
        """Size of everything behind the header."""
        take = _Taker(None, 0)
        take.size(8 * workers)
        take.size(workers * len(self.leaves))
        for flat in (self.layout.parameters, self.layout.buffers, self.layout.buffers):
            for dtype, n in flat.sizes.items():
                take.size(dtype.itemsize * n)
        for dtype, n in self.layout.gradients.sizes.items():
            take.size(dtype.itemsize * n * workers)
        return take.offset


class _Taker:
    """Allocates one piece after another, each at a page boundary."""

    def __init__(self, memory: mmap.mmap | None, offset: int) -> None:
        self._memory, self.offset = memory, offset

    def size(self, count: int) -> int:
        at = self.offset
        self.offset += _rounded(count)
        return at

    def tensor(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        at = self.size(dtype.itemsize * count)
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at) if count else torch.zeros(0)

    def flats(self, layout: FlatLayout) -> Flats:
        return {dtype: self.tensor(dtype, n) for dtype, n in layout.sizes.items()}


def _rounded(count: int) -> int:
    return -(-count // _PAGE) * _PAGE


def _check(header: ArenaHeader, parts: _Parts) -> None:
    if parts.layout.fingerprint != header.fingerprint:
        raise Error("model: expected the same shapes in every process, got others than the aggregator's")


def _no_room(size: int, free: int) -> str:
    return (
        f"shared memory: expected {size / 2**20:,.1f} MiB free in {FOLDER} for the job's parameters and gradients, "
        f"got {free / 2**20:,.1f} MiB: fewer workers or a larger {FOLDER}"
    )

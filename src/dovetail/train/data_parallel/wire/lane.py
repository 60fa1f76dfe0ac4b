"""One thread per process that communicates while the others compute.

gloo's messages need somebody who waits for one and starts the next. The thread takes transfers (`ring.py`) in the order
in which they were submitted, which is the same on all ranks. As soon as one has nothing left to send, the next posts
its first messages: so the link has something to do while the last messages of the one before are awaited. Python's lock
is free while the thread waits and while torch adds. Who needs the result waits for the `LaneWork` that `submit`
returned, as for torch's Work.

On an accelerator the thread waits for nothing: it queues transfers in a stream of the device that is the lane's own. A
transfer comes there after all that the device's current stream had to do when it was submitted, and who waits for the
work lets the current stream come after it.

A script that ends after its last iteration may end before what that iteration sent has arrived. Other ranks still need
it, to store the model or to pass it on, so a process stays until its lanes have nothing left to do.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dovetail.core.errors import Error, first_line
from dovetail.core.network import CollectiveName
from dovetail.measure.clock import Clock
from dovetail.train import device_streams

from .backends import patience, twin
from .ring import TimedTransfer, Transfer, timed


class LaneWork:
    """Communication that is queued, running or done."""

    def __init__(self, what: str, device: torch.device) -> None:
        self.what, self._device = what, device
        self.span: tuple[Any, Any] = (0.0, 0.0)
        """Stamps of its start and end by the device's clock (`measure.clock`); set when it is done. Spans of one lane
        do not overlap: a transfer starts when its first messages are posted, but not before the one ahead of it ends.
        """
        self._done = threading.Event()
        self._error = ""
        self._event: torch.Event | None = None
        """On an accelerator: behind the work in the lane's stream."""

    def wait(self) -> None:
        """Returns when the work is done; raises one clear line if it failed, or any work before it.

        On an accelerator the device's current stream waits and not the host. The work itself ends within the group's
        time-out, so this wait needs none of its own.
        """
        self._done.wait()
        if self._error:
            raise Error(self._error)
        device_streams.follow(self._event, self._device)

    def is_over(self) -> bool:
        """Once `wait` has returned: whether nobody, in whatever stream of an accelerator, need wait any more."""
        return self._event is None or self._event.query()

    def end(self) -> None:
        """Returns when the work is over: unlike `wait`, the host waits for an accelerator too."""
        self.wait()
        if self._event is not None:
            self._event.synchronize()


IDLE = 1.0
"""Seconds without work after which a lane's thread says that it has none."""

Run = Callable[[], Transfer]
"""Starts a transfer. Up to its first `yield` it must not wait for other ranks: the one before it has not ended yet."""
_Queued = tuple[LaneWork, Run, torch.Event | None]
"""(the work, what starts it, on an accelerator the event to wait for first)"""


class CommunicationLane:
    """Runs work in order on a thread of its own. When one fails, all behind it fail too.

    The thread ends when nobody holds the lane any more, at the end of the process, or with `finish`: in each case what
    is queued is done first, for which the last two wait at most `patience` seconds. When another rank is lost, the
    running work fails at the latest after the group's time-out, and all behind it fail at once. `idle` is called by the
    thread while it has nothing to do, once in IDLE seconds.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup,
        patience: float,
        *,
        idle: Callable[[], None] | None = None,
    ) -> None:
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        # A daemon: a rank that fails while a message hangs must still be able to end.
        use = LinkUse()
        self.stream = device_streams.new(device)
        """On an accelerator: where transfers are queued."""
        args = (self._queue, device, self.stream, group.rank(), use, idle)
        self._thread = threading.Thread(target=_run, args=args, name="dovetail-lane", daemon=True)
        self._device = device
        self._use = use
        self.finish = functools.partial(_finish, self._thread, self._queue, patience)
        """Lets the queued work end, and then the thread."""
        _finish_at_exit()
        _finishes[self._thread] = self.finish
        _finish_before_shutdown(group, self.finish)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)  # the thread must not outlive its owner

    @property
    def used(self) -> float:
        """Seconds for which transfers have been on their way so far."""
        return self._use.seconds

    def submit(self, what: str, run: Run) -> LaneWork:
        """Queues `run`; `what` names it in errors."""
        if not self._thread.is_alive():
            raise Error(f"overlap: {what} comes too late: the process or its process group has ended")
        work = LaneWork(what, self._device)
        self._queue.put((work, run, device_streams.mark(self._device)))
        return work


def queued(
    lane: CommunicationLane, transfers: Mapping[CollectiveName, TimedTransfer], tags: Iterator[int]
) -> dict[CollectiveName, Callable[[torch.Tensor], LaneWork]]:
    """Collectives as training runs them, for `measure.network`: functions that queue one and return its work."""

    def function(start: TimedTransfer) -> Callable[[torch.Tensor], LaneWork]:
        def run(flat: torch.Tensor) -> LaneWork:
            tag = next(tags)
            return lane.submit("a measurement", lambda: start(flat, tag))

        return run

    return {name: function(start) for name, start in transfers.items()}


def functions(
    group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> dict[CollectiveName, Callable[[torch.Tensor], LaneWork]]:
    """The same on a lane of its own, where no model is wrapped yet. All ranks call it together."""
    device = torch.device(device)
    alone = twin(group, device)
    lane = CommunicationLane(device, alone, patience(alone))
    return queued(lane, timed(alone), cycle(range(0, 2**29, 2**20)))


class LinkUse:
    """How long transfers of one lane have been on their way."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._running: deque[tuple[torch.Event, torch.Event]] = deque()
        """On an accelerator: starts and ends of transfers that were not over when last looked at."""

    def note(self, start: Any, stop: Any) -> None:
        """Called by the lane's thread: a transfer ran between these stamps."""
        if isinstance(stop, float):
            self._seconds += stop - start
        else:
            self._running.append((start, stop))

    @property
    def seconds(self) -> float:
        """Of transfers that are over."""
        while self._running and self._running[0][1].query():
            start, stop = self._running.popleft()
            self._seconds += start.elapsed_time(stop) / 1000
        return self._seconds


@dataclass
class _Started:
    """Work whose first messages are posted."""

    work: LaneWork
    transfer: Transfer
    start: Any
    """A stamp."""


class _Driver:
    """What the lane's thread does: at most one transfer is being ended while the next has begun."""

    def __init__(
        self,
        queued: queue.SimpleQueue[_Queued | None],
        device: torch.device,
        stream: torch.Stream | None,
        rank: int,
        use: LinkUse,
        idle: Callable[[], None] | None,
    ) -> None:
        self._queued, self._rank, self._use, self._idle = queued, rank, use, idle
        self._device, self._stream, self._clock = device, stream, Clock(device)
        self._broken = ""
        self._free = 0.0
        """On the CPU, when the last transfer ended: in an accelerator's stream none begins before that."""
        self.over = False
        """Nothing more will come."""

    def take(self, *, block: bool) -> _Started | None:
        """Begins the next work, if there is any: waits for one, for at most IDLE seconds, if `block`."""
        if self.over:
            return None
        try:
            item = self._queued.get(block=block, timeout=IDLE)
        except queue.Empty:
            if block and self._idle is not None:
                try:
                    self._idle()
                except Exception:  # the process group's store has ended
                    self._idle = None
            return None
        if item is None:
            self.over = True
            return None
        work, run, ready = item
        started = _Started(work, iter(()), None)
        try:
            if self._broken:
                raise Error(self._broken)
            with self._stream or nullcontext():
                device_streams.follow(ready, self._device)
                started.start = self._clock.stamp()
                started.transfer = run()
                next(started.transfer, None)
        except Exception as e:
            self._fail(started, e)
        return started

    def end(self, started: _Started) -> _Started | None:
        """Runs work to its end; returns the next if that could begin meanwhile."""
        following: _Started | None = None
        work = started.work
        try:
            with self._stream or nullcontext():
                for _ in started.transfer:
                    following = following or self.take(block=False)
                if not work._error:
                    self._note(started, self._clock.stamp())
        except Exception as e:
            self._fail(started, e)
        work._done.set()
        return following

    def _note(self, started: _Started, now: Any) -> None:
        """Notes when the work ran, and on an accelerator what to wait for."""
        work, start = started.work, started.start
        if self._stream is None:
            start, self._free = max(start, self._free), now
        else:
            work._event = now
        work.span = start, now
        self._use.note(start, now)

    def _fail(self, started: _Started, e: Exception) -> None:
        """Ends work that failed; whatever begins later fails for the same reason."""
        what = f"{started.work.what} failed on rank {self._rank}, is another rank lost?"
        self._broken = self._broken or f"overlap: {what} ({first_line(e)})"
        started.work._error, started.transfer = self._broken, iter(())


def _run(
    queued: queue.SimpleQueue[_Queued | None],
    device: torch.device,
    stream: torch.Stream | None,
    rank: int,
    use: LinkUse,
    idle: Callable[[], None] | None,
) -> None:
    torch.set_grad_enabled(False)  # for this thread: communication is part of no graph
    driver = _Driver(queued, device, stream, rank, use, idle)
    started: _Started | None = None
    while not driver.over or started is not None:
        started = driver.take(block=True) if started is None else driver.end(started)
    _finishes.pop(threading.current_thread(), None)


_finishes: dict[threading.Thread, Callable[[], None]] = {}
"""How to end each running thread. Not kept by lane: a model that went out of scope may still be sending."""

_registered = 0
"""The process whose exit handlers are registered; a fork of it has to register its own."""


def _finish(thread: threading.Thread, queued: queue.SimpleQueue[_Queued | None], seconds: float) -> None:
    """Lets the queued work end and then the thread; waits for at most `seconds`."""
    queued.put(None)
    thread.join(seconds)


def _finish_all() -> None:
    for finish in list(_finishes.values()):
        finish()


def _finish_at_exit() -> None:
    """Called when a lane begins: what it needs (a channel's threads, `keep`) was registered before and ends after."""
    global _registered
    if _registered != os.getpid():
        _registered = os.getpid()
        atexit.register(_finish_all)
        Finalize(None, _finish_all, exitpriority=0)  # forks by multiprocessing end without atexit


def when_destroyed(group: dist.ProcessGroup, act: Callable[[], None]) -> None:
    """Calls `act` once, when `destroy_process_group()` takes this group from torch's registry."""
    registry = distributed_c10d._world.pg_group_ranks
    if not isinstance(registry[group], RegistryEntry):
        registry[group] = RegistryEntry(registry[group])
    weakref.finalize(registry[group], act).atexit = False


class RegistryEntry(dict[int, int]):
    """The ranks of a group as torch keeps them, in a dictionary of which one can know when torch drops it."""


def _finish_before_shutdown(group: dist.ProcessGroup, finish: Callable[[], None]) -> None:
    """Lets a group that is destroyed end its work first. Only for groups made in Python: gloo's own go on working."""
    if type(group) is not dist.ProcessGroup:
        end = group.shutdown

        def shutdown() -> None:
            finish()
            end()

        group.shutdown = shutdown  # type: ignore[method-assign]

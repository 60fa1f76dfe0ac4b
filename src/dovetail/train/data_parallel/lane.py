"""One thread per process that communicates while the others compute.

gloo's messages need somebody who waits for one and starts the next. The thread takes work in the order in which it was
submitted, which is the same on all ranks, and runs each to its end. Python's lock is free while it waits and while
torch adds. Who needs the result waits for the `LaneWork` that `submit` returned, as for torch's Work.

A script that ends after its last iteration may end before what that iteration sent has arrived. Other ranks still need
it, to store the model or to pass it on, so a process stays until its lanes have nothing left to do.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist

from dovetail.core.errors import Error, first_line


class LaneWork:
    """Communication that is queued, running or done."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.span = (0.0, 0.0)
        """Start and end, by time.perf_counter(); set when it is done."""
        self._done = threading.Event()
        self._error = ""
        self._event: Any = None

    def wait(self) -> None:
        """Returns when the work is done; raises one clear line if it failed, or any work before it.

        On an accelerator the current stream waits and not the host. The work itself ends within the group's time-out,
        so this wait needs none of its own.
        """
        self._done.wait()
        if self._error:
            raise Error(self._error)
        if self._event is not None:  # not tested on the hardware at hand
            torch.accelerator.current_stream().wait_event(self._event)


_Queued = tuple[LaneWork, Callable[[], None], Any]
"""(the work, the function that does it, an accelerator's event to wait for first)"""


class CommunicationLane:
    """Runs work in order on a thread of its own. When one fails, all behind it fail too.

    `patience` is how many seconds the end of the process, or of `group`, waits for what is queued. When another rank is
    lost, the running work fails at the latest after the group's time-out, and all behind it fail at once.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, patience: float) -> None:
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        # A daemon: a rank that fails while a message hangs must still be able to end.
        args = (self._queue, device, group.rank())
        self._thread = threading.Thread(target=_run, args=args, name="dovetail-lane", daemon=True)
        self._device = device
        finish = functools.partial(_finish, self._thread, self._queue, patience)
        _finish_at_exit()
        _finishes[self._thread] = finish
        _finish_before_shutdown(group, finish)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)  # the thread must not outlive its owner

    def submit(self, what: str, run: Callable[[], None]) -> LaneWork:
        """Queues `run`; `what` names it in errors."""
        if not self._thread.is_alive():
            raise Error(f"overlap: {what} comes too late: the process or its process group has ended")
        work = LaneWork(what)
        ready = None
        if self._device.type != "cpu":  # not tested on the hardware at hand
            ready = torch.Event(self._device)
            ready.record()
        self._queue.put((work, run, ready))
        return work


def _run(queued: queue.SimpleQueue[_Queued | None], device: torch.device, rank: int) -> None:
    torch.set_grad_enabled(False)  # for this thread: communication is part of no graph
    stream = None if device.type == "cpu" else torch.Stream(device)
    broken = ""
    while (item := queued.get()) is not None:
        work, run, ready = item
        if not broken:
            start = time.perf_counter()
            try:
                if stream is None:
                    run()
                else:  # not tested on the hardware at hand
                    with stream:
                        stream.wait_event(ready)
                        run()
                        work._event = torch.Event(device)
                        work._event.record()
            except Exception as e:
                broken = f"overlap: {work.what} failed on rank {rank}, is another rank lost? ({first_line(e)})"
            work.span = (start, time.perf_counter())
        work._error = broken
        work._done.set()
        del item, work, run, ready  # no reference to the caller's tensors is held while the thread waits
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


def _finish_before_shutdown(group: dist.ProcessGroup, finish: Callable[[], None]) -> None:
    """Lets a group that is destroyed end its work first. Only for groups made in Python: gloo's own go on working."""
    if type(group) is not dist.ProcessGroup:
        end = group.shutdown

        def shutdown() -> None:
            finish()
            end()

        group.shutdown = shutdown  # type: ignore[method-assign]

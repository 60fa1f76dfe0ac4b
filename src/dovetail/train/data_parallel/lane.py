"""One thread per process that communicates while the others compute.

gloo's messages need somebody who waits for one and starts the next. The thread takes jobs in the order in which they
were given, which is the same on all ranks, and runs each to its end: Python's lock is free while it waits and while
torch adds. Whoever needs a job's result waits for its ticket.

A script that ends after its last step may end before what that step sent has arrived. Other ranks still need it, to
store the model or to pass it on, so a process stays until its lanes have nothing left to do.
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

from dovetail.core.errors import Error
from dovetail.train.words import plain


class Ticket:
    """A job that is queued, running or done."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.span = (0.0, 0.0)
        """When it ran, by time.perf_counter()."""
        self._done = threading.Event()
        self._error = ""
        self._event: Any = None

    def wait(self) -> None:
        """Returns when the job is done; raises one clear line if it, or one before it, failed.

        On an accelerator the current stream waits and not the host. The job itself ends within the group's time-out,
        so waiting without one ends too.
        """
        self._done.wait()
        if self._error:
            raise Error(self._error)
        if self._event is not None:  # not tested on the hardware at hand
            torch.accelerator.current_stream().wait_event(self._event)


Job = tuple[Ticket, Callable[[], None], Any]


class Lane:
    """Runs jobs one after the other on a thread of its own. A job that fails fails all behind it.

    `patience` is how many seconds the end of the process, or of `group`, waits for what is queued. A job of a rank that
    lost another fails by itself, at the latest after the group's time-out, and whatever is behind it at once.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, patience: float) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A daemon: a rank that fails while a message hangs must still be able to end.
        args = (self._jobs, device, group.rank())
        self._thread = threading.Thread(target=_run, args=args, name="dovetail-lane", daemon=True)
        self._device = device
        finish = functools.partial(_finish, self._thread, self._jobs, patience)
        _finish_at_exit()
        _finishes[self._thread] = finish
        _finish_before_shutdown(group, finish)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)  # the thread must not outlive what it works for

    def submit(self, what: str, job: Callable[[], None]) -> Ticket:
        if not self._thread.is_alive():
            raise Error(f"overlap: {what} comes too late, the process or its process group has ended")
        ticket = Ticket(what)
        ready = None
        if self._device.type != "cpu":  # not tested on the hardware at hand
            ready = torch.Event(self._device)
            ready.record()
        self._jobs.put((ticket, job, ready))
        return ticket


def _run(jobs: queue.SimpleQueue[Job | None], device: torch.device, rank: int) -> None:
    torch.set_grad_enabled(False)  # for this thread: communication is part of no graph
    stream = None if device.type == "cpu" else torch.Stream(device)
    broken = ""
    while (item := jobs.get()) is not None:
        ticket, job, ready = item
        if not broken:
            start = time.perf_counter()
            try:
                if stream is None:
                    job()
                else:  # not tested on the hardware at hand
                    with stream:
                        stream.wait_event(ready)
                        job()
                        ticket._event = torch.Event(device)
                        ticket._event.record()
            except Exception as e:
                broken = f"overlap: {ticket.what} failed on rank {rank}, is another rank gone? ({plain(e)})"
            ticket.span = (start, time.perf_counter())
        ticket._error = broken
        ticket._done.set()
        del item, ticket, job, ready  # the tensors are the caller's again while we wait for more
    _finishes.pop(threading.current_thread(), None)


_finishes: dict[threading.Thread, Callable[[], None]] = {}
"""What ends each thread that runs. Not by lane: a model that went out of scope has sent its last parameters too."""

_registered = 0
"""The process that knows what to do at its end; a fork of it does not."""


def _finish(thread: threading.Thread, jobs: queue.SimpleQueue[Job | None], seconds: float) -> None:
    """Lets what is queued end and then the thread; waits for at most `seconds`."""
    jobs.put(None)
    thread.join(seconds)


def _finish_all() -> None:
    for finish in list(_finishes.values()):
        finish()


def _finish_at_exit() -> None:
    """Called when a lane begins: what it needs (threads of a channel, `keep`) was registered before and ends after."""
    global _registered
    if _registered != os.getpid():
        _registered = os.getpid()
        atexit.register(_finish_all)
        Finalize(None, _finish_all, exitpriority=0)  # forks by multiprocessing end without atexit


def _finish_before_shutdown(group: dist.ProcessGroup, finish: Callable[[], None]) -> None:
    """Lets a group that is destroyed end its work first, where it is made in Python: gloo's own goes on working."""
    if type(group) is not dist.ProcessGroup:
        end = group.shutdown

        def shutdown() -> None:
            finish()
            end()

        group.shutdown = shutdown  # type: ignore[method-assign]

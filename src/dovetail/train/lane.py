"""One thread per process that communicates while the others compute.

gloo's messages need somebody who waits for one and starts the next. The thread takes jobs in the order in which they
were given, which is the same on all ranks, and runs each to its end: Python's lock is free while it waits and while
torch adds. Whoever needs a job's result waits for its ticket.
"""

from __future__ import annotations

import atexit
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from dovetail.core.errors import Error


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

    @property
    def done(self) -> bool:
        return self._done.is_set()


Job = tuple[Ticket, Callable[[], None], Any]


class Lane:
    """Runs jobs one after the other on a thread of its own. A job that fails fails all behind it."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # A daemon: a rank that fails while a message hangs must still be able to end.
        args = (self._jobs, device, rank)
        self._thread = threading.Thread(target=_run, args=args, name="dovetail-lane", daemon=True)
        self._thread.start()
        self._device = device
        _lanes.add(self)
        weakref.finalize(self, self._jobs.put, None)  # the thread must not outlive what it works for

    def submit(self, what: str, job: Callable[[], None]) -> Ticket:
        ticket = Ticket(what)
        ready = None
        if self._device.type != "cpu":  # not tested on the hardware at hand
            ready = torch.Event(self._device)
            ready.record()
        self._jobs.put((ticket, job, ready))
        return ticket

    def stop(self, seconds: float) -> None:
        """Lets what is queued end and then the thread; waits for at most `seconds`."""
        self._jobs.put(None)
        self._thread.join(seconds)


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
                broken = f"overlap: {ticket.what} failed on rank {rank}, is another rank gone? ({_one_line(e)})"
            ticket.span = (start, time.perf_counter())
        ticket._error = broken
        ticket._done.set()
        del item, ticket, job, ready  # the tensors are the caller's again while we wait for more


def _one_line(error: Exception) -> str:
    """gloo's message without the place in its sources and without its advice."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first).partition(". This is typically")[0]


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Threads that return from C++ into an interpreter that is gone would end it badly."""
    for lane in list(_lanes):
        lane.stop(0.2)

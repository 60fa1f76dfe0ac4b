"""An emulated communication channel for torch.distributed: collectives strictly in order, each after an added latency.

gloo runs several collectives at once, which a GPU's communication stream does not, and a namespace on this machine has
no start-up time to speak of. The backend "dovetail-emulated" wraps gloo and adds both: one thread per process group
takes the collectives in the order of their calls, waits for the latency, and runs each to its end before the next.
It is an ordinary backend, so whatever uses torch.distributed runs on it unchanged:

    dist.init_process_group(register(latency=0.005))

The latency follows the ring law: an all-reduce among n ranks makes 2(n−1) steps, a reduce-scatter, an all-gather and
an all-to-all n−1, a message one. `latency` is what an all-reduce waits; the others wait in proportion to their steps.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.futures import Future

from dovetail.core.errors import Error, first_line

BACKEND = "dovetail-emulated"
LATENCY = "DOVETAIL_EMULATED_LATENCY"
"""Environment variable with the latency in seconds, where `register` is called without one."""

SETTLE = 0.1
"""Seconds in which gloo's threads, which need Python's lock for it, release their finished collectives."""

_NO_TIMEOUT = timedelta(0)  # what torch hands to `wait` when the caller gave no time-out
_latency = 0.0

# Steps of each collective in units of (n−1), by the names under which torch calls it on a process group.
_STEPS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "barrier"), 2),
    **dict.fromkeys(("allgather", "all_gather_single", "_allgather_base", "allgather_coalesced"), 1),
    **dict.fromkeys(("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), 1),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"), 1),
    **dict.fromkeys(("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), 1),
    **dict.fromkeys(("alltoall", "all_to_all_single", "alltoall_base"), 1),
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), 1),
}


def register(*, latency: float | None = None) -> str:
    """Makes the backend known to torch.distributed and returns its name.

    Groups made from now on add `latency` seconds to every all-reduce. Call it on every rank with the same value.
    """
    global _latency
    if latency is None:
        try:
            latency = float(os.environ.get(LATENCY, "0"))
        except ValueError:
            raise Error(f"{LATENCY}: expected seconds, got {os.environ[LATENCY]!r}") from None
    if not (math.isfinite(latency) and latency >= 0):
        raise Error(f"latency: expected seconds, at least 0, got {latency}")
    _latency = latency
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    return BACKEND


def leave() -> None:
    """Waits for all ranks at a barrier, then destroys this rank's process groups. For plain gloo too.

    A DDP module that outlives its group joins gloo's threads while it holds Python's lock, and a thread that is just
    releasing its last collective may be waiting for that lock: without a pause in between, ranks hang now and then
    (torch's issue 56297).
    """
    dist.barrier()
    time.sleep(SETTLE)
    dist.destroy_process_group()


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> EmulatedChannel:
    return EmulatedChannel(store, rank, size, timeout, latency=_latency)


class _CollectiveWork(dist.Work):
    """A collective that is queued, running or done."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._done = threading.Event()
        self._error = ""
        self._outputs: list[torch.Tensor] = []
        self._future: Future[list[torch.Tensor]] = Future()

    def finish(self, outputs: list[torch.Tensor]) -> None:
        self._outputs = outputs
        self._done.set()
        self._future.set_result(outputs)

    def fail(self, error: str) -> None:
        self._error = error
        self._done.set()
        self._future.set_exception(dist.DistBackendError(error))  # type: ignore[arg-type]  # torch's stub is wrong

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits for the end; without a time-out too this ends, as the collective ends within the group's time-out."""
        if not self._done.wait(timeout.total_seconds() or None):
            raise dist.DistBackendError(f"{self.name} did not end within {timeout.total_seconds():g} s")
        if self._error:
            raise dist.DistBackendError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and not self._error

    def exception(self) -> Exception | None:
        return dist.DistBackendError(self._error) if self._error else None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self._future


class _Send(_CollectiveWork):
    """A message that is sent after the latency: done when gloo has delivered it."""

    sent: dist.Work

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return super().wait(timeout) and self.sent.wait(timeout)

    def is_completed(self) -> bool:
        return super().is_completed() and self.sent.is_completed()


class _Worker:
    """One thread that runs jobs in order. When one fails, all behind it fail, as on an aborted communicator."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[_CollectiveWork, Callable[[], list[torch.Tensor]]] | None] = (
            queue.SimpleQueue()
        )
        self._broken = ""  # what went wrong first
        # A daemon: a rank that fails while a collective hangs must still be able to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, work: _CollectiveWork, job: Callable[[], list[torch.Tensor]]) -> None:
        self._jobs.put((work, job))

    def stop(self, seconds: float) -> None:
        """Lets what is queued end and then the thread; waits for at most `seconds`."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # for this thread: communication is not part of any graph
        while (item := self._jobs.get()) is not None:
            work, job = item
            if self._broken:
                work.fail(self._broken)
                continue
            try:
                work.finish(job())
            except Exception as e:
                self._broken = f"{work.name} failed: {first_line(e)}"
                work.fail(self._broken)
            del item, work, job  # no reference to the caller's tensors while we wait for the next job


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that returned from C++ after the interpreter has shut down would crash the process."""
    for worker in list(_workers):
        worker.stop(0.2)


class EmulatedChannel(dist.ProcessGroup):
    """A process group over gloo whose collectives run in order, on one thread, each after its latency.

    Messages (`send`, `recv`) are gloo's own, which match by peer and tag; a send starts after the latency of one step.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, latency: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the overload for subclasses; stubs omit it
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._inner = dist.ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._timeout = timeout
        self._step = latency / (2 * (size - 1)) if size > 1 else 0.0  # seconds that one step of a ring adds
        self._steps = size - 1
        self._collectives = _Worker(f"{BACKEND}-{rank}")
        self._messages: _Worker | None = None

    def getBackendName(self) -> str:
        return BACKEND

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> dist.Work:
        if self._step == 0:
            return self._inner.send(tensors, dstRank, tag)
        self._messages = self._messages or _Worker(f"{BACKEND}-{self.rank()}-messages")
        work, due = _Send("send"), time.monotonic() + self._step

        def job() -> list[torch.Tensor]:
            time.sleep(max(0.0, due - time.monotonic()))
            work.sent = self._inner.send(tensors, dstRank, tag)  # starts it; gloo completes it, so that sends overlap
            return tensors

        self._messages.submit(work, job)
        return work

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> dist.Work:
        return self._inner.recv(tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        return self._inner.recv_anysource(tensors, tag)

    def _collective(self, name: str, *args: Any, **options: Any) -> dist.Work:
        """Queues a collective; gloo gets the arguments unchanged, whichever of torch's signatures was used."""
        work = _CollectiveWork(name)
        latency = self._step * self._steps * _STEPS[name]

        def job() -> list[torch.Tensor]:
            if latency:
                time.sleep(latency)
            running: dist.Work = getattr(self._inner, name)(*args, **options)
            running.wait()  # gloo's own time-out ends it
            return _outputs(args)

        self._collectives.submit(work, job)
        return work

    def shutdown(self) -> None:
        for worker in (self._collectives, self._messages):
            if worker is not None:
                worker.stop(self._timeout.total_seconds())
        time.sleep(SETTLE)  # see `leave`
        self._inner.shutdown()


def _outputs(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that a collective wrote, by torch's convention its first argument; none for a barrier."""
    first = args[0] if args else []
    if isinstance(first, torch.Tensor):
        return [first]
    return list(first) if isinstance(first, (list, tuple)) else []


def _method(name: str) -> Callable[..., dist.Work]:
    def method(self: EmulatedChannel, *args: Any, **options: Any) -> dist.Work:
        return self._collective(name, *args, **options)

    return method


# torch's reducer calls these from C++ and torch.distributed from Python, both by name.
for _name in _STEPS:
    setattr(EmulatedChannel, _name, _method(_name))

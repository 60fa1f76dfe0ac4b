"""Tensors between machines: a gloo process group of two members for each executor that shares no memory with the job.

On the aggregator's machine an executor's model aliases the job's shared memory and nothing is copied. An executor on
another machine has an arena of the same layout of its own, and this channel keeps both in step:

1. The aggregator has one `Host`: a torch store on the address where it listens for executors. For each executor that
   joins from elsewhere it makes up a name, says store and name in its Welcome, and calls `invite`. The executor calls
   `join` with them. Both meet in the store and connect; from then on the store is not used.
2. With the first task of an iteration the aggregator `give`s the parameters and buffers, the executor `receive`s them.
3. With every task's end the executor `send`s the gradients (and worker 0 its buffers) before it says Done; the
   aggregator, which asked for them by `take` when it handed out the task, waits for that on hearing Done.

The aggregator's side runs on a thread of its own for each executor, in the order of the calls, so that a slow or dead
machine holds up nobody else; what arrives is kept aside until it is all there, so that a machine that comes back late
cannot write into what others compute with. Every wait ends: with `Lost` when the other side is gone or too slow, after
which the channel is closed and the executor has to join again. Tensors are never pickled: gloo sends their bytes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dovetail.cluster.transport.wire import Lost

TIMEOUT = 60.0
"""Seconds that one step may take by default: meeting, or sending everything once."""
AGGREGATOR, EXECUTOR = 0, 1
"""The two members."""


class Channel:
    """One side of a connection: `send` and `receive` lists of dense CPU tensors, which both sides know beforehand.

    Both sides name the same tensors (sizes and types) in the same order. A channel that has failed stays closed.
    """

    def __init__(self, group: dist.ProcessGroupGloo, member: int, *, timeout: float) -> None:
        self._group: dist.ProcessGroupGloo | None = group
        self._other = EXECUTOR if member == AGGREGATOR else AGGREGATOR
        self._timeout = timeout
        self._tag = 0

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Returns when the tensors may be written to again."""
        self._pass(tensors, sending=True)

    def receive(self, into: Sequence[torch.Tensor]) -> None:
        """Fills the tensors with what the other side sends next."""
        self._pass(into, sending=False)

    def close(self) -> None:
        """The other side's next step fails. No error if it is closed already."""
        self._group = None

    def _pass(self, tensors: Sequence[torch.Tensor], *, sending: bool) -> None:
        group: Any = self._group  # torch's stubs do not know its methods
        if group is None:
            raise Lost("the tensor channel is closed")
        try:
            started = []
            for tensor in tensors:
                if tensor.numel():  # gloo has no empty messages
                    assert tensor.is_contiguous() and tensor.device.type == "cpu", "a channel carries dense CPU tensors"
                    call = group.send if sending else group.recv
                    started.append(call([tensor.detach()], self._other, self._tag))
                self._tag += 1
            limit = timedelta(seconds=self._timeout)
            for work in started:
                work.wait(limit)
        except RuntimeError as e:
            self.close()
            raise Lost(f"the tensor channel: {_first_line(e)}") from None


def join(
    store: tuple[str, int], name: str, *, local: str, timeout: float = TIMEOUT, meeting: float | None = None
) -> Channel:
    """The executor's side: meets the aggregator under the name from its Welcome.

    `local` is this machine's address as the aggregator sees it: that of the control connection's own end.
    """
    wait = timedelta(seconds=meeting or timeout)
    try:
        opened = dist.TCPStore(store[0], store[1], is_master=False, timeout=wait)  # type: ignore[attr-defined]
    except RuntimeError as e:
        raise Lost(f"the tensor channel's store at {store[0]}:{store[1]}: {_first_line(e)}") from None
    return _connect(opened, name, EXECUTOR, local=local, timeout=timeout, meeting=wait)


class Host:
    """The aggregator's side: a store on `host` alone, and the executors that were invited."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self.host = host
        # Our own socket: torch would listen on every address of the machine.
        listening = socket.create_server((host, 0), family=_family(host))
        self.address: tuple[str, int] = (host, listening.getsockname()[1])
        # The store takes the descriptor over and closes it at its end.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            self.address[1],
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._invited = 0

    def invite(self, device: int) -> Peer:
        """Gets ready for an executor. Does not wait for it: the first `give` or `take` will, on the peer's thread."""
        self._invited += 1
        return Peer(self._store, f"device {device} join {self._invited}", local=self.host, timeout=self._timeout)


class Peer:
    """An executor on another machine, as its aggregator sees it."""

    def __init__(self, store: Store, name: str, *, local: str, timeout: float) -> None:
        self.name = name
        """For Welcome: under it both meet."""
        self._timeout = timeout
        self._aside: list[torch.Tensor] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tensors of {name}")
        meeting = timedelta(seconds=timeout)
        self._meeting: Future[Channel] = self._thread.submit(
            _connect, store, name, AGGREGATOR, local=local, timeout=timeout, meeting=meeting
        )

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends them behind what was asked for before. They stay as they are until the executor's Done."""
        self._submit(self._send, list(tensors))

    def take(self, into: Sequence[torch.Tensor]) -> Future[None]:
        """Asks for what the executor will send next; `into` is written when the result is fetched by `fetch`."""
        return self._submit(self._receive, list(into))

    def fetch(self, taken: Future[None], into: Sequence[torch.Tensor], *, timeout: float | None = None) -> None:
        """After the executor's Done: waits for what is still on its way, then fills `into`."""
        try:
            taken.result(self._timeout if timeout is None else timeout)
        except FutureTimeout:
            raise Lost(f"the tensors of {self.name} did not arrive") from None
        for target, source in zip(into, self._aside, strict=True):
            target.copy_(source)

    def close(self) -> None:
        """Lets go at once; the thread ends with its present step, which ends in time."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._meeting.done() and not self._meeting.cancelled() and self._meeting.exception() is None:
            self._meeting.result().close()

    def _submit(self, step: Callable[[list[torch.Tensor]], None], tensors: list[torch.Tensor]) -> Future[None]:
        try:
            return self._thread.submit(step, tensors)
        except RuntimeError:
            raise Lost(f"the tensor channel of {self.name} is closed") from None

    def _send(self, tensors: list[torch.Tensor]) -> None:
        with contextlib.suppress(Lost):  # a `take` follows, and says so
            self._meeting.result().send(tensors)

    def _receive(self, like: list[torch.Tensor]) -> None:
        if [(t.shape, t.dtype) for t in self._aside] != [(t.shape, t.dtype) for t in like]:
            self._aside = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]
        self._meeting.result().receive(self._aside)


def _connect(
    store: Store, name: str, member: int, *, local: str, timeout: float, meeting: timedelta
) -> Channel:  # fmt: skip
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=local)]
    options._threads = 1
    options._timeout = meeting
    try:
        group = gloo(PrefixStore(name, store), member, 2, options)
    except RuntimeError as e:
        raise Lost(f"the tensor channel {name!r} did not connect: {_first_line(e)}") from None
    return Channel(group, member, timeout=timeout)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__

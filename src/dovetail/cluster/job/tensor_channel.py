"""Tensors between machines: a gloo process group of two ranks for each executor that shares no memory with the job.

On the aggregator's machine an executor's model aliases the job's shared memory and nothing is copied. An executor on
another machine has its own arena with the same layout, and this channel copies between the two:

1. The aggregator has one `ChannelHost`: a torch store on the address where it listens for executors. For each executor
   that joins from another machine it calls `invite`, which makes up a name, and sends store and name in its Welcome.
   The executor calls `join` with them. Both connect through the store, which is not used afterwards.
2. With the first task of an iteration the aggregator `give`s the parameters and buffers, the executor `receive`s them.
3. At every task's end the executor `send`s the gradients (and worker 0 its buffers) before it sends Done; the
   aggregator, which asked for them by `take` when it assigned the task, waits for them when Done arrives.

The aggregator has a thread for each executor, which works in the order of the calls, so that a slow or dead machine
delays no other. What arrives is buffered until it is complete, so that a machine that returns late cannot write into
tensors that others use. Every wait ends, with `Lost` if the other side is lost or too slow; then the channel is closed
and the executor has to join again. Tensors are never pickled: gloo sends their bytes.
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
from dovetail.core.errors import first_line

TIMEOUT = 60.0
"""Seconds that connecting, or sending everything once, may take by default."""
AGGREGATOR, EXECUTOR = 0, 1
"""The two ranks of the process group."""


class Channel:
    """One side of a channel: `send` and `receive` lists of dense CPU tensors.

    Both sides must name tensors of the same sizes and types in the same order. A channel that has failed stays closed.
    """

    def __init__(self, group: dist.ProcessGroupGloo, rank: int, *, timeout: float) -> None:
        self._group: dist.ProcessGroupGloo | None = group
        self._other = EXECUTOR if rank == AGGREGATOR else AGGREGATOR
        self._timeout = timeout
        self._tag = 0

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Returns when the tensors may be written to again."""
        self._transfer(tensors, sending=True)

    def receive(self, into: Sequence[torch.Tensor]) -> None:
        """Fills the tensors with what the other side sends next."""
        self._transfer(into, sending=False)

    def close(self) -> None:
        """Closes the channel: the other side's next call fails. No error if it is closed already."""
        self._group = None

    def _transfer(self, tensors: Sequence[torch.Tensor], *, sending: bool) -> None:
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
            raise Lost(f"the tensor channel: {first_line(e)}") from None


def join(
    store: tuple[str, int], name: str, *, local: str, timeout: float = TIMEOUT, meeting: float | None = None
) -> Channel:
    """The executor's side: connects to the aggregator under the name from its Welcome.

    `local` is this machine's address as the aggregator sees it: that of the control connection's own end.
    """
    wait = timedelta(seconds=meeting or timeout)
    try:
        opened = dist.TCPStore(store[0], store[1], is_master=False, timeout=wait)  # type: ignore[attr-defined]
    except RuntimeError as e:
        raise Lost(f"the tensor channel's store at {store[0]}:{store[1]}: {first_line(e)}") from None
    return _connect(opened, name, EXECUTOR, local=local, timeout=timeout, meeting=wait)


class ChannelHost:
    """The aggregator's side: a store on `host` alone, and the executors that were invited."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self.host = host
        # A socket of our own: torch would listen on every address of the machine.
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

    def invite(self, device: int) -> ChannelPeer:
        """Prepares a channel to an executor. Does not wait for it: the peer's thread does."""
        self._invited += 1
        return ChannelPeer(self._store, f"device {device} join {self._invited}", local=self.host, timeout=self._timeout)


class ChannelPeer:
    """An executor on another machine, as its aggregator sees it."""

    def __init__(self, store: Store, name: str, *, local: str, timeout: float) -> None:
        self.name = name
        """The channel's name, for Welcome."""
        self._timeout = timeout
        self._buffer: list[torch.Tensor] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tensors of {name}")
        meeting = timedelta(seconds=timeout)
        self._meeting: Future[Channel] = self._thread.submit(
            _connect, store, name, AGGREGATOR, local=local, timeout=timeout, meeting=meeting
        )

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sends tensors, after earlier calls are done. They must not change until the executor's Done."""
        self._submit(self._send, list(tensors))

    def take(self, into: Sequence[torch.Tensor]) -> Future[None]:
        """Asks for what the executor will send next; `fetch` then fills `into`."""
        return self._submit(self._receive, list(into))

    def fetch(self, taken: Future[None], into: Sequence[torch.Tensor], *, timeout: float | None = None) -> None:
        """After the executor's Done: waits for what has not arrived yet, then fills `into`."""
        try:
            taken.result(self._timeout if timeout is None else timeout)
        except FutureTimeout:
            raise Lost(f"the tensors of {self.name} did not arrive") from None
        for target, source in zip(into, self._buffer, strict=True):
            target.copy_(source)

    def close(self) -> None:
        """Closes the channel at once; the thread ends with its present call, which has a time-out."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._meeting.done() and not self._meeting.cancelled() and self._meeting.exception() is None:
            self._meeting.result().close()

    def _submit(self, call: Callable[[list[torch.Tensor]], None], tensors: list[torch.Tensor]) -> Future[None]:
        try:
            return self._thread.submit(call, tensors)
        except RuntimeError:
            raise Lost(f"the tensor channel of {self.name} is closed") from None

    def _send(self, tensors: list[torch.Tensor]) -> None:
        with contextlib.suppress(Lost):  # the `take` that follows raises it
            self._meeting.result().send(tensors)

    def _receive(self, like: list[torch.Tensor]) -> None:
        if [(t.shape, t.dtype) for t in self._buffer] != [(t.shape, t.dtype) for t in like]:
            self._buffer = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]
        self._meeting.result().receive(self._buffer)


def _connect(
    store: Store, name: str, rank: int, *, local: str, timeout: float, meeting: timedelta
) -> Channel:  # fmt: skip
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=local)]
    options._threads = 1
    options._timeout = meeting
    try:
        group = gloo(PrefixStore(name, store), rank, 2, options)
    except RuntimeError as e:
        raise Lost(f"the tensor channel {name!r} did not connect: {first_line(e)}") from None
    return Channel(group, rank, timeout=timeout)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

"""What ranks do in tests of the emulated accelerator's process group: streams. Each makes its own group."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dovetail.emulate import accelerator

HANGS = 300.0
"""Seconds: a time-out that no test means to reach."""
BUSY = 0.5
"""Seconds that a device is kept busy, so that the host is certainly ahead of it."""

Group = Any
"""torch's type of process groups is not the one that its functions are annotated with."""


def device() -> torch.device:
    """This rank's device, which becomes the current one."""
    accelerator.load()
    module: Any = torch.get_device_module("emu")
    module.set_device(dist.get_rank() % 2)
    return torch.device("emu", dist.get_rank() % 2)


@contextlib.contextmanager
def fresh_group(timeout: float = HANGS, ranks: list[int] | None = None) -> Iterator[Group]:
    """A group of its own, destroyed at the end, whatever has become of it."""
    device()
    group = dist.new_group(ranks, backend="eccl", timeout=timedelta(seconds=timeout))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def synchronize() -> None:
    torch.accelerator.synchronize()


def occupy(seconds: float) -> None:
    """Keeps the current stream busy."""
    accelerator.occupy(seconds)


def line(call: Callable[[], Any]) -> str:
    """The message of what a call raises, with its type; empty if it raises nothing."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failure(call: Callable[[], Any]) -> str:
    """The message that a call, or the next look at the device, raises."""
    return line(call) or line(synchronize)


def count_resources() -> tuple[int, int]:
    """File descriptors, and threads that are no stream's, of this process."""
    gc.collect()
    tasks = [path / "comm" for path in Path("/proc/self/task").iterdir()]
    streams = sum(name.read_text().startswith("emu stream") for name in tasks if name.exists())
    return len(list(Path("/proc/self/fd").iterdir())), len(tasks) - streams


# --- Streams ----------------------------------------------------------------------------------------------------------


def wait_orders_streams_only() -> dict[str, Any]:
    """Whether the host was ahead of the device at each point, and what came out in the end."""
    here = device()
    with fresh_group() as group:
        x = torch.ones(4, device=here)
        dist.all_reduce(x, group=group)
        synchronize()
        accelerator.host_syncs(clear=True)
        occupy(BUSY)
        work = dist.all_reduce(x, async_op=True, group=group)
        ahead_at_launch = not work.is_completed()
        work.wait()
        ahead_after_wait = not work.is_completed()
        y = x * 3  # on the current stream, so behind the collective
        waited = sum(seen.count for seen in accelerator.host_syncs(clear=True))
        occupy(BUSY)
        z = torch.ones(4, device=here)
        none = dist.all_reduce(z, group=group)  # on the current stream
        ahead_of_a_synchronous_one = accelerator.host_syncs(clear=True) == []
        return {
            "ahead": [ahead_at_launch, ahead_after_wait, ahead_of_a_synchronous_one],
            "waits": waited,
            "none": none is None,
            "values": [y[0].item(), z[0].item()],
            "completed": work.is_completed(),
        }


def barrier_blocks_the_host() -> list[bool]:
    """Whether work of the current stream was over after a barrier, and after waiting for one."""
    here = device()
    over = []
    with fresh_group() as group:
        for asynchronous in (False, True):
            occupy(BUSY / 2)
            done = torch.Event("emu")
            done.record()
            work = dist.barrier(group=group, async_op=asynchronous, device_ids=[here.index])
            if work is not None:
                work.wait()
            over.append(done.query())
    return over


def forgotten_waits() -> dict[str, str]:
    """What the detector says where a wait is missing, by what was forgotten."""
    here, rank = device(), dist.get_rank()
    said = {}
    with fresh_group() as group:
        x = torch.ones(4, device=here)
        work = dist.all_reduce(x, async_op=True, group=group)
        said["all_reduce"] = line(lambda: x + 1)
        work.wait()
        said["waited"] = line(lambda: x + 1)

        out = torch.empty(8, device=here)
        work = dist.all_gather_single(out, torch.ones(4, device=here), async_op=True, group=group)
        said["gathered"] = line(lambda: out.sum())
        work.wait()

        source = torch.ones(4, device=here)
        work = dist.all_reduce(source, async_op=True, group=group)
        said["overwritten"] = line(lambda: source.zero_())
        work.wait()

        many = [torch.ones(4, device=here) for _ in range(3)]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as coalesced:
            for one in many:
                dist.all_reduce(one, group=group)
        said["coalesced"] = line(lambda: many[1] + 1)
        coalesced.wait()

        mail = torch.full((4,), float(rank), device=here)
        ops = [dist.P2POp(dist.isend, mail, group=group, group_peer=1 - rank)]
        ops.append(dist.P2POp(dist.irecv, arrived := torch.empty(4, device=here), group=group, group_peer=1 - rank))
        requests = dist.batch_isend_irecv(ops)
        said["batch"] = line(lambda: arrived + 1)
        for request in requests:
            request.wait()

        side = torch.Stream(here)
        with side:
            made = torch.ones(4, device=here)
        said["launched too early"] = line(lambda: dist.all_reduce(made, async_op=True, group=group))
        side.synchronize()
        x = torch.ones(4, device=here)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            dist.all_reduce(x, group=group)
        said["another stream"] = line(lambda: x + 1)
        side.synchronize()
        accelerator.races(clear=True)
    return said


def memory_outlives_its_owner() -> dict[str, Any]:
    """Tensors that nobody holds while a collective uses them are neither overwritten nor reported."""
    here, rank = device(), dist.get_rank()
    with fresh_group() as group:
        accelerator.races(clear=True)
        results = [torch.empty(2 * 256, device=here) for _ in range(8)]
        works = []
        for i, result in enumerate(results):
            occupy(0.02)
            work = dist.all_gather_single(
                result, torch.full((256,), float(10 * i + rank), device=here), async_op=True, group=group
            )
            torch.full((256,), -1.0, device=here)  # would take the input's place if that were free
            works.append(work)
        for work in works:
            work.wait()
        sums = [result.sum().item() for result in results]
        for _ in range(8):  # neither waited for nor held
            dist.all_reduce(torch.ones(256, device=here), async_op=True, group=group)
            torch.zeros(256, device=here)
        dist.barrier(group, device_ids=[here.index])
        synchronize()
        gc.collect()
        return {"sums": sums, "races": accelerator.races(clear=True)}


def futures_follow_streams() -> dict[str, Any]:
    """A callback on a work's future runs at once on the host, on a stream behind the collective."""
    here = device()
    with fresh_group() as group:
        x = torch.ones(4, device=here)
        occupy(BUSY)
        work = dist.all_reduce(x, async_op=True, group=group)
        called: list[bool] = []

        def halved(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            called.append(work.is_completed())
            return future.value()[0] / 2

        future = work.get_future().then(halved)
        (result,) = [future.wait()]
        return {"completed when called": called, "value": result[0].item(), "result": work.result()[0][0].item()}


def threads_may_share_a_group() -> list[float]:
    """Two host threads that take turns keep the order of collectives on all ranks."""
    here = device()
    turns = [threading.Event(), threading.Event()]
    sums: list[torch.Tensor] = []
    with fresh_group() as group:

        def call(mine: threading.Event, other: threading.Event) -> None:
            for _ in range(5):
                assert mine.wait(HANGS)
                mine.clear()
                x = torch.ones(len(sums) + 1, device=here)
                dist.all_reduce(x, group=group)
                sums.append(x)
                other.set()

        threads = [threading.Thread(target=call, args=(turns[i], turns[1 - i])) for i in range(2)]
        turns[0].set()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        synchronize()
        return [x.sum().item() for x in sums]

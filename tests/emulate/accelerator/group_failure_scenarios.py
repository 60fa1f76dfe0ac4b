"""What ranks do in tests of the emulated accelerator's process group: messages, what goes wrong, and what is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .group_scenarios import (
    BUSY,
    HANGS,
    Group,
    count_resources,
    device,
    failure,
    fresh_group,
    line,
    occupy,
    synchronize,
)

SOON = 2.0
"""Seconds: a time-out that a test reaches."""


# --- Point to point ---------------------------------------------------------------------------------------------------


def both_receive_first() -> list[str]:
    """What a rank gets that receives before it sends, as the other one does; then, what a batch of both gets."""
    here, other = device(), 1 - dist.get_rank()
    with fresh_group(SOON) as group:
        arrives, leaves = torch.empty(4, device=here), torch.ones(4, device=here)
        dist.irecv(arrives, group_src=other, group=group)
        dist.isend(leaves, group_dst=other, group=group)
        said = [failure(lambda: None)]
        said.append(line(lambda: dist.all_reduce(leaves, group=group)))
    with fresh_group() as group:
        ops = [
            dist.P2POp(dist.irecv, arrives, group=group, group_peer=other),
            dist.P2POp(dist.isend, leaves * 5, group=group, group_peer=other),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return [*said, str(arrives.tolist())]


def messages_keep_their_order() -> list[float]:
    """What arrives of many messages, in turn in both directions, some in batches of several."""
    here, rank = device(), dist.get_rank()
    got: list[torch.Tensor] = []
    with fresh_group() as group:
        for i in range(6):
            x = torch.empty(3, device=here)
            if (i + rank) % 2:
                dist.send(torch.full((3,), float(i), device=here), group_dst=1 - rank, group=group)
            else:
                dist.recv(x, group_src=1 - rank, group=group)
                got.append(x)
        arrive = [torch.empty(2, device=here) for _ in range(3)]
        ops = [dist.P2POp(dist.irecv, x, group=group, group_peer=1 - rank) for x in arrive]
        for i in range(3):
            leaves = torch.full((2,), 10.0 + i, device=here)
            ops.append(dist.P2POp(dist.isend, leaves, group=group, group_peer=1 - rank))
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return [x[0].item() for x in got + arrive]


# --- What goes wrong --------------------------------------------------------------------------------------------------


def one_rank_stays_away() -> dict[str, Any]:
    """Rank 0 calls a collective that rank 1 does not call; then both go on with another group."""
    here, rank = device(), dist.get_rank()
    said: dict[str, Any] = {}
    with fresh_group(SOON) as group:
        x = torch.ones(3, 2, device=here)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True, group=group)
            said["wait returned"] = line(lambda: work.wait())
            said["device"] = line(synchronize)
            said["wait again"] = line(lambda: work.wait())
            said["exception"] = str(work.exception())
            said["completed"] = work.is_completed()
        dist.barrier()  # of gloo's group: rank 1 comes late
        said["next call"] = failure(lambda: dist.all_reduce(x, group=group))
        said["and the next"] = line(lambda: dist.broadcast(x, group_src=0, group=group))
        said["kernels"] = (x * 0 + 1).sum().item()
    with fresh_group() as group:
        y = torch.ones(2, device=here)
        dist.all_reduce(y, group=group)
        said["another group"] = y[0].item()
    return said


def a_wait_with_a_timeout() -> dict[str, Any]:
    """`wait(timeout)` blocks the host, and ends the group when it is over; a longer one returns."""
    here, rank = device(), dist.get_rank()
    with fresh_group() as group:
        x = torch.ones(3, device=here)
        occupy(BUSY / 2)
        work = dist.all_reduce(x, async_op=True, group=group)
        work.wait(timedelta(seconds=HANGS))
        said: dict[str, Any] = {"blocked": work.is_completed()}
        if rank == 0:
            late = dist.all_reduce(x, async_op=True, group=group)
            said["late"] = line(lambda: late.wait(timedelta(milliseconds=50)))
        dist.barrier()
        return said


def a_timeout_that_is_changed() -> str:
    """The group's time-out is set to another one while it lives."""
    here, rank = device(), dist.get_rank()
    with fresh_group() as group:
        group._get_backend(here)._set_default_timeout(timedelta(seconds=SOON / 2))
        said = failure(lambda: dist.all_reduce(torch.ones(2, device=here), group=group)) if rank == 0 else ""
        dist.barrier()
        return said


def aborted() -> dict[str, str]:
    """One rank aborts while both wait for messages that nobody sends."""
    here, rank = device(), dist.get_rank()
    said = {}
    with fresh_group() as group:
        x = torch.empty(3, device=here)
        work = dist.irecv(x, group_src=1 - rank, group=group)
        assert work is not None
        if rank == 0:
            group.abort()
            said["device"] = line(synchronize)
        else:
            said["device"] = failure(lambda: None)
        said["wait"] = line(lambda: work.wait())
        said["next call"] = line(lambda: dist.all_reduce(x, group=group))
    return said


def different_calls() -> dict[str, str]:
    """What ranks get that call different operations, sizes, types, roots or lengths, each with a group of its own."""
    here, rank = device(), dist.get_rank()
    x, whole = torch.ones(4, device=here), torch.ones(4, device=here, dtype=torch.int32)
    first = rank == 0

    def coalesced(group: Group, *sizes: int) -> None:
        with dist.distributed_c10d._coalescing_manager(group):
            for size in sizes:
                dist.all_reduce(torch.ones(size, device=here), group=group)

    calls: dict[str, Callable[[Group], Any]] = {
        "operation": lambda g: dist.all_reduce(x, group=g) if first else dist.broadcast(x, group_src=0, group=g),
        "size": lambda g: dist.all_reduce(x if first else torch.ones(2, 3, device=here), group=g),
        "type": lambda g: dist.all_reduce(x if first else whole, group=g),
        "root": lambda g: dist.broadcast(x, group_src=rank, group=g),
        "reduction": lambda g: dist.all_reduce(x, op=dist.ReduceOp.SUM if first else dist.ReduceOp.MAX, group=g),
        "splits": lambda g: dist.all_to_all_single(
            torch.empty(4, device=here), x, [2, 2], [1, 3] if first else [2, 2], group=g
        ),
        "message": lambda g: (
            dist.send(x, group_dst=1, group=g)
            if first
            else dist.recv(torch.empty(3, device=here), group_src=0, group=g)
        ),
        "coalesced": lambda g: coalesced(g, 4, 4) if first else coalesced(g, 4, 3),
    }
    said = {}
    for name, call in calls.items():
        with fresh_group(HANGS) as group:
            ok = torch.ones(1, device=here)
            dist.all_reduce(ok, group=group)
            said[name] = failure(lambda call=call, group=group: call(group))  # type: ignore[misc]
    return said


def refused() -> dict[str, str]:
    """What is refused before anything is sent, as NCCL refuses it."""
    here, rank = device(), dist.get_rank()
    with fresh_group() as group:
        x = torch.ones(4, 4, device=here)
        backend = group._get_backend(here)
        said = {
            "cpu": line(lambda: dist.all_reduce(torch.ones(2), group=group)),
            "cpu, asked directly": line(lambda: backend.allreduce([torch.ones(2)])),
            "not contiguous": line(lambda: dist.all_reduce(x[:, 1], group=group)),
            "short": line(lambda: dist.all_reduce(x.to(torch.int16), group=group)),
            "BAND": line(lambda: dist.all_reduce(x.int(), op=dist.ReduceOp.BAND, group=group)),
            "AVG of bool": line(lambda: dist.all_reduce(x.bool(), op=dist.ReduceOp.AVG, group=group)),
            "any source": line(lambda: dist.recv(x, group=group)),
            "two devices": line(
                lambda: dist.all_gather(
                    [x, torch.ones(4, 4, device="emu:1" if here.index == 0 else "emu:0")], x, group=group
                )
            ),
            "sizes": line(lambda: dist.all_gather_single(torch.empty(3, device=here), x, group=group)),
            "monitored": line(lambda: backend.monitored_barrier()),
        }
        y = torch.full((2,), float(rank), device=here)
        dist.all_reduce(y, group=group)  # the group has met none of these
        return said | {"after": str(y.tolist())}


def groups_of_groups() -> dict[str, Any]:
    """new_group of some ranks, of ranks in another order, and many one after the other, which leave nothing behind."""
    here, rank = device(), dist.get_rank()
    found: dict[str, Any] = {}
    with fresh_group(ranks=[1]) as alone:
        x = torch.full((2,), 7.0, device=here)
        if rank == 1:
            dist.all_reduce(x, group=alone)
        found["alone"] = x[0].item()

    def made_and_destroyed() -> None:
        with fresh_group() as group:
            x = torch.ones(2, device=here)
            dist.all_reduce(x, async_op=True, group=group)  # shutdown waits for it

    made_and_destroyed()
    before = count_resources()
    for _ in range(5):
        made_and_destroyed()
    end = time.monotonic() + HANGS
    while (now := count_resources()) > before and time.monotonic() < end:
        time.sleep(0.02)  # the store's server closes its ends of connections when it next looks
    found["left"] = [b - a for a, b in zip(before, now, strict=True)]
    return found

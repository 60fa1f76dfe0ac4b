"""The emulated channel: torch's collectives, in order, after a latency; its errors are one line, its threads end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dovetail.core.errors import Error
from dovetail.emulate import launch as launch_module
from dovetail.emulate.channel import BACKEND, LATENCY, register
from dovetail.emulate.launch import LaunchError, launch, report

RANKS = 3


ADDED = 0.04  # seconds


def run(scenario: str, *, env: dict[str, str] | None = None) -> list[Any]:
    return [r.report for r in launch([__file__, scenario], ranks=RANKS, timeout=600, env=env)]


@pytest.fixture(scope="module")
def healthy() -> list[Any]:
    """What each rank reports of several checks, all in one start of the ranks."""
    return run("healthy", env={LATENCY: str(ADDED)})


def test_every_collective_gives_what_gloo_gives(healthy: list[Any]) -> None:
    assert [found["collectives"] for found in healthy] == [True] * RANKS


def test_collectives_end_in_the_order_of_their_calls(healthy: list[Any]) -> None:
    assert [found["order"] for found in healthy] == [[True] * 5] * RANKS


def test_the_latency_follows_the_ring_law(healthy: list[Any]) -> None:
    for taken in (found["latency"] for found in healthy):
        assert taken["all_reduce"] >= ADDED
        assert taken["reduce_scatter"] >= ADDED / 2
        assert taken["all_gather"] >= ADDED / 2
        assert taken["message"] >= ADDED / (2 * (RANKS - 1))


def test_a_destroyed_group_leaves_no_thread(healthy: list[Any]) -> None:
    assert [found["threads"] for found in healthy] == [["MainThread"]] * RANKS


def test_a_lost_peer_fails_every_queued_collective_in_one_line_and_no_thread_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_module, "GRACE", 300.0)  # the others may report it before they are ended
    with pytest.raises(LaunchError, match=r"^rank 2 ended with exit code 7") as caught:
        run("lost peer")
    for r in caught.value.results[:2]:
        assert len(r.report["errors"]) == 3
        for error in r.report["errors"]:
            assert error.startswith("allreduce failed: ") and "\n" not in error
        assert r.report["threads"] == ["MainThread"]


def test_the_group_s_time_out_holds() -> None:
    found = run("time-out")[:2]
    assert all("allreduce failed: " in result for result in found)
    # The first rank to time out closes its connections, which the other may notice before its own time is over.
    assert any("imed out" in result for result in found)


def test_a_rank_can_leave_with_a_collective_pending() -> None:
    with pytest.raises(LaunchError, match=r"^rank 0 ended with exit code 1: .*ValueError: leaving$"):
        run("leave")


@pytest.mark.parametrize("latency", [-1.0, float("nan"), float("inf")])
def test_a_wrong_latency_is_one_line(latency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Error, match=r"^latency: expected seconds, at least 0, got "):
        register(latency=latency)
    monkeypatch.setenv(LATENCY, "soon")
    with pytest.raises(Error, match=f"^{LATENCY}: expected seconds, got 'soon'$"):
        register()


def healthy_ranks(rank: int) -> Any:
    found = {"collectives": collectives(rank), "order": order(rank), "latency": latency(rank)}
    dist.destroy_process_group()
    return found | {"threads": [t.name for t in threading.enumerate()]}


def collectives(rank: int) -> Any:
    """All of them on our channel and on gloo beside it, with the same arguments."""
    assert dist.get_backend() == BACKEND
    gloo = dist.new_group(backend="gloo")
    mine = torch.arange(6.0) + 10 * rank

    def every(group: dist.ProcessGroup | None) -> list[Any]:
        out: list[Any] = []
        root = rank == 0
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            dist.all_reduce(x := mine.clone(), op, group=group)
            out.append(x)
        dist.broadcast(x := mine.clone(), 1, group=group)
        out.append(x)
        dist.all_gather(xs := [torch.zeros(6) for _ in range(RANKS)], mine, group=group)
        out.append(xs)
        dist.all_gather_single(x := torch.zeros(6 * RANKS), mine, group=group)
        out.append(x)
        dist.reduce_scatter(x := torch.zeros(2), list(mine.split(2)), group=group)
        out.append(x)
        dist.reduce_scatter_single(x := torch.zeros(2), mine, group=group)
        out.append(x)
        dist.all_to_all_single(x := torch.zeros(6), mine, group=group)
        out.append(x)
        dist.all_to_all(xs := [torch.zeros(2) for _ in range(RANKS)], list(mine.split(2)), group=group)
        out.append(xs)
        dist.reduce(x := mine.clone(), 0, group=group)
        out.append(x if root else None)
        gathered = [torch.zeros(6) for _ in range(RANKS)] if root else None
        dist.gather(mine, gathered, 0, group=group)
        out.append(gathered)
        dist.scatter(x := torch.zeros(2), list(mine.split(2)) if root else None, 0, group=group)
        out.append(x)
        dist.all_gather_object(objects := [None] * RANKS, {"rank": rank}, group=group)
        out.append(objects)
        dist.broadcast_object_list(sent := [f"from {rank}"], 0, group=group)
        out.append(sent)
        work = dist.all_reduce(x := mine.clone(), group=group, async_op=True)
        out.append(work.get_future().then(lambda f: f.value()[0] * 2).wait())
        pair = [
            dist.P2POp(dist.isend, mine, (rank + 1) % RANKS, group),
            dist.P2POp(dist.irecv, x := torch.zeros(6), (rank - 1) % RANKS, group),
        ]
        for request in dist.batch_isend_irecv(pair):
            request.wait()
        out.append(x)
        dist.barrier(group=group)
        return out

    assert plain(every(None)) == plain(every(gloo))
    part = dist.new_group([0, 2])  # a group of some ranks is a channel of its own
    if rank != 1:
        dist.all_reduce(x := torch.ones(1), group=part)
        assert float(x) == 2
    return True


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def order(rank: int) -> Any:
    """A small collective behind a large one: on gloo itself it would overtake."""
    found = []
    for _ in range(5):
        large = dist.all_reduce(torch.ones(2**21), async_op=True)
        dist.all_reduce(torch.ones(1))
        found.append(large.is_completed())
        large.wait()
    return found


def latency(rank: int) -> Any:
    def taken(call: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def message() -> None:
        requests = [dist.isend(torch.ones(1), (rank + 1) % RANKS), dist.irecv(torch.ones(1), (rank - 1) % RANKS)]
        for request in requests:
            assert request is not None
            request.wait()

    return {
        "all_reduce": taken(lambda: dist.all_reduce(torch.ones(1))),
        "reduce_scatter": taken(lambda: dist.reduce_scatter_single(torch.ones(1), torch.ones(RANKS))),
        "all_gather": taken(lambda: dist.all_gather_single(torch.ones(RANKS), torch.ones(1))),
        "message": taken(message),
    }


def lost_peer(rank: int) -> Any:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    if rank == 2:
        os._exit(7)
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    errors = []
    for work in works:
        try:
            work.wait()
        except dist.DistBackendError as e:
            errors.append(str(e))
    dist.destroy_process_group()
    return {"errors": errors, "threads": [t.name for t in threading.enumerate()]}


def time_out(rank: int) -> Any:
    impatient = dist.new_group(timeout=timedelta(seconds=10))
    dist.barrier()
    said = ""
    if rank != 2:
        try:
            dist.all_reduce(torch.ones(1), group=impatient)
        except dist.DistBackendError as e:
            said = str(e)
    dist.barrier()  # no rank leaves before the others are done
    return said


def leave(rank: int) -> Any:
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("leaving")
    time.sleep(600)


if __name__ == "__main__":
    scenario = sys.argv[1]
    dist.init_process_group(register(), timeout=timedelta(seconds=300))
    scenarios = {"healthy": healthy_ranks, "lost peer": lost_peer, "time-out": time_out, "leave": leave}
    report(scenarios[scenario](dist.get_rank()))

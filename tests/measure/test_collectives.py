"""Real process groups on loopback: two gloo processes measure and must agree byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import COLLECTIVES, Network
from dovetail.measure import network

RANK = """
import sys, datetime
from pathlib import Path
import torch, torch.distributed as dist
from dovetail import measure
from dovetail.core import store
from dovetail.measure.clock import Clock

torch.set_num_threads(1)
folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if sys.argv[6] == "uneven":  # on rank 0 everything seems to take one second, on rank 1 two, on rank 2 three
    Clock.seconds = lambda self, stamps: [100.0 * (i // 2) + (rank + 1) * (i % 2) for i in range(len(stamps))]
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks,
                        timeout=datetime.timedelta(seconds=120))
max_bytes, budget = int(sys.argv[4]), float(sys.argv[5])
found = measure.network(max_bytes=max_bytes, repeats=4, budget=budget, name="loopback", emulated=True)
store.write(folder / f"{rank}.json", found)
dist.barrier()
dist.destroy_process_group()
"""


def measured(folder: Path, ranks: int, max_bytes: int, budget: float, clock: str = "real") -> list[bytes]:
    """What each rank of a new process group found, as stored."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank), str(ranks), str(max_bytes), str(budget), clock],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [(folder / f"{rank}.json").read_bytes() for rank in range(ranks)]


def test_two_ranks_measure_every_collective_and_agree_byte_for_byte(tmp_path: Path) -> None:
    first, second = measured(tmp_path, ranks=2, max_bytes=50_000, budget=60)
    assert first == second
    found = files.read(tmp_path / "0.json", Network)
    assert (found.name, found.ranks, found.measured, found.emulated) == ("loopback", 2, True, True)
    assert "gloo" in found.source
    assert list(found.collectives) == list(COLLECTIVES)
    for collective in found.collectives.values():
        assert collective.samples[0].bytes == 1024
        assert collective.samples[-1].bytes == 50_000
        assert all(3 <= s.seconds.samples <= 4 for s in collective.samples)
        assert all(s.seconds.median > 0 for s in collective.samples)


def test_three_ranks_share_messages_evenly_stop_where_the_budget_ends_and_believe_the_slowest(tmp_path: Path) -> None:
    everyone = measured(tmp_path, ranks=3, max_bytes=2**22, budget=0, clock="uneven")
    assert len(set(everyone)) == 1
    found = files.read(tmp_path / "0.json", Network)
    for collective in found.collectives.values():
        assert [s.bytes for s in collective.samples] == [1032, 4104]
        assert all((s.seconds.samples, s.seconds.low, s.seconds.high) == (3, 3.0, 3.0) for s in collective.samples)
    assert "the budget of 0 s allowed all_reduce up to 4104 bytes only" in found.source


def test_without_a_process_group_there_is_one_clear_line() -> None:
    with pytest.raises(Error, match="no process group to measure"):
        network(max_bytes=1024)


def test_a_world_of_one_gets_one_clear_line() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(Error, match="1 rank has no network to measure"):
            network(max_bytes=1024)
    finally:
        dist.destroy_process_group()


def test_wrong_options_get_one_clear_line() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(Error, match="max_bytes: expected at least 1024, got 1000"):
            network(max_bytes=1000)
        with pytest.raises(Error, match=r"collectives: expected some of all_reduce.*got broadcast"):
            network(max_bytes=1024, collectives=("broadcast",))  # type: ignore[arg-type]
        with pytest.raises(Error, match=r"collectives: expected some of all_reduce.*got none"):
            network(max_bytes=1024, collectives=())
        with pytest.raises(Error, match="repeats: expected at least 3, got 2"):
            network(max_bytes=1024, repeats=2)
        found = network(max_bytes=4096, repeats=3, device=torch.device("cpu"))
        assert (found.ranks, found.name) == (4, "fake-4")
    finally:
        dist.destroy_process_group()

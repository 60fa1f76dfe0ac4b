"""Measured networks: real process groups on loopback must agree byte for byte; the fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import COLLECTIVES, CostSample, Network
from dovetail.core.profile import exactly
from dovetail.measure import network
from dovetail.measure.collectives import fit

RANK = """
import sys, datetime
from pathlib import Path
import torch, torch.distributed as dist
from dovetail import measure
from dovetail.core import files
from dovetail.measure.clock import Clock

torch.set_num_threads(1)
folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if sys.argv[6] == "uneven":  # on rank 0 everything seems to take one second, on rank 1 two, on rank 2 three
    Clock.seconds = lambda self, stamps: [100.0 * (i // 2) + (rank + 1) * (i % 2) for i in range(len(stamps))]
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks,
                        timeout=datetime.timedelta(seconds=120))
max_bytes, budget = int(sys.argv[4]), float(sys.argv[5])
more = {}
if sys.argv[6] == "real":
    calm = torch.ones(64, 64)
    more["compute"] = lambda: calm @ calm
    more["reduced"] = {"int8": {"all_reduce": lambda full: dist.all_reduce(full[: len(full) // 4])}}
found = measure.network(max_bytes=max_bytes, repeats=4, budget=budget, name="loopback", emulated=True, **more)
files.write(folder / f"{rank}.json", found)
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
        assert all(1 <= s.seconds.samples <= 3 * 4 for s in collective.samples)  # less what was disturbed
        medians = [s.seconds.median for s in collective.samples]
        assert medians[0] > 0 and medians == sorted(medians)
    assert 0 < found.noise <= 1 and 0 <= found.lost < 1
    assert found.contention is not None
    assert list(found.reduced) == ["int8"] and list(found.reduced["int8"]) == ["all_reduce"]
    assert [s.bytes for s in found.reduced["int8"]["all_reduce"].samples][-1] == 50_000


def test_three_ranks_share_messages_evenly_stop_where_the_budget_ends_and_believe_the_slowest(tmp_path: Path) -> None:
    everyone = measured(tmp_path, ranks=3, max_bytes=2**22, budget=0, clock="uneven")
    assert len(set(everyone)) == 1
    found = files.read(tmp_path / "0.json", Network)
    for collective in found.collectives.values():
        assert [s.bytes for s in collective.samples] == [1032, 4104]
        # Four messages in a row take three seconds by that clock.
        assert all((s.seconds.samples, s.seconds.low, s.seconds.high) == (3, 0.75, 0.75) for s in collective.samples)
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
        with pytest.raises(Error, match="reduced: expected some of bf16, int8, got full"):
            network(max_bytes=1024, reduced={"full": {}})
        with pytest.raises(Error, match=r"reduced\[int8\]: expected some of all_reduce.*got broadcast"):
            network(max_bytes=1024, reduced={"int8": {"broadcast": print}})  # type: ignore[dict-item]
        found = network(max_bytes=4096, repeats=3, device=torch.device("cpu"))
        assert (found.ranks, found.name) == (4, "fake-4")
    finally:
        dist.destroy_process_group()


# -- the fit, without a network --


def sample(nbytes: int, seconds: float) -> CostSample:
    return CostSample(bytes=nbytes, seconds=exactly(seconds))


GRIDS = st.lists(st.integers(1, 2**30), min_size=2, max_size=20, unique=True).map(sorted)


@given(sizes=GRIDS, latency=st.floats(1e-6, 1e-1), per_byte=st.floats(1e-11, 1e-7))
def test_an_affine_table_is_recovered(sizes: list[int], latency: float, per_byte: float) -> None:
    law = fit([sample(size, latency + per_byte * size) for size in sizes])
    predicted = np.array([law.latency + law.seconds_per_byte * size for size in sizes])
    assert predicted == pytest.approx([latency + per_byte * size for size in sizes], rel=1e-6)
    assert law.error < 1e-6
    if per_byte * (sizes[-1] - sizes[0]) > latency / 100 and latency > per_byte * sizes[0] / 100:  # both can be told
        assert law.seconds_per_byte == pytest.approx(per_byte, rel=1e-4)
        assert law.latency == pytest.approx(latency, rel=1e-4)


@given(points=st.dictionaries(st.integers(1, 2**30), st.floats(0, 10), min_size=1, max_size=20))
def test_no_part_is_ever_negative_and_no_other_law_is_better(points: dict[int, float]) -> None:
    samples = [sample(size, seconds) for size, seconds in sorted(points.items())]
    law = fit(samples)
    assert law.latency >= 0
    assert law.seconds_per_byte >= 0
    assert law.error >= 0

    def badness(latency: float, per_byte: float) -> float:
        seconds = np.maximum([s.seconds.median for s in samples], 1e-12)
        return float(np.sum(((latency + per_byte * np.array([s.bytes for s in samples])) / seconds - 1) ** 2))

    best = badness(law.latency, law.seconds_per_byte)
    largest = samples[-1].bytes
    top = law.latency + law.seconds_per_byte * largest
    for more in (1.01, 0.99):
        assert best <= badness(law.latency * more, law.seconds_per_byte) + 1e-6 * (1 + best)
        assert best <= badness(law.latency, law.seconds_per_byte * more) + 1e-6 * (1 + best)
    if len(samples) > 1:
        assert best <= badness(law.latency + top / 100, law.seconds_per_byte) + 1e-6 * (1 + best)
        assert best <= badness(law.latency, law.seconds_per_byte + top / 100 / largest) + 1e-6 * (1 + best)


def test_small_messages_count_as_much_as_large_ones() -> None:
    """Absolute least squares would put the latency far off, since the one slow large message outweighs everything."""
    samples = [sample(2**k, 1e-4 + 1e-9 * 2**k) for k in range(10, 26)] + [sample(2**26, 3 * (1e-4 + 1e-9 * 2**26))]
    law = fit(samples)
    assert law.latency == pytest.approx(1e-4, rel=0.2)
    assert law.seconds_per_byte == pytest.approx(1e-9, rel=0.35)


def test_one_point_is_all_bandwidth() -> None:
    law = fit([sample(1000, 0.5)])
    assert law.latency == 0.0 and law.seconds_per_byte == pytest.approx(0.0005)

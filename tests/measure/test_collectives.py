"""Measured networks: real process groups on loopback must agree byte for byte; the fit, and the choice of sizes."""

from __future__ import annotations

import itertools
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
from dovetail.measure.collectives import LEAST, WARMUP, fit, round_up, sizes, table

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
found = measure.network(max_bytes=max_bytes, repeats=4, budget=budget, name="loopback", emulated=True)
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


# -- the fit, and the choice of sizes and repeats, without a network --


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


@given(max_bytes=st.integers(1024, 2**32), ranks=st.integers(2, 2048), factor=st.sampled_from([2, 4]))
def test_sizes_ascend_from_the_smallest_to_the_largest_in_equal_parts_per_rank(
    max_bytes: int, ranks: int, factor: int
) -> None:
    grid = sizes(max_bytes, ranks, factor=factor)
    assert grid == sorted(set(grid))
    assert all(size % (4 * ranks) == 0 for size in grid)
    assert grid[-1] == round_up(max_bytes, ranks)
    assert grid[0] == round_up(1024, ranks)
    assert all(b <= factor * a + 4 * ranks * factor for a, b in itertools.pairwise(grid))


class Emulated:
    """A network whose time is counted, not spent."""

    def __init__(self, latency: float, per_byte: float) -> None:
        self.latency, self.per_byte, self.now = latency, per_byte, 0.0
        self.calls: dict[int, int] = {}

    def time(self, nbytes: int, count: int) -> list[float]:
        self.calls[nbytes] = self.calls.get(nbytes, 0) + count
        self.now += count * self.of(nbytes)
        return [self.of(nbytes)] * count

    def of(self, nbytes: int) -> float:
        return self.latency + self.per_byte * nbytes

    def table(self, max_bytes: int, budget: float, repeats: int = 20) -> tuple[CostSample, ...]:
        return table(self.time, lambda: self.now, max_bytes=max_bytes, ranks=2, repeats=repeats, budget=budget)


@given(
    latency=st.floats(1e-6, 1e-2),
    per_byte=st.floats(1e-12, 1e-7),
    max_bytes=st.integers(1024, 2**28),
    budget=st.floats(0.01, 60),
)
def test_the_budget_holds_but_for_the_least_that_makes_a_table(
    latency: float, per_byte: float, max_bytes: int, budget: float
) -> None:
    network = Emulated(latency, per_byte)
    samples = network.table(max_bytes, budget)
    # Two sizes and the first look are measured in any case, each at least three times.
    first = [s.bytes for s in samples[:2]]
    least = (WARMUP + LEAST) * sum(map(network.of, first)) + (WARMUP + LEAST) * network.of(1024)
    least += LEAST * network.of(min(max_bytes, 2**20))
    assert network.now <= max(budget, least) + LEAST * network.of(samples[-1].bytes) + 1e-9
    assert all(s.seconds.samples >= LEAST for s in samples)


def test_ample_time_gives_powers_of_two_and_all_repeats() -> None:
    samples = Emulated(1e-4, 1e-9).table(2**24, budget=60)
    assert [s.bytes for s in samples] == [2**k for k in range(10, 25)]
    assert {s.seconds.samples for s in samples} == {20}


def test_short_time_gives_powers_of_four_and_fewer_repeats_for_the_largest() -> None:
    samples = Emulated(1e-4, 1e-8).table(2**24, budget=3)
    assert [s.bytes for s in samples] == [2**k for k in range(10, 25, 2)]
    assert samples[0].seconds.samples == 20
    assert LEAST <= samples[-1].seconds.samples < 20


def test_sizes_that_cannot_be_paid_for_are_left_out() -> None:
    samples = Emulated(1e-3, 1e-6).table(2**30, budget=2)
    assert len(samples) >= 2
    assert samples[-1].bytes < 2**20


def test_the_largest_size_gets_its_fewest_repeats_before_smaller_ones_get_more() -> None:
    samples = Emulated(1e-4, 1e-8).table(2**24, budget=1.5)
    assert samples[-1].bytes == 2**24
    assert samples[0].seconds.samples == 20


def test_hiccups_of_small_messages_do_not_forbid_large_ones() -> None:
    class Hiccups(Emulated):
        def of(self, nbytes: int) -> float:
            return super().of(nbytes) + (5e-3 if nbytes in (2048, 4096, 16384) else 0.0)

    samples = Hiccups(1e-4, 1e-9).table(2**26, budget=10)
    assert [s.bytes for s in samples] == [2**k for k in range(10, 27)]
    assert all(s.seconds.samples == 20 for s in samples[:-3])

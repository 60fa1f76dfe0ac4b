"""What computing and communicating cost each other: figures from made-up rounds, and a real process group."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.measure.contention import ContentionRound, busy_device, contention, from_rounds
from tests.ranks import run_all


def rounds_of(
    gap: float,
    collective: float,
    compute: float,
    *,
    single: float = 0.01,
    computing: float = 0.03,
    queued: int = 5,
    jitter: float = 0.0,
    bursts: float = 0.0,
    seed: int = 0,
) -> list[ContentionRound]:
    """Rounds in which two things that slow each other down by known shares run until both are done."""
    random = np.random.default_rng(seed)
    queue = queued * single + (queued - 1) * gap
    if computing * (1 + compute) <= queue * (1 + collective):  # computing ends first, the queue goes on alone
        together = computing * (1 + compute)
        beside = together, together + queue - together / (1 + collective)
    else:
        together = queue * (1 + collective)
        beside = together + computing - together / (1 + compute), together
    figures = (queued * single, computing, queue, *beside)

    def seen(seconds: float) -> float:
        burst = seconds * float(random.pareto(1.0)) if random.random() < bursts else 0.0
        return seconds * float(random.uniform(1 - jitter, 1 + jitter)) + burst

    return [ContentionRound(*map(seen, figures)) for _ in range(15)]


@given(
    gap=st.floats(0, 1e-2),
    collective=st.floats(0, 2.9),
    compute=st.floats(0, 2.9),
    single=st.floats(1e-4, 1e-1),
    computing=st.floats(1e-3, 1),
    queued=st.integers(2, 64),
)
def test_known_shares_are_found_whoever_ends_first(
    gap: float, collective: float, compute: float, single: float, computing: float, queued: int
) -> None:
    rounds = rounds_of(gap, collective, compute, single=single, computing=computing, queued=queued)
    found = from_rounds(rounds, queued=queued)
    assert found.gap == pytest.approx(gap, rel=1e-6, abs=1e-9)
    assert found.collective == pytest.approx(collective, rel=1e-4, abs=1e-6)
    assert found.compute == pytest.approx(compute, rel=1e-4, abs=1e-6)


@given(seed=st.integers(0, 2**20))
def test_bursts_and_jitter_move_the_shares_by_little(seed: int) -> None:
    found = from_rounds(rounds_of(1e-3, 0.3, 0.2, jitter=0.02, bursts=0.2, seed=seed), queued=5)
    assert found.collective == pytest.approx(0.3, abs=0.15)
    assert found.compute == pytest.approx(0.2, abs=0.15)


def test_what_is_within_the_noise_is_nothing() -> None:
    nothing = [from_rounds(rounds_of(0, 0, 0, jitter=0.05, seed=seed), queued=5) for seed in range(40)]
    for figures in zip(*[(n.gap, n.collective, n.compute) for n in nothing], strict=True):
        assert sum(f == 0.0 for f in figures) >= 30
        assert max(figures) < 0.1 and min(figures) == 0.0


def test_no_share_is_beyond_what_two_can_do_to_each_other() -> None:
    starved = [ContentionRound(0.05, 0.03, 0.05, 0.03, 0.5)] * 5
    assert (from_rounds(starved, queued=5).collective, from_rounds(starved, queued=5).compute) == (3.0, 0.0)


# -- real processes --


def measured_contention(given_function: bool) -> dict[str, Any]:
    """On every rank: the contention of a matrix product with all-reduces, torch's own or a given function's."""
    threads: set[str] = set()

    def ours(full: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        dist.all_reduce(full)

    via: Any = {"all_reduce": ours} if given_function else {}
    found = contention(None, busy_device(size=64), nbytes=4096, budget=0.5, via=via)
    return {"found": [found.gap, found.collective, found.compute], "threads": sorted(threads)}


def failing_function() -> str:
    """On every rank: what a collective that fails on its thread raises."""

    def fails(full: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no wire")

    try:
        contention(None, busy_device(size=8), nbytes=4096, budget=0.1, via={"all_reduce": fails})
    except RuntimeError as e:
        return str(e)
    return "nothing"


def test_ranks_measure_contention_and_agree() -> None:
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (measured_contention, {"given_function": False}),
        (measured_contention, {"given_function": True}),
        (failing_function, {}),
    ]
    first, second = run_all(calls)
    assert [r["found"] for r in first[:2]] == [r["found"] for r in second[:2]]
    for report in first[:2]:
        assert all(math.isfinite(f) and f >= 0 for f in report["found"])
    assert first[0]["threads"] == [] and first[1]["threads"] == ["MainThread", "dovetail-contention"]
    assert first[2] == second[2] == "no wire"


def test_without_a_process_group_there_is_one_clear_line() -> None:
    with pytest.raises(Error, match="no process group to measure"):
        contention(None, lambda: None)

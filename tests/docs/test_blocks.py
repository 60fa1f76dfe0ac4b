"""The comparison that holds the tutorial to its outputs is itself right: it lets figures vary, and nothing else."""

from __future__ import annotations

import pytest

from .blocks import missing

PRINTED = """
step 25: loss 1.2345
  network   all-reduce: 7.2 ms to start, then 186 MB/s (fit within 11%)
-> auto     2     220 ms   937 us       +0.1 %
one all-reduce of all 2.68 MiB of
gradients takes 24.0 ms
rank 0/network       ▄▄bucket 0▄▄   █1█
░░ forward  ▒▒ backward
"""


@pytest.mark.parametrize(
    "promised",
    [
        "step 100: loss 0.9",
        "  network all-reduce: 1.1 us to start, then 2 GB/s (fit within 3%)",
        "-> auto   13   1.1 s  2 ms  +5 %",
        "one all-reduce of all 3 KiB of gradients takes 1 s",  # wrapped elsewhere
        "rank 3/network ▄▄▄0▄▄▄▄▄ ███bucket 1█",
        "░░ forward  ▒▒ backward",
        "…",
    ],
)
def test_figures_units_and_line_ends_may_differ(promised: str) -> None:
    assert missing(promised, PRINTED) == []


@pytest.mark.parametrize(
    "promised", ["step 100: accuracy 0.9", "-> robust 2", "gradients of all", "step 25 lost", "rank 0/compute ▄▄"]
)
def test_words_may_not(promised: str) -> None:
    assert missing(promised, PRINTED) == [promised]

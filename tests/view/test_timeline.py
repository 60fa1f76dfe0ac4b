"""Timelines in the terminal: every cell shows the kind that fills most of it."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from dovetail.core.timeline import Span, Timeline
from dovetail.view.example import timelines
from dovetail.view.palette import LOOKS
from dovetail.view.timeline import TimelineView, axis, bins, headline
from dovetail.view.tracks import Piece


def text(*drawn: Timeline, width: int = 80, **options: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(TimelineView(drawn, **options))
    return out.getvalue()


def line(printed: str, track: str) -> str:
    return next(x for x in printed.splitlines() if x.startswith(track)).removeprefix(track)


def test_a_cell_shows_what_fills_most_of_it() -> None:
    drawn = [Piece("forward", 0.0, 2.6, "f"), Piece("backward", 2.6, 5.0, "b")]
    assert bins(drawn, 0.0, 1.0, 6) == ["forward", "forward", "forward", "backward", "backward", ""]


def test_a_short_all_reduce_does_not_vanish_among_idle_cells() -> None:
    assert bins([Piece("exposed", 2.4, 2.6, "x")], 0.0, 1.0, 5) == ["", "", "exposed", "", ""]


def test_hundreds_of_spans_become_their_share_of_the_line() -> None:
    spans = [
        Span(track="rank 0/compute", name=f"l{i}", kind="forward" if i < 300 else "backward", start=i, stop=i + 1)
        for i in range(900)
    ]
    row = line(text(Timeline(name="t", source="predicted", spans=tuple(spans))), "rank 0/compute")
    assert row.count(LOOKS["forward"].sign) * 2 == pytest.approx(row.count(LOOKS["backward"].sign), abs=2)


def test_rows_show_names_and_where_communication_is_exposed() -> None:
    printed = text(timelines()[0])
    network = line(printed, "rank 0/network")
    hidden, exposed = LOOKS["communication"].sign, LOOKS["exposed"].sign
    assert network.index("bucket 0") < network.index("bucket 1")
    assert hidden in network[: network.index("bucket 1") - 2] and exposed in network[network.index("bucket 0") + 9 :]
    assert "forward" in line(printed, "rank 0/compute")
    assert "20.0 ms of communication exposed" in printed


def test_several_timelines_share_one_axis_and_say_what_they_are() -> None:
    predicted, measured = timelines()
    printed = text(predicted, measured)
    assert "predicted · example: 119 ms" in printed and "measured, emulated · example: 128 ms" in printed
    rows = [x for x in printed.splitlines() if x.startswith("rank 0/compute")]
    assert len(rows[0].rstrip()) < len(rows[1].rstrip()) <= 80
    assert printed.count("|50 ms") == 1


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert all(len(x) <= width for x in text(*timelines(), width=width).splitlines())


def test_tracks_beyond_the_limit_are_counted_not_drawn() -> None:
    spans = tuple(Span(track=f"rank {i}/compute", name="f", kind="forward", start=0, stop=1) for i in range(40))
    printed = text(Timeline(name="t", source="predicted", spans=spans), max_tracks=8)
    assert "rank 7/compute" in printed and "rank 8/compute" not in printed and "and 32 more tracks" in printed


def test_a_timeline_without_spans_or_without_time_is_drawn_without_a_crash() -> None:
    assert "0 s" in text(Timeline(name="t", source="measured", spans=()))
    instant = Span(track="rank 0/compute", name="f", kind="forward", start=1, stop=1)
    assert "rank 0/compute" in text(Timeline(name="t", source="measured", spans=(instant,)))


@pytest.mark.parametrize(
    ("longest", "cells", "ticks"), [(0.128, 65, ["50 ms", "100 ms"]), (3.2, 60, ["1 s", "2 s"]), (1e-5, 60, ["5 us"])]
)
def test_the_axis_has_round_ticks_where_they_belong(longest: float, cells: int, ticks: list[str]) -> None:
    drawn = axis(longest, cells)
    factor = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    for tick in ticks:
        number, unit = tick.split()
        assert drawn.index(f"|{tick}") == round(float(number) * factor[unit] / longest * cells)


def test_without_unicode_there_are_plain_signs() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    Console(file=out, width=80).print(TimelineView([timelines()[0]]))
    out.seek(0)
    row = line(out.read(), "rank 0/network")
    assert "~" in row and "#" in row and "?" not in row


def test_the_module_shows_itself() -> None:
    command = [sys.executable, "-m", "dovetail.view.timeline"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert headline(timelines()[0])[:40] in done.stdout


def test_of_two_spans_at_a_time_one_has_its_name_whole() -> None:
    spans = [
        Span(track="rank 0/network", name=f"bucket {i}", kind="communication", start=start, stop=start + 6.0)
        for i, start in enumerate((0.0, 1.0, 9.0))
    ]
    row = line(text(Timeline(name="t", source="measured", spans=tuple(spans))), "rank 0/network")
    assert row.count("bucket") == 2 and "bucket 0" in row and "bucket 2" in row

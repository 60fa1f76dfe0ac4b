"""Lanes never overlap, and exposed communication is what computing does not cover."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.timeline import Span, Timeline
from dovetail.view import tracks
from dovetail.view.example import timelines

Pairs = list[tuple[int, int]]
pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1])), max_size=20)


def span(start: float, stop: float, *, kind: str = "communication", track: str = "rank 0/network") -> Span:
    return Span(track=track, name="x", kind=kind, start=start, stop=stop)  # type: ignore[arg-type]


def covered(intervals: Pairs) -> set[int]:
    """Unit cells, as an oracle on integers."""
    return {cell for a, b in intervals for cell in range(a, b)}


@given(pairs)
def test_lanes_keep_every_span_and_let_none_overlap(given_pairs: Pairs) -> None:
    lanes = tracks.lanes(span(a, b) for a, b in given_pairs)
    assert sorted((s.start, s.stop) for lane in lanes for s in lane) == sorted(given_pairs)
    for lane in lanes:
        assert all(a.stop <= b.start for a, b in itertools.pairwise(lane))


@given(pairs)
def test_there_are_no_more_lanes_than_spans_at_one_time(given_pairs: Pairs) -> None:
    lanes = tracks.lanes(span(a, b) for a, b in given_pairs if a < b)
    assert len(lanes) == max(sum(a <= t < b for a, b in given_pairs) for t in range(51))


@given(pairs, pairs)
def test_exposed_is_communication_without_computing(traffic: Pairs, work: Pairs) -> None:
    spans = [span(a, b) for a, b in traffic]
    spans += [span(a, b, kind="backward", track="rank 0/compute") for a, b in work]
    timeline = Timeline(name="t", source="predicted", spans=tuple(spans))
    expected = len(covered(traffic) - covered(work)) if work else 0
    assert tracks.exposed(timeline) == expected


@given(pairs, pairs)
def test_pieces_cover_a_span_exactly_once(traffic: Pairs, work: Pairs) -> None:
    busy = tracks.union(work)
    for a, b in traffic:
        drawn = tracks.pieces([span(a, b)], busy)
        cells = [(int(p.start), int(p.stop)) for p in drawn]
        assert covered(cells) == covered([(a, b)])
        assert sum(y - x for x, y in cells) == b - a
        hidden = covered([c for c, p in zip(cells, drawn, strict=True) if p.look == "communication"])
        assert hidden == covered([(a, b)]) & covered(work)


def test_the_slowest_rank_counts_and_links_without_computing_do_not() -> None:
    spans = (
        span(0, 10, kind="backward", track="rank 0/compute"),
        span(5, 12, track="rank 0/network"),
        span(0, 10, kind="backward", track="rank 1/compute"),
        span(5, 15, track="rank 1/network"),
        span(0, 99, track="link a-b"),
    )
    assert tracks.exposed(Timeline(name="t", source="measured", spans=spans)) == pytest.approx(5)


def test_what_all_ranks_send_together_counts_for_each_and_is_hidden_while_one_of_them_computes() -> None:
    spans = (
        span(0, 4, kind="backward", track="rank 0/compute"),
        span(0, 10, kind="backward", track="rank 1/compute"),
        span(3, 12, track="all ranks/network"),
        span(2, 5, track="rank 0/network"),
        span(11, 13, track="rank 1/network"),
    )
    timeline = Timeline(name="t", source="predicted", spans=spans)
    assert tracks.traffic(timeline) == {"rank 0": (7, 3), "rank 1": (7, 3)}
    assert tracks.exposed(timeline) == 3
    assert tracks.computing(timeline)["all ranks"] == [(0, 10)]


def test_ranks_come_in_numeric_order() -> None:
    spans = tuple(span(0, 1, track=f"rank {i}/network") for i in (10, 9, 1))
    assert list(tracks.by_track(Timeline(name="t", source="predicted", spans=spans))) == [
        "rank 1/network",
        "rank 9/network",
        "rank 10/network",
    ]


def test_computing_stands_above_communication() -> None:
    assert list(tracks.by_track(timelines()[0]))[:2] == ["rank 0/compute", "rank 0/network"]

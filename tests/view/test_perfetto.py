"""The trace is what Perfetto's JSON reader expects, and holds every span."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.timeline import Span, Timeline
from dovetail.view import perfetto
from dovetail.view.example import timelines

Event = dict[str, Any]


def events(trace: dict[str, Any], phase: str) -> list[Event]:
    return [e for e in trace["traceEvents"] if e["ph"] == phase]


def names(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M") if e["name"] == what}


spans = st.builds(
    lambda rank, track, start, length, size: Span(
        track=f"rank {rank}/{track}", name="x", kind="communication", start=start, stop=start + length, bytes=size
    ),
    st.integers(0, 3),
    st.sampled_from(["compute", "network"]),
    st.floats(0, 100),
    st.floats(0, 10),
    st.integers(0, 10**9),
)


@given(st.lists(spans, max_size=30))
def test_every_span_is_there_with_its_duration_and_slices_of_a_thread_never_overlap(drawn: list[Span]) -> None:
    timeline = Timeline(name="t", source="predicted", spans=tuple(drawn))
    slices = events(perfetto.trace([timeline]), "X")
    assert len(slices) == len(drawn)
    key = [(e["ts"], e["dur"]) for e in slices]
    expected = [(s.start * 1e6, s.duration * 1e6) for s in drawn]
    for column in (0, 1):
        assert sorted(k[column] for k in key) == pytest.approx(sorted(e[column] for e in expected), abs=0.002)
    assert sorted(e["args"].get("bytes", 0) for e in slices) == sorted(s.bytes for s in drawn)
    threads: dict[tuple[int, int], list[Event]] = {}
    for e in slices:
        threads.setdefault((e["pid"], e["tid"]), []).append(e)
    for row in threads.values():
        row.sort(key=lambda e: (e["ts"], e["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(row))


def test_ranks_are_processes_tracks_are_threads_and_all_have_names() -> None:
    trace = perfetto.trace(timelines())
    processes = list(names(trace, "process_name").values())
    assert processes == [
        "rank 0 · example (predicted)",
        "rank 1 · example (predicted)",
        "rank 0 · example (measured, emulated)",
        "rank 1 · example (measured, emulated)",
    ]
    threads = names(trace, "thread_name")
    assert set(threads.values()) == {"compute", "network"} and len(threads) == 8
    assert {(e["pid"], e["tid"]) for e in events(trace, "X")} == set(threads)


def test_times_are_microseconds_and_arguments_carry_bytes() -> None:
    trace = perfetto.trace(timelines()[:1])
    bucket = next(e for e in events(trace, "X") if e["name"] == "bucket 0")
    assert (bucket["ts"], bucket["dur"], bucket["cat"]) == (62000.0, 22000.0, "communication")
    assert bucket["args"] == {"kind": "communication", "bytes": 12 << 20}


def test_overlapping_spans_of_a_track_get_threads_of_their_own() -> None:
    two = tuple(Span(track="rank 0/network", name=n, kind="communication", start=0, stop=1) for n in "ab")
    trace = perfetto.trace([Timeline(name="t", source="measured", spans=two)])
    assert sorted(names(trace, "thread_name").values()) == ["network", "network 2"]


def test_the_file_is_json_and_always_the_same(tmp_path: Path) -> None:
    predicted, measured = timelines()
    perfetto.write([predicted, measured], tmp_path / "a.json")
    shuffled = Timeline(name=predicted.name, source="predicted", spans=predicted.spans[::-1])
    perfetto.write([shuffled, measured], tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert len(json.loads((tmp_path / "a.json").read_text())["traceEvents"]) == 18 * 2 + 2 * (4 + 8)

"""Timelines as Chrome-trace JSON, which ui.perfetto.dev and chrome://tracing open.

Each rank of each timeline becomes a process, each of its tracks a thread. Viewers nest slices of one thread, so spans
that overlap on a track are dealt onto further threads ("network 2") instead of being drawn wrong. The same timelines
always give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.core.files import write_text
from dovetail.core.timeline import Span, Timeline

from . import tracks


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace as a JSON object; times in microseconds, exact to the nanosecond."""
    names: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []
    pid = 0
    for timeline in timelines:
        kind = timeline.source + (", emulated" if timeline.emulated else "")
        threads: dict[str, list[tuple[str, list[Span]]]] = {}
        for track, spans in tracks.by_track(timeline).items():
            for i, lane in enumerate(tracks.lanes(spans)):
                name = tracks.thread(track) + (f" {i + 1}" if i else "")
                threads.setdefault(tracks.group(track), []).append((name, lane))
        for group, lanes in threads.items():
            pid += 1
            names += _metadata("process", pid, 0, f"{group} · {timeline.name} ({kind})", pid)
            for tid, (name, lane) in enumerate(lanes, start=1):
                names += _metadata("thread", pid, tid, name, tid)
                slices += [_slice(span, pid, tid) for span in lane]
    slices.sort(key=lambda e: (e["ts"], e["pid"], e["tid"], e["dur"]))
    return {"displayTimeUnit": "ms", "traceEvents": names + slices}


def write(timelines: Sequence[Timeline], path: str | Path) -> None:
    write_text(path, json.dumps(trace(timelines), indent=0) + "\n")


def _metadata(what: str, pid: int, tid: int, name: str, order: int) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {"name": f"{what}_name", **common, "args": {"name": name}},
        {"name": f"{what}_sort_index", **common, "args": {"sort_index": order}},
    ]


def _slice(span: Span, pid: int, tid: int) -> dict[str, Any]:
    # Whole nanoseconds: a slice that ends where the next one starts must not seem to overlap it by a rounding error.
    start, stop = round(span.start * 1e9), round(span.stop * 1e9)
    event = {"name": span.name, "cat": span.kind, "ph": "X", "pid": pid, "tid": tid}
    event |= {"ts": start / 1e3, "dur": (stop - start) / 1e3}
    return event | {"args": {"kind": span.kind, **({"bytes": span.bytes} if span.bytes else {})}}

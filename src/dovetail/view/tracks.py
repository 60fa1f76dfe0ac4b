"""A timeline made ready for drawing: spans by track, overlaps in lanes, communication split where it is exposed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from dovetail.core.timeline import ALL_RANKS, Span, Timeline

Interval = tuple[float, float]
COMPUTE = ("forward", "backward", "optimizer")


class Piece(NamedTuple):
    """What is drawn: a span, or the hidden or exposed part of one. `look` is a key of the palette."""

    look: str
    start: float
    stop: float
    name: str


class Traffic(NamedTuple):
    """Seconds of a rank's communication: behind computing, and with nothing to hide them."""

    hidden: float
    exposed: float


def group(track: str) -> str:
    """The part of a track's name before the slash: the rank or link that it belongs to."""
    return track.partition("/")[0]


def thread(track: str) -> str:
    return track.partition("/")[2] or track


def short(name: str) -> tuple[str, ...]:
    """A span's name, and what may stand for it where space is short: "bucket 3 (12 tensors)", "bucket 3", "3"."""
    plain = name.partition(" (")[0]
    number = plain
    for what in ("bucket ", "reduce-scatter ", "all-gather ", "update "):
        number = number.removeprefix(what)
    return (name, plain, number) if number.isdecimal() else (name, plain)


def by_track(timeline: Timeline) -> dict[str, list[Span]]:
    """Spans per track in order of time. Ranks in numeric order; within a rank, tracks as they first appear."""
    tracks: dict[str, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda s: (s.start, s.stop)):
        tracks.setdefault(span.track, []).append(span)
    # A rank computes before it communicates, so first appearance puts the compute track on top.
    return dict(sorted(tracks.items(), key=lambda item: natural(group(item[0]))))


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key by which "rank 10" comes after "rank 9"."""
    words = text.split()
    return tuple((0, int(w)) if w.isdecimal() else (1, w) for w in words)


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans of one track dealt into as few rows as let no two overlap: each takes the first row that is free."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.stop)):
        free = next((row for row in rows if row[-1].stop <= span.start), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def subtract(span: Interval, holes: list[Interval]) -> list[Interval]:
    """What is left of an interval without `holes` (sorted and disjoint)."""
    left, at = [], span[0]
    # Holes that end before the span begins, of which there may be many, cannot cut it.
    for i in range(bisect_right(holes, at, key=itemgetter(1)), len(holes)):
        start, stop = holes[i]
        if start >= span[1]:
            break
        if start > at:
            left.append((at, start))
        at = max(at, stop)
    if at < span[1]:
        left.append((at, span[1]))
    return left


def computing(timeline: Timeline) -> dict[str, list[Interval]]:
    """When each rank computes. Groups without any computation (links) are absent: nothing could hide their traffic.

    What all ranks send together is hidden as long as one of them computes: their common group computes when any does.
    """
    busy: dict[str, list[Interval]] = {}
    for s in timeline.spans:
        if s.kind in COMPUTE:
            busy.setdefault(group(s.track), []).append((s.start, s.stop))
    if busy and any(group(s.track) == ALL_RANKS for s in timeline.spans):
        busy[ALL_RANKS] = [interval for intervals in busy.values() for interval in intervals]
    return {g: union(intervals) for g, intervals in busy.items()}


def pieces(spans: Iterable[Span], computing: list[Interval] | None) -> list[Piece]:
    """Spans of one track as pieces; `computing` is when the track's rank computes, None where it never does."""
    out: list[Piece] = []
    for s in spans:
        if s.kind != "communication" or computing is None:
            out.append(Piece(s.kind, s.start, s.stop, s.name))
            continue
        exposed = subtract((s.start, s.stop), computing)
        out += [Piece("exposed", a, b, s.name) for a, b in exposed]
        out += [Piece("communication", a, b, s.name) for a, b in subtract((s.start, s.stop), exposed)]
    return sorted(out, key=lambda p: (p.start, p.stop))


def traffic(timeline: Timeline) -> dict[str, Traffic]:
    """Each computing rank's communication. What all ranks send together counts for each of them."""
    busy = computing(timeline)
    moved: dict[str, list[Interval]] = {g: [] for g in busy}
    for s in timeline.spans:
        if s.kind == "communication" and group(s.track) in busy:
            moved[group(s.track)].append((s.start, s.stop))
    bare = {g: [left for t in union(sent) for left in subtract(t, busy[g])] for g, sent in moved.items()}
    found: dict[str, Traffic] = {}
    for g in [g for g in busy if g != ALL_RANKS] or busy:
        whole, exposed = (_length([*of[g], *of.get(ALL_RANKS, ())]) for of in (moved, bare))
        found[g] = Traffic(hidden=max(0.0, whole - exposed), exposed=exposed)
    return found


def exposed(timeline: Timeline) -> float:
    """Seconds of communication that nothing hides, on the rank where they are most."""
    return max((t.exposed for t in traffic(timeline).values()), default=0.0)


def _length(intervals: Iterable[Interval]) -> float:
    """Seconds that intervals cover; where they overlap, once."""
    return sum(b - a for a, b in union(intervals))

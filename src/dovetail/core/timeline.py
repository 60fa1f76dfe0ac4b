"""Timeline: what happens in an iteration, predicted or measured, in one format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from .files import Bytes, Name, Noun, Record, Seconds

SpanKind = Literal["forward", "backward", "communication", "optimizer", "wait", "idle", "task", "lease"]
LOST = "lost in "
"""Begins the name of a span by which a rank takes longer than the others, and delays them."""
ALL_RANKS = "all ranks"
"""Before the slash of a track that belongs to every rank alike: "all ranks/network"."""


class Span(Record, frozen=True, kw_only=True):
    """One activity on one track. Times are in seconds from the start of the iteration."""

    track: Name
    """Where: "rank 0/compute", "rank 0/network", "all ranks/network"; the part before the slash groups tracks."""
    name: Name
    kind: SpanKind
    start: Seconds
    stop: Seconds
    bytes: Bytes = 0

    @property
    def duration(self) -> float:
        return self.stop - self.start


class Timeline(Noun, frozen=True, kw_only=True):
    """Spans of one iteration, or of several that follow each other."""

    kind: ClassVar[str] = "timeline"

    name: Name
    source: Literal["predicted", "measured"]
    emulated: bool = False
    spans: tuple[Span, ...]

    def check(self) -> None:
        for i, span in enumerate(self.spans):
            if span.stop < span.start:
                raise ValueError(f"spans[{i}].stop: expected at least start ({span.start}), got {span.stop}")

    @property
    def duration(self) -> float:
        if not self.spans:
            return 0.0
        return max(s.stop for s in self.spans) - min(s.start for s in self.spans)

    def busy(self, kind: SpanKind) -> float:
        """Seconds spent in spans of one kind on the busiest track; overlapping spans count once."""
        tracks: dict[str, list[tuple[float, float]]] = {}
        for s in self.spans:
            if s.kind == kind:
                tracks.setdefault(s.track, []).append((s.start, s.stop))
        return max((_covered(intervals) for intervals in tracks.values()), default=0.0)


class Comparison(Record, frozen=True, kw_only=True):
    """A predicted timeline against a measured one; errors are relative to the measured one."""

    predicted: Seconds
    measured: Seconds
    error: float
    by_kind: dict[str, tuple[float, float]]
    """Busy seconds per kind: (predicted, measured)."""


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    kinds: tuple[SpanKind, ...] = ("forward", "backward", "communication")
    return Comparison(
        predicted=predicted.duration,
        measured=measured.duration,
        error=predicted.duration / measured.duration - 1 if measured.duration else 0.0,
        by_kind={k: (predicted.busy(k), measured.busy(k)) for k in kinds},
    )


def _covered(intervals: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def idle_gaps(spans: Iterable[Span], devices: Sequence[str], *, until: float) -> list[Span]:
    """The time from 0 to `until` in which none of `spans` uses a device: time for background tasks.

    A device is the part of a track's name before the slash; its gaps are spans on its compute track.
    """
    busy: dict[str, list[tuple[float, float]]] = {device: [] for device in devices}
    for s in spans:
        if s.kind not in ("wait", "idle"):
            busy.setdefault(s.track.partition("/")[0], []).append((s.start, s.stop))
    gaps = []
    for device in devices:
        at = 0.0
        for start, stop in [*sorted(busy[device]), (until, until)]:
            if start > at:
                gaps.append(Span(track=f"{device}/compute", name="idle", kind="idle", start=at, stop=start))
            at = max(at, stop)
    return gaps

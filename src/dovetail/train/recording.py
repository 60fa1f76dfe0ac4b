"""Recordings: real iterations of a wrapped model as a Timeline, to lay beside the predicted one.

Every training mode has one `SpanRecorder` and reports to it what this rank does. `record()` opens a `Recording`; each
span goes to all recordings that are open at that moment, so recordings can be nested. Times are taken on the host by
time.perf_counter(): on a GPU they say when work was handed over, not when it ran (untested there).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.core.timeline import Span, SpanKind, Timeline, idle_gaps

if TYPE_CHECKING:
    import torch.distributed as dist


class TimedWork(Protocol):
    """Communication that is queued, running or done."""

    span: tuple[float, float]
    """When it ran; valid once `wait` has returned."""

    def wait(self) -> None: ...


class Recording:
    """What this rank did inside `with model.record() as recording`."""

    def __init__(self, name: str, rank: int, *, idle: bool) -> None:
        self._name, self._rank, self._idle = name, rank, idle
        self._began = self._until = time.perf_counter()
        self._spans: list[tuple[str, SpanKind, float, float, int]] = []
        self._queued: list[tuple[str, int, TimedWork]] = []

    def add(self, name: str, kind: SpanKind, start: float, stop: float, nbytes: int) -> None:
        self._spans.append((name, kind, start, stop, nbytes))

    def add_queued(self, name: str, nbytes: int, work: TimedWork) -> None:
        self._queued.append((name, nbytes, work))

    def extend(self, until: float) -> None:
        """An iteration ended at `until`, also for a rank that had nothing to do in it."""
        self._until = until

    def timeline(self, *, name: str = "", emulated: bool = False) -> Timeline:
        """The recorded iterations one after the other, in seconds. Waits for communication that is still going on.

        Zero is the start of the first span; where idle gaps are marked it is the start of the block.
        """
        taken = list(self._spans)
        for what, nbytes, work in self._queued:
            work.wait()
            taken.append((what, "communication", *work.span, nbytes))
        zero = self._began if self._idle else min((start for _, _, start, _, _ in taken), default=0.0)
        device = f"rank {self._rank}"
        spans = [
            Span(
                track=f"{device}/{'network' if kind == 'communication' else 'compute'}",
                name=what,
                kind=kind,
                start=start - zero,
                stop=stop - zero,
                bytes=nbytes,
            )
            for what, kind, start, stop, nbytes in taken
        ]
        if self._idle:
            spans += idle_gaps(spans, [device], until=max([self._until - zero, *(s.stop for s in spans)]))
        return Timeline(name=name or self._name, source="measured", emulated=emulated, spans=tuple(spans))


class SpanRecorder:
    """The open recordings of one wrapped model on one rank.

    With `idle` a timeline counts from the start of the block and marks when the device was idle.
    """

    def __init__(self, name: str, rank: int, *, idle: bool = False) -> None:
        self._name, self._rank, self._idle = name, rank, idle
        self._open: list[Recording] = []

    @property
    def active(self) -> bool:
        """Whether any recording is open."""
        return bool(self._open)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        recording = Recording(self._name, self._rank, idle=self._idle)
        self._open.append(recording)
        try:
            yield recording
        finally:
            self._open.remove(recording)

    def add(self, name: str, kind: SpanKind, start: float, stop: float | None = None, nbytes: int = 0) -> None:
        """Something that began at `start` and ended at `stop`, or just now."""
        stop = time.perf_counter() if stop is None else stop
        for recording in self._open:
            recording.add(name, kind, start, stop, nbytes)

    def add_queued(self, name: str, nbytes: int, work: TimedWork) -> None:
        """Communication that was just queued and knows its own times."""
        for recording in self._open:
            recording.add_queued(name, nbytes, work)

    def watch(self, work: dist.Work | None, name: str, nbytes: int) -> None:
        """A collective that was just started; its end is noted by whichever thread sees it."""
        if work is None or not self._open:
            return
        start, heard = time.perf_counter(), list(self._open)

        def done(_: Any) -> None:
            stop = time.perf_counter()
            for recording in heard:
                recording.add(name, "communication", start, stop, nbytes)

        work.get_future().then(done)

    def end_iteration(self) -> None:
        now = time.perf_counter()
        for recording in self._open:
            recording.extend(now)

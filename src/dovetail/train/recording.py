"""Recordings: real iterations of a wrapped model as a Timeline, to lay beside the predicted one.

Every training mode has one `SpanRecorder` and reports to it what this rank does. `record()` opens a `Recording`; each
span goes to all recordings that are open at that moment, so recordings can be nested. Times are stamps of the device's
clock: on an accelerator they say when work ran, not when the host handed it over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.core.timeline import Span, SpanKind, Timeline, idle_gaps
from dovetail.measure.clock import Clock

if TYPE_CHECKING:
    import torch.distributed as dist


class TimedWork(Protocol):
    """Communication that is queued, running or done."""

    @property
    def span(self) -> tuple[Any, Any]:
        """Stamps of its start and its end; valid once `wait` has returned."""

    def wait(self) -> None: ...


class Recording:
    """What this rank did inside `with model.record() as recording`."""

    def __init__(self, name: str, rank: int, clock: Clock, *, idle: bool) -> None:
        self._name, self._rank, self._clock, self._idle = name, rank, clock, idle
        clock.set_zero()
        self._began = self._until = clock.stamp()
        self._spans: list[tuple[str, SpanKind, Any, Any, int]] = []
        self._queued: list[tuple[str, int, TimedWork]] = []

    def add(self, name: str, kind: SpanKind, start: Any, stop: Any, nbytes: int) -> None:
        self._spans.append((name, kind, start, stop, nbytes))

    def add_queued(self, name: str, nbytes: int, work: TimedWork) -> None:
        self._queued.append((name, nbytes, work))

    def extend(self, until: Any) -> None:
        """An iteration ended at `until`, also for a rank that had nothing to do in it."""
        self._until = until

    def timeline(self, *, name: str = "", emulated: bool = False) -> Timeline:
        """The recorded iterations one after the other, in seconds. Waits for communication that is still going on.

        Zero is the start of the first span; where idle gaps are marked it is the start of the block.
        """
        noted = list(self._spans)
        for what, nbytes, work in self._queued:
            work.wait()
            noted.append((what, "communication", *work.span, nbytes))
        stamps = [self._began, self._until, *(stamp for _, _, *pair, _ in noted for stamp in pair)]
        began, until, *times = self._clock.times(stamps)
        pairs = zip(noted, times[::2], times[1::2], strict=True)
        taken = [(what, kind, start, stop, nbytes) for (what, kind, _, _, nbytes), start, stop in pairs]
        zero = began if self._idle else min((start for _, _, start, _, _ in taken), default=0.0)
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
            spans += idle_gaps(spans, [device], until=max([until - zero, *(s.stop for s in spans)]))
        return Timeline(name=name or self._name, source="measured", emulated=emulated, spans=tuple(spans))


class SpanRecorder:
    """The open recordings of one wrapped model on one rank.

    With `idle` a timeline counts from the start of the block and marks when the device was idle.
    """

    def __init__(self, name: str, rank: int, clock: Clock, *, idle: bool = False) -> None:
        self._name, self._rank, self._idle = name, rank, idle
        self.clock = clock
        """What all stamps are of."""
        self._open: list[Recording] = []

    @property
    def active(self) -> bool:
        """Whether any recording is open."""
        return bool(self._open)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        recording = Recording(self._name, self._rank, self.clock, idle=self._idle)
        self._open.append(recording)
        try:
            yield recording
        finally:
            self._open.remove(recording)

    def begin(self) -> Any:
        """The stamp of something that begins now; None where nobody records."""
        return self.clock.stamp() if self._open else None

    def add(self, name: str, kind: SpanKind, start: Any, stop: Any = None, nbytes: int = 0) -> None:
        """Something that began at `start` (None: when nobody recorded) and ended at `stop`, or just now."""
        if start is None or not self._open:
            return
        stop = self.clock.stamp() if stop is None else stop
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
        start, heard = self.clock.stamp(), list(self._open)

        def done(_: Any) -> None:
            stop = self.clock.stamp()
            for recording in heard:
                recording.add(name, "communication", start, stop, nbytes)

        work.get_future().then(done)

    def end_iteration(self) -> None:
        for recording in self._open:
            recording.extend(self.clock.stamp())

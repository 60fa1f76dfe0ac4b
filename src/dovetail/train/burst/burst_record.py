"""What one rank did in a burst step, as a Timeline: computing, communicating, and the idle gaps between."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dovetail.core.timeline import Span, SpanKind, Timeline, idle_gaps

if TYPE_CHECKING:
    import torch.distributed as dist


class Recorder:
    """Collects spans while steps run; the clock starts when it is made."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._origin = time.perf_counter()
        self._until = 0.0
        self._spans: list[tuple[str, SpanKind, float, float, int]] = []

    def add(self, name: str, kind: SpanKind, start: float, nbytes: int = 0) -> None:
        """Something that began at `start` (of time.perf_counter) and ends now."""
        self._spans.append((name, kind, start, time.perf_counter(), nbytes))

    def end(self) -> None:
        """A step has ended, for a rank that had nothing to do in it too."""
        self._until = time.perf_counter() - self._origin

    def watch(self, work: dist.Work | None, name: str, nbytes: int) -> None:
        """A collective that has just set out; its end is noted by whichever thread sees it."""
        if work is None:
            return
        start = time.perf_counter()

        def done(_: Any) -> None:
            self.add(name, "communication", start, nbytes)

        work.get_future().then(done)

    def timeline(self, *, name: str = "burst", emulated: bool = False) -> Timeline:
        """All that was recorded so far, in seconds from the start of recording."""
        device = f"rank {self._rank}"
        spans = [
            Span(
                track=f"{device}/{'network' if kind == 'communication' else 'compute'}",
                name=what,
                kind=kind,
                start=start - self._origin,
                stop=stop - self._origin,
                bytes=nbytes,
            )
            for what, kind, start, stop, nbytes in list(self._spans)
        ]
        until = max([self._until, *(s.stop for s in spans)])
        spans += idle_gaps(spans, [device], until=until)
        return Timeline(name=name, source="measured", emulated=emulated, spans=tuple(spans))

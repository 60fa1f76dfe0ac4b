"""Records real steps with overlap="forward" as a Timeline, to lay beside the predicted one.

Every step gives spans of its last forward pass, what that waited for parameters, its backward pass and the optimiser;
the lane gives one span for each reduce-scatter and all-gather. Stamps are taken on the host: on a GPU they say when
work was handed over, not when it ran (untested there).
"""

from __future__ import annotations

from dovetail.core.timeline import Span, SpanKind, Timeline

from .exchange import Exchange
from .lane import Ticket


class Recording:
    """What happened inside `with model.record() as recording`."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange, self._name = exchange, name
        self._sent: list[tuple[str, int, Ticket]] = []
        self._spans: list[tuple[str, SpanKind, float, float]] = []
        exchange.recording, exchange.watching = self, True

    def sent(self, what: str, nbytes: int, ticket: Ticket) -> None:
        """Called when something was queued on the lane."""
        self._sent.append((what, nbytes, ticket))

    def after_step(self, began: float, ended: float) -> None:
        """Called at the end of every `optimizer.step()`."""
        exchange = self._exchange
        at, forward_end = exchange.forward_span
        for index, before, after in exchange.uses:
            if at <= before <= after <= forward_end:
                self._span("forward", "forward", at, before)
                self._span(f"wait for {exchange.slots[index].name}", "wait", before, after)
                at = after
        self._span("forward", "forward", at, forward_end)
        self._span("backward", "backward", forward_end, max((t for _, t in exchange.stamps), default=forward_end))
        self._span("optimizer", "optimizer", began, ended)

    def close(self) -> None:
        self._exchange.recording, self._exchange.watching = None, False

    def timeline(self, *, emulated: bool = False) -> Timeline:
        """The recorded steps on end; the first one starts at zero. Waits for what is still on its way."""
        rank = self._exchange.rank
        spans = [(f"rank {rank}/compute", *span, 0) for span in self._spans]
        for what, nbytes, ticket in self._sent:
            ticket.wait()
            spans.append((f"rank {rank}/network", what, "communication", *ticket.span, nbytes))
        origin = min((start for _, _, _, start, _, _ in spans), default=0.0)
        return Timeline(
            name=self._name,
            source="measured",
            emulated=emulated,
            spans=tuple(
                Span(track=track, name=name, kind=kind, start=start - origin, stop=stop - origin, bytes=nbytes)
                for track, name, kind, start, stop, nbytes in spans
            ),
        )

    def _span(self, name: str, kind: SpanKind, start: float, stop: float) -> None:
        if stop > start:
            self._spans.append((name, kind, start, stop))

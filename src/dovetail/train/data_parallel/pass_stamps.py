"""When things happened in an iteration with the exchange in charge: stamps of a clock, and seconds made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.core.timeline import SpanKind
from dovetail.measure.clock import Clock

ParameterUse = tuple[int, Any, Any]
"""(index of the parameter, stamp before its first use had to wait for its values, stamp when it went on)"""


@dataclass
class PassStamps:
    """Stamps of one iteration; None where nothing was taken."""

    called: Any = None
    """Forward was called: before it waited for buffers."""
    forward: tuple[Any, Any] | None = None
    """Start and end of the forward pass that armed the exchange."""
    ready: list[tuple[int, Any]] = field(default_factory=list)
    """(index of the parameter, stamp) of gradients as they became ready."""
    updates: list[tuple[Any, Any]] = field(default_factory=list)
    """Starts and ends of the optimiser's updates of buckets."""

    def seconds(self, clock: Clock, zero: Any, now: Any, uses: Sequence[ParameterUse]) -> PassSeconds | None:
        """What was taken until `now`, in seconds after the stamp `zero`; None if there was no forward pass."""
        if self.forward is None:
            return None
        pairs = [stamp for _, *pair in uses for stamp in pair] + [stamp for pair in self.updates for stamp in pair]
        taken = [zero, now, self.called, *self.forward, *(stamp for _, stamp in self.ready), *pairs]
        at = iter(clock.seconds(taken)[1:])
        return PassSeconds(
            now=next(at),
            called=next(at),
            began=next(at),
            ended=next(at),
            ready=tuple((i, next(at)) for i, _ in self.ready),
            uses=tuple((i, next(at), next(at)) for i, _, _ in uses),
            update=sum(-next(at) + next(at) for _ in self.updates),
        )


@dataclass(frozen=True)
class PassSeconds:
    """The same in seconds."""

    now: float
    called: float
    began: float
    ended: float
    ready: tuple[tuple[int, float], ...]
    uses: tuple[tuple[int, float, float], ...]
    update: float
    """Seconds of all updates together."""

    @property
    def waits(self) -> list[tuple[int, float, float]]:
        """First uses of parameters inside the forward pass."""
        return [(i, before, after) for i, before, after in self.uses if self.began <= before <= self.ended]

    def spans(self, names: Sequence[str]) -> list[tuple[str, SpanKind, float, float]]:
        """(name, kind, start, stop) of the passes, of waits inside them, and of the optimiser's step from zero to now.

        `names` are the parameters'.
        """
        at, found = self.began, list[tuple[str, SpanKind, float, float]]()
        for index, before, after in self.waits:
            if at <= before <= after <= self.ended:
                found.append(("forward", "forward", at, before))
                found.append((f"wait for {names[index]}", "wait", before, after))
                at = after
        found.append(("forward", "forward", at, self.ended))
        found.append(("backward", "backward", self.ended, max((t for _, t in self.ready), default=self.ended)))
        found.append(("optimizer", "optimizer", 0.0, self.now))
        return [span for span in found if span[3] > span[2]]

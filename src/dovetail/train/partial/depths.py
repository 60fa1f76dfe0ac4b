"""How deep every worker goes at a step: from the plan's phase, the guard's counts and the limits of stragglers.

Nothing here communicates: all ranks hold the same state and come to the same depths.
"""

from __future__ import annotations

from dovetail.core.depth_plan import DepthPhase, DepthPlan
from dovetail.core.errors import Error
from dovetail.planning.depth.guard import Guard, assign, counts_of
from dovetail.planning.depth.straggler import Pace, Stragglers

from .noise_monitor import NoiseMonitor


class DepthSchedule:
    """Depths of all workers, step by step, under one plan."""

    def __init__(
        self, plan: DepthPlan, *, steps: int | None, rotate: bool, monitor: NoiseMonitor | None, pace: Pace | None
    ) -> None:
        """`steps` is the length of the training, `rotate` moves depths instead of data."""
        if len(plan.phases) > 1 and steps is None:
            raise Error(f"plan for {plan.profile!r} has {len(plan.phases)} phases: expected the training's `steps`")
        self._plan, self._steps, self._rotate = plan, steps or 0, rotate
        self.monitor, self.pace = monitor, pace

    def at(self, step: int) -> tuple[int, ...]:
        """Depths of all workers, in segments. A step that the guard measures runs at full depth."""
        least = self.least(step)
        counts: tuple[int, ...] = least
        if self.monitor is not None and self.monitor.due(step):
            counts = (self._plan.workers,) * len(least)
        elif self.monitor is not None:
            counts = tuple(map(max, self.monitor.counts, least))
        return assign(counts, self.order(step), self.pace.limits if self.pace else None)

    def least(self, step: int) -> tuple[int, ...]:
        """Contributors that the plan itself asks for, from the input to the output."""
        return counts_of(self._phase(step).depths, len(self._plan.segments))

    def order(self, step: int) -> list[int]:
        """Workers in the order in which they go deep: the plan's deepest first."""
        planned, k = self._phase(step).depths, self._plan.workers
        shift = step if self._rotate else 0
        return sorted(range(k), key=lambda worker: (-planned[(worker + shift) % k], worker))

    def _phase(self, step: int) -> DepthPhase:
        return next(p for p in reversed(self._plan.phases) if step >= p.begins * self._steps)


def schedule(
    plan: DepthPlan,
    *,
    guard: Guard | None,
    stragglers: Stragglers | None,
    rotate: bool,
    steps: int | None,
    speak: bool,
) -> DepthSchedule:
    """The depths of a training, with the guard's monitor and the stragglers' pace; only a rank told to `speak` logs."""
    count = len(plan.segments)
    predicted = plan.full.workers
    forward, backward = sum(w.forward for w in predicted), sum(w.backward for w in predicted)
    if not (forward and backward):
        forward, backward = 1.0, 2.0  # the usual ratio, where nothing was measured
    monitor = pace = None
    if guard is not None:
        shares = [backward / count] * count  # segments are cut to take equally long
        monitor = NoiseMonitor(
            guard, segments=count, workers=plan.workers, forward=forward, backward=shares, speak=speak
        )
    if stragglers is not None:
        pace = Pace(stragglers, workers=plan.workers, segments=count, forward=forward, backward=backward)
    return DepthSchedule(plan, steps=steps, rotate=rotate, monitor=monitor, pace=pace)

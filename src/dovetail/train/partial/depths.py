"""How deep every worker goes at a step: the plan's phase, the guard's counts and the stragglers' limits together.

Nothing here communicates: all ranks hold the same state and come to the same depths.
"""

from __future__ import annotations

from dovetail.core.depth_plan import DepthPlan, Phase
from dovetail.core.errors import Error
from dovetail.planning.depth.guard import Guard, assign, counts_of
from dovetail.planning.depth.straggler import Pace, Stragglers

from .noise import Watch


class Depths:
    """Answers `at(step)` for one plan."""

    def __init__(
        self, plan: DepthPlan, *, steps: int | None, rotate: bool, watch: Watch | None, pace: Pace | None
    ) -> None:
        """`steps` is the length of the training, `rotate` moves depths instead of data."""
        if len(plan.phases) > 1 and steps is None:
            raise Error(f"plan for {plan.profile!r} has {len(plan.phases)} phases: expected the training's `steps`")
        self._plan, self._steps, self._rotate = plan, steps or 0, rotate
        self.watch, self.pace = watch, pace

    def at(self, step: int) -> tuple[int, ...]:
        """Depths of all workers. A step that the guard measures runs at full depth."""
        least = self.least(step)
        counts: tuple[int, ...] = least
        if self.watch is not None and self.watch.due(step):
            counts = (self._plan.workers,) * len(least)
        elif self.watch is not None:
            counts = tuple(map(max, self.watch.counts, least))
        return assign(counts, self.order(step), self.pace.limits if self.pace else None)

    def least(self, step: int) -> tuple[int, ...]:
        """Contributors that the plan itself asks for, from the input to the output."""
        return counts_of(self._phase(step).depths, len(self._plan.segments))

    def order(self, step: int) -> list[int]:
        """Workers in the order in which they go deep: the plan's deepest first."""
        planned, k = self._phase(step).depths, self._plan.workers
        shift = step if self._rotate else 0
        return sorted(range(k), key=lambda worker: (-planned[(worker + shift) % k], worker))

    def _phase(self, step: int) -> Phase:
        return next(p for p in reversed(self._plan.phases) if step >= p.begins * self._steps)


def schedule(
    plan: DepthPlan,
    *,
    guard: Guard | None,
    stragglers: Stragglers | None,
    rotate: bool,
    steps: int | None,
    speak: bool,
) -> Depths:
    """The depths of a training with its watchers; `speak` lets this rank write the guard's log."""
    count = len(plan.segments)
    predicted = plan.full.workers
    forward, backward = sum(w.forward for w in predicted), sum(w.backward for w in predicted)
    if not (forward and backward):
        forward, backward = 1.0, 2.0  # what is usual, where nobody has measured
    watch = pace = None
    if guard is not None:
        shares = [backward / count] * count  # segments are cut so that each takes as long
        watch = Watch(guard, segments=count, workers=plan.workers, forward=forward, backward=shares, speak=speak)
    if stragglers is not None:
        pace = Pace(stragglers, workers=plan.workers, segments=count, forward=forward, backward=backward)
    return Depths(plan, steps=steps, rotate=rotate, watch=watch, pace=pace)

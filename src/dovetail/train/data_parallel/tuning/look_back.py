"""The look back at a kept plan: whether it still is the faster one, long after it was chosen.

Machines and networks change while a training runs. So every few hundred iterations a handful are timed (a glance); when
their time has drifted from what it was, or a few thousand iterations have passed, the kept plan and the first one take
some turns again, as in the duel. Where the plan no longer gains, the first one is in force again.

Between two glances nothing runs but `LookBack.due` or `LookBack.tick`, once in an iteration. Ranks must begin a glance
at the same iteration, so they count what all of them have done together: steps of an attached optimiser, or backward
passes that torch's reducer has reduced. Forward passes would not do: a rank may run some for itself.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from .trials import TrialPlan, Turns
from .verdict import LEAST_PAIRS, PairedGain, judged

Seen = TypeVar("Seen")

GLANCES = 8
"""Glances from one comparison with the first plan to the next."""
GLANCE_STEPS = 5
"""Iterations that are timed at a glance."""
DRIFT = 0.1
"""Share by which an iteration's time must have changed, at least, to compare the plans earlier than is due."""
CONVINCING = 0.1
"""Chance, at most, of the differences seen if there were nothing to gain, to be content with half of the pairs."""


@dataclass
class LookBack:
    """A kept plan between two looks back."""

    order: list[int]
    """Indices of the plans' tensors."""
    first: TrialPlan
    kept: TrialPlan
    own: Any
    """torch's description of the buckets that were in force before planning."""
    spread: float
    """How far iterations with the same buckets lie apart, as a share."""
    every: int
    """Iterations from one comparison with the first plan to the next."""
    seconds: float | None = None
    """What an iteration took at the first glance after the plan was found to be the faster one."""
    since: int = 0
    """Iterations from the last comparison to the last glance."""
    rested: int = 0
    """Iterations since the last glance."""
    _backward: list[int] = field(default_factory=list)

    def due(self, reducer: Any) -> bool:
        """Called before every forward pass of a model under torch's reducer: whether it is time for a glance.

        The reducer's times of the last backward pass tell whether there was another one that it has reduced.
        """
        backward: list[int] = reducer.get_backward_stats()
        if backward == self._backward or not any(backward):  # a new reducer has zeros
            return False
        self._backward = backward
        return self.tick()

    def tick(self) -> bool:
        """Called after every step of an attached optimiser: whether it is time for a glance."""
        self.rested += 1
        return self.rested >= self.every // GLANCES

    def glanced(self, seconds: float) -> tuple[bool, bool]:
        """(whether to compare the plans now, whether because of drift), by what an iteration takes now."""
        self.since += self.rested
        self.rested = 0
        self.seconds = self.seconds or seconds
        drifted = bool(abs(np.log(seconds / self.seconds)) > max(DRIFT, 2 * self.spread))
        return drifted or self.since >= self.every, drifted

    def found_faster(self) -> None:
        self.seconds, self.since = None, 0


def still_faster(turns: Turns[Seen], margin: float) -> Generator[None, Seen, tuple[PairedGain, bool]]:
    """(the gain of the second plan over the first, whether it still is one), the same on all ranks.

    The plan has proven itself before, so here the estimate decides: the plan stays if it still gains the `margin`. If a
    few pairs leave that open, as many again are added.
    """
    differences: list[float] = []
    while True:
        for _ in range(LEAST_PAIRS):
            differences.append((yield from turns.pair(1)))
        result = judged(differences, LEAST_PAIRS)
        stays = result.gain >= margin
        if len(differences) > LEAST_PAIRS or (stays and result.chance <= CONVINCING) or max(differences) <= 0:
            return result, stays

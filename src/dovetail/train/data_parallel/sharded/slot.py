"""The life of one parameter's gradient on one rank, as a state machine.

What torch keeps in `.grad` can be in two places here: the part that was reduced over the ranks is in the parameter's
bucket, and what this rank has added since, outside a pass that synchronises, is its own. So a gradient is

    EMPTY     `.grad` is None
    FOREIGN   `.grad` is a tensor that no backward pass of this model has made
    OWN       `.grad` is this rank's own gradient, not sent to anybody yet
    REDUCED   the bucket has it, or is about to: `.grad` is a stand-in
    MIXED     the bucket has one, and this rank has its own to be added: `.grad` is another stand-in

and its entry in the bucket, for the pass that synchronises at the moment, is MISSING, NEW (what is reduced replaces
what the bucket had) or ONTO (what is reduced is added to it: the user has not zeroed it). Events:

| event   | what happens                                   | EMPTY   | FOREIGN | OWN     | REDUCED | MIXED   | entry   |
|---------|------------------------------------------------|---------|---------|---------|---------|---------|---------|
| arm     | a forward pass begins that will synchronise    | EMPTY   | FOREIGN | OWN     | REDUCED | MIXED   | MISSING |
| add     | backward adds one that stays on this rank      | OWN     | OWN     | OWN     | MIXED   | MIXED   | same    |
| fill    | backward adds one, and all enters the bucket   | REDUCED | REDUCED | REDUCED | REDUCED | REDUCED | filled  |
| skip    | a pass ends without one; what is own enters    | EMPTY   | FOREIGN | REDUCED | REDUCED | REDUCED | filled  |
| find    | another rank used the parameter in that pass   | REDUCED | FOREIGN | OWN     | REDUCED | MIXED   | same    |
| zero    | the user sets the stand-in to zero             | —       | —       | —       | REDUCED | REDUCED | same    |
| clear   | the user sets `.grad` to None                  | EMPTY   | EMPTY   | EMPTY   | EMPTY   | EMPTY   | same    |
| replace | the user sets `.grad` to another tensor        | FOREIGN | FOREIGN | FOREIGN | FOREIGN | FOREIGN | same    |

"filled" is ONTO where the gradient was REDUCED or MIXED, else NEW. A dash cannot happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from .scattered import ScatteredGradient, renewed


class GradientState(Enum):
    """Where a parameter's gradient is."""

    EMPTY = "EMPTY"
    FOREIGN = "FOREIGN"
    OWN = "OWN"
    REDUCED = "REDUCED"
    MIXED = "MIXED"


class BucketEntry(Enum):
    """What the pass that synchronises at the moment has put into the bucket."""

    MISSING = "MISSING"
    NEW = "NEW"
    ONTO = "ONTO"


class SlotState(NamedTuple):
    """Where a gradient is, and its entry in the bucket."""

    gradient: GradientState = GradientState.EMPTY
    entry: BucketEntry = BucketEntry.MISSING


class SlotEvent(Enum):
    """What can happen to a gradient."""

    ARM = "arm"
    ADD = "add"
    FILL = "fill"
    SKIP = "skip"
    FIND = "find"
    ZERO = "zero"
    CLEAR = "clear"
    REPLACE = "replace"


_EMPTY, _FOREIGN, _OWN, _REDUCED, _MIXED = GradientState
_IN_BUCKET = (_REDUCED, _MIXED)

_NEXT: dict[SlotEvent, dict[GradientState, GradientState]] = {
    SlotEvent.ARM: {s: s for s in GradientState},
    SlotEvent.ADD: {_EMPTY: _OWN, _FOREIGN: _OWN, _OWN: _OWN, _REDUCED: _MIXED, _MIXED: _MIXED},
    SlotEvent.FILL: dict.fromkeys(GradientState, _REDUCED),
    SlotEvent.SKIP: {_EMPTY: _EMPTY, _FOREIGN: _FOREIGN, _OWN: _REDUCED, _REDUCED: _REDUCED, _MIXED: _REDUCED},
    SlotEvent.FIND: {_EMPTY: _REDUCED, _FOREIGN: _FOREIGN, _OWN: _OWN, _REDUCED: _REDUCED, _MIXED: _MIXED},
    SlotEvent.ZERO: {_REDUCED: _REDUCED, _MIXED: _REDUCED},
    SlotEvent.CLEAR: dict.fromkeys(GradientState, _EMPTY),
    SlotEvent.REPLACE: dict.fromkeys(GradientState, _FOREIGN),
}


def next_state(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after an event, by the table above."""
    gradient = _NEXT[event].get(state.gradient)
    assert gradient is not None, f"{event.value} cannot happen to a gradient that is {state.gradient.value}"
    entry = state.entry
    if event is SlotEvent.ARM:
        entry = BucketEntry.MISSING
    elif event in (SlotEvent.FILL, SlotEvent.SKIP):
        entry = BucketEntry.ONTO if state.gradient in _IN_BUCKET else BucketEntry.NEW
    return SlotState(gradient, entry)


@dataclass(eq=False)
class GradientSlot:
    """One parameter, what stands in its `.grad`, and the state of its gradient."""

    name: str
    parameter: nn.Parameter
    scattered: ScatteredGradient
    """Stand-in for `.grad` while the gradient is REDUCED."""
    mixed: ScatteredGradient
    """Stand-in for `.grad` while it is MIXED."""
    state: SlotState = field(default_factory=SlotState)
    own: torch.Tensor | None = None
    """This rank's own gradient, while it is OWN or MIXED."""

    @property
    def ready(self) -> bool:
        """Whether the bucket has what this pass gives it."""
        return self.state.entry is not BucketEntry.MISSING

    def on(self, event: SlotEvent, own: torch.Tensor | None = None) -> None:
        """Goes to the next state and puts into `.grad` what stands there in it; `own` is the gradient that ADD adds.

        Whatever the user has done to `.grad` since the last event comes first.
        """
        self.look()
        self.state = next_state(self.state, event)
        if event is SlotEvent.ADD:
            self.own = own
        elif self.state.gradient not in (_OWN, _MIXED):
            self.own = None
        if self.state.gradient is not _FOREIGN:
            self.parameter.grad = self._shown()

    def look(self) -> GradientState:
        """Notices what the user has done to `.grad`, and returns where the gradient is."""
        seen = self.parameter.grad
        if seen is None if self.state.gradient is _FOREIGN else seen is not self._shown():
            if self.state.gradient in _IN_BUCKET:
                self.scattered = renewed(self.scattered)
                self.mixed = renewed(self.mixed) if self.state.gradient is _MIXED else self.mixed
            self.state = next_state(self.state, SlotEvent.CLEAR if seen is None else SlotEvent.REPLACE)
            self.own = None
        return self.state.gradient

    def make_room(self) -> None:
        """Called before autograd adds to `.grad`: a stand-in gives way to what this rank has of its own."""
        if self.look() in _IN_BUCKET:
            self.parameter.grad = self.own

    def settle_room(self) -> torch.Tensor:
        """Called after autograd has added: takes this rank's own gradient out and puts the stand-in back."""
        gradient = self.parameter.grad
        assert gradient is not None, "autograd has just added to it"
        self.own = gradient if self.state.gradient in (_OWN, _MIXED) else None
        if self.state.gradient is not _FOREIGN:
            self.parameter.grad = self._shown()
        return gradient

    def _shown(self) -> torch.Tensor | None:
        """What `.grad` is in this state; not for FOREIGN."""
        if self.state.gradient is _REDUCED:
            return self.scattered
        return self.mixed if self.state.gradient is _MIXED else self.own

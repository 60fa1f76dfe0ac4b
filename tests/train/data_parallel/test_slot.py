"""The states of a gradient: the table in the docstring is what the code does, and random events keep its promises."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dovetail.train.data_parallel.sharded import slot as slots
from dovetail.train.data_parallel.sharded.scattered import stand_in
from dovetail.train.data_parallel.sharded.slot import (
    BucketEntry,
    GradientSlot,
    GradientState,
    SlotEvent,
    SlotState,
    next_state,
)

IN_BUCKET = (GradientState.REDUCED, GradientState.MIXED)


def _table() -> dict[tuple[SlotEvent, GradientState], tuple[str, str]]:
    """(gradient, entry) after each event, as the docstring says."""
    assert slots.__doc__ is not None
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in slots.__doc__.splitlines() if line[:1] == "|"]
    states = [GradientState(name) for name in rows[0][2:-1]]
    return {
        (SlotEvent(event), state): (after, entry)
        for event, _, *cells, entry in rows[2:]
        for state, after in zip(states, cells, strict=True)
    }


def test_the_table_in_the_docstring_is_what_happens() -> None:
    table = _table()
    assert set(table) == {(event, state) for event in SlotEvent for state in GradientState}
    for (event, gradient), (after, entry) in table.items():
        for before in BucketEntry:
            state = SlotState(gradient, before)
            if after == "—":
                try:
                    next_state(state, event)
                except AssertionError:
                    continue
                raise AssertionError(f"{event} happened to {state}")
            filled = BucketEntry.ONTO if gradient in IN_BUCKET else BucketEntry.NEW
            expected = {"same": before, "filled": filled, "MISSING": BucketEntry.MISSING}[entry]
            assert next_state(state, event) == SlotState(GradientState(after), expected)


class Facts:
    """The same gradient as plain facts: what the bucket has, what this rank has, who put it there."""

    def __init__(self) -> None:
        self.bucket = False
        self.own = 0.0
        self.has_own = self.foreign = False

    def state(self) -> GradientState:
        if self.foreign:
            return GradientState.FOREIGN
        if self.bucket:
            return GradientState.MIXED if self.has_own else GradientState.REDUCED
        return GradientState.OWN if self.has_own else GradientState.EMPTY

    def clear(self) -> None:
        self.bucket = self.has_own = self.foreign = False
        self.own = 0.0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["arm", "add", "fill", "skip", "find", "zero", "none", "other"]), max_size=25))
def test_random_events_leave_what_plain_facts_say(acts: list[str]) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    made: Any = [stand_in("p", parameter, 0, lambda: None) for _ in range(2)]
    slot, facts = GradientSlot("p", parameter, *made), Facts()
    for act in acts:
        if act in ("add", "fill"):  # autograd adds one
            slot.make_room()
            parameter.grad = torch.ones(3) if parameter.grad is None else parameter.grad + 1
            gradient = slot.settle_room()
            mine = (facts.own if facts.has_own or facts.foreign else 0.0) + 1
            assert gradient[0] == mine
            if act == "add":
                slot.on(SlotEvent.ADD, gradient)
                facts.own, facts.has_own, facts.foreign = mine, True, False
            else:
                slot.on(SlotEvent.FILL)
                onto = facts.bucket
                assert slot.state.entry is (BucketEntry.ONTO if onto else BucketEntry.NEW)
                facts.clear()
                facts.bucket = True
        elif act == "skip":
            own = slot.own if slot.look() in (GradientState.OWN, GradientState.MIXED) else None
            assert (own is not None) == facts.has_own and (own is None or own[0] == facts.own)
            slot.on(SlotEvent.SKIP)
            facts.bucket |= facts.has_own
            facts.has_own, facts.own = False, 0.0 if not facts.foreign else facts.own
        elif act == "find":
            slot.on(SlotEvent.FIND)
            facts.bucket |= not facts.has_own and not facts.foreign
        elif act == "arm":
            slot.on(SlotEvent.ARM)
            assert not slot.ready
        elif act == "zero" and slot.look() in IN_BUCKET:
            slot.on(SlotEvent.ZERO)
            facts.has_own, facts.own = False, 0.0
        elif act == "none":
            parameter.grad = None
            facts.clear()
        elif act == "other":
            parameter.grad = torch.full((3,), 5.0)
            facts.clear()
            facts.foreign, facts.own = True, 5.0
        assert slot.look() is facts.state(), (act, acts)
        shown = parameter.grad
        if facts.bucket:
            assert shown is (slot.mixed if facts.has_own else slot.scattered)
        else:
            assert (shown is None) == (not facts.has_own and not facts.foreign)

"""The life of PartialBackprop: random events against a model of its own, and random programs on real ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.train.partial.lifecycle import BackpropEvent, BackpropState, next_state
from tests.ranks import run_ranks

from . import depth_programs

E, S = BackpropEvent, BackpropState


@dataclass
class Books:
    """What must hold, kept as separate facts instead of a state."""

    planned: bool = False
    ran_forward: bool = False
    """A forward pass has run, and no exchange has ended since."""
    synchronised: bool = False
    """That forward pass ran outside `no_sync`."""
    counted: bool = False
    """A gradient has come back through that forward pass."""
    in_backward: bool = False
    """Of that forward pass, and at least one gradient has come."""
    waiting: bool = False
    doubtful: bool = False
    broken: bool = False
    passes: int = 0
    """Forward passes through which a gradient came back."""
    begun: int = 0
    """Exchanges begun."""
    ended: int = 0
    """Exchanges that ended well."""

    @property
    def exchanging(self) -> bool:
        return self.in_backward and self.synchronised

    def allows(self, event: BackpropEvent) -> bool:
        if event is E.PLANNED:
            return not self.planned
        if not self.planned:
            return False
        if event in (E.FORWARD, E.LOCAL_FORWARD):
            return not (self.exchanging or self.waiting or self.broken)
        if event in (E.DELIVERED, E.DELIVERED_UNSURE):
            return self.waiting
        if event is E.FAILED:
            return self.exchanging or self.waiting or self.broken
        return not self.waiting

    def meet(self, event: BackpropEvent) -> None:
        if event is E.PLANNED:
            self.planned = True
        elif event in (E.FORWARD, E.LOCAL_FORWARD):
            self.ran_forward, self.synchronised = True, event is E.FORWARD
            self.counted = self.in_backward = self.doubtful = False
        elif event is E.GRADIENT and not self.broken:
            self._gradient()
        elif event is E.BACKWARD_ENDED and self.in_backward:
            self.in_backward, self.waiting = False, self.synchronised
        elif event in (E.DELIVERED, E.DELIVERED_UNSURE):
            self.ended += 1
            self.waiting = self.ran_forward = self.counted = False
            self.doubtful = event is E.DELIVERED_UNSURE
        elif event is E.FAILED:
            self.broken, self.in_backward, self.waiting = True, False, False

    def _gradient(self) -> None:
        if self.ran_forward:
            if not self.counted:
                self.passes += 1
                self.begun += self.synchronised
            self.counted = self.in_backward = True
        elif self.doubtful:
            self.broken = True

    def state(self) -> BackpropState:
        if not self.planned or self.broken:
            return S.BROKEN if self.broken else S.AWAITING_PLAN
        if self.waiting:
            return S.WAITING
        if not self.ran_forward:
            return S.UNSURE if self.doubtful else S.IDLE
        if self.synchronised:
            return S.EXCHANGING if self.in_backward else S.ARMED
        if self.in_backward:
            return S.ACCUMULATING
        return S.ACCUMULATED if self.counted else S.LOCAL


COMMON = [E.FORWARD, E.LOCAL_FORWARD, E.GRADIENT, E.GRADIENT, E.BACKWARD_ENDED, E.DELIVERED, E.DELIVERED_UNSURE]


@settings(max_examples=500)
@given(st.lists(st.sampled_from([*COMMON, E.FAILED, E.PLANNED]), max_size=60), st.booleans())
def test_random_events_agree_with_a_model_of_separate_facts(events: list[BackpropEvent], planned_first: bool) -> None:
    books, state = Books(), S.AWAITING_PLAN
    passes = begun = ended = 0
    for event in [E.PLANNED, *events] if planned_first else events:
        if not books.allows(event):
            with pytest.raises(Error) as refused:
                next_state(state, event)
            assert "\n" not in str(refused.value)
            continue
        before, state = state, next_state(state, event)
        books.meet(event)
        assert state is books.state()
        # What `planned` does on these edges: each pass counts once, each exchange begins and ends once.
        passes += event is E.GRADIENT and before in (S.ARMED, S.LOCAL)
        begun += event is E.GRADIENT and before is S.ARMED
        ended += before is S.WAITING and state in (S.IDLE, S.UNSURE)
    assert (passes, begun, ended) == (books.passes, books.begun, books.ended)
    assert begun - ended == (state in (S.EXCHANGING, S.WAITING)) or (state is S.BROKEN and begun - ended in (0, 1))


@pytest.mark.parametrize("state", [S.EXCHANGING, S.WAITING, S.BROKEN])
@pytest.mark.parametrize("event", [E.FORWARD, E.LOCAL_FORWARD])
def test_a_forward_pass_before_the_exchange_has_ended_is_refused_in_one_line(
    state: BackpropState, event: BackpropEvent
) -> None:
    with pytest.raises(Error, match=r"^its backward pass did not end: training cannot go on from here$"):
        next_state(state, event)


def test_a_broken_module_stays_broken() -> None:
    after = {next_state(S.BROKEN, event) for event in (E.GRADIENT, E.BACKWARD_ENDED, E.FAILED)}
    assert after == {S.BROKEN}


def test_the_table_in_the_docstring_is_the_function() -> None:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in _table()]
    columns = [E[name] for name in rows[0][1:5]]
    expected: dict[tuple[BackpropState, BackpropEvent], BackpropState] = {}
    name = ""
    for row in rows[2:]:
        name = row[0] or name
        for event, cell in zip(columns, row[1:5], strict=True):
            if cell.strip("–"):
                expected[S[name], event] = S[cell.split()[0]]
        for event_name, after in re.findall(r"(\w+): (\w+)", row[5]):
            expected[S[name], E[event_name]] = S[after]
    for state in S:
        for event in E:
            if (state, event) in expected:
                assert next_state(state, event) is expected[state, event]
            else:
                with pytest.raises(Error):
                    next_state(state, event)


def _table() -> list[str]:
    return [line for line in (next_state.__doc__ or "").splitlines() if line.strip().startswith("|")]


def test_random_programs_leave_the_gradients_of_the_masked_oracle_on_every_rank() -> None:
    for result in run_ranks(depth_programs.random_programs, seeds=list(range(16)), timeout=600):
        assert result["failures"] == []
        assert set(result["played"]) == set(depth_programs.ACTIONS), "every action was played"
        assert result["steps"] >= 40
        assert result["depth_changes"] >= 5
        missing = {s.name for s in S} - set(result["states"])
        assert missing <= {"AWAITING_PLAN", "EXCHANGING", "WAITING", "ACCUMULATING", "UNSURE", "BROKEN"}

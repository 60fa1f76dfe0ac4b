"""The life of a PartialBackprop module: its states, the events that it meets, and every transition between them.

Nothing here knows torch. `next_state` is the only place that decides which state follows; what is done on the way (run
the model, begin an exchange, wait for it) is in `planned`.
"""

from __future__ import annotations

from enum import Enum

from dovetail.core.errors import Error


class BackpropState(Enum):
    """Where the module stands, as seen from one rank."""

    AWAITING_PLAN = "awaiting its plan"
    """There is no plan yet. The first forward pass with gradients makes one."""
    IDLE = "idle"
    """No forward pass waits for its backward pass."""
    ARMED = "armed"
    """A forward pass has run. The first gradient of its backward pass begins the exchange with the other ranks."""
    LOCAL = "local"
    """A forward pass has run inside `no_sync`. Its gradients will stay on this rank."""
    ACCUMULATING = "accumulating"
    """The backward pass of a local forward pass is running."""
    ACCUMULATED = "accumulated"
    """That backward pass has ended. Gradients wait on this rank for the next exchange."""
    EXCHANGING = "exchanging"
    """A backward pass is running, and its gradients leave for the other ranks as they become ready."""
    WAITING = "waiting"
    """That backward pass has ended. This rank waits until every gradient has arrived."""
    UNSURE = "unsure"
    """As IDLE, but the model's output had no tensors to watch: perhaps only an inner backward pass has ended."""
    BROKEN = "broken"
    """The exchange has failed. Training cannot go on."""


class BackpropEvent(Enum):
    """What happens to the module. A forward pass that raises is no event: the state stays as it was."""

    PLANNED = "the plan"
    FORWARD = "a forward pass"
    LOCAL_FORWARD = "a forward pass inside no_sync"
    GRADIENT = "a gradient"
    BACKWARD_ENDED = "the end of a backward pass"
    DELIVERED = "the end of the exchange"
    DELIVERED_UNSURE = "the end of the exchange after an output without tensors"
    FAILED = "a failed exchange"


_S, _E = BackpropState, BackpropEvent
_FORWARD = {_E.FORWARD: _S.ARMED, _E.LOCAL_FORWARD: _S.LOCAL}
_TRANSITIONS: dict[BackpropState, dict[BackpropEvent, BackpropState]] = {
    _S.AWAITING_PLAN: {_E.PLANNED: _S.IDLE},
    _S.IDLE: {**_FORWARD, _E.GRADIENT: _S.IDLE, _E.BACKWARD_ENDED: _S.IDLE},
    _S.ARMED: {**_FORWARD, _E.GRADIENT: _S.EXCHANGING, _E.BACKWARD_ENDED: _S.ARMED},
    _S.LOCAL: {**_FORWARD, _E.GRADIENT: _S.ACCUMULATING, _E.BACKWARD_ENDED: _S.LOCAL},
    _S.ACCUMULATING: {**_FORWARD, _E.GRADIENT: _S.ACCUMULATING, _E.BACKWARD_ENDED: _S.ACCUMULATED},
    _S.ACCUMULATED: {**_FORWARD, _E.GRADIENT: _S.ACCUMULATING, _E.BACKWARD_ENDED: _S.ACCUMULATED},
    _S.EXCHANGING: {_E.GRADIENT: _S.EXCHANGING, _E.BACKWARD_ENDED: _S.WAITING, _E.FAILED: _S.BROKEN},
    _S.WAITING: {_E.DELIVERED: _S.IDLE, _E.DELIVERED_UNSURE: _S.UNSURE, _E.FAILED: _S.BROKEN},
    _S.UNSURE: {**_FORWARD, _E.GRADIENT: _S.BROKEN, _E.BACKWARD_ENDED: _S.UNSURE},
    _S.BROKEN: {_E.GRADIENT: _S.BROKEN, _E.BACKWARD_ENDED: _S.BROKEN, _E.FAILED: _S.BROKEN},
}


def next_state(state: BackpropState, event: BackpropEvent) -> BackpropState:
    """The state after `event`. Raises an Error of one line where the event is refused (– in the table).

    | state         | FORWARD | LOCAL_FORWARD | GRADIENT     | BACKWARD_ENDED | other events                          |
    |---------------|---------|---------------|--------------|----------------|---------------------------------------|
    | AWAITING_PLAN | –       | –             | –            | –              | PLANNED: IDLE                         |
    | IDLE          | ARMED   | LOCAL         | IDLE (1)     | IDLE (2)       | –                                     |
    | ARMED         | ARMED   | LOCAL         | EXCHANGING   | ARMED (2)      | –                                     |
    | LOCAL         | ARMED   | LOCAL         | ACCUMULATING | LOCAL (2)      | –                                     |
    | ACCUMULATING  | ARMED   | LOCAL         | ACCUMULATING | ACCUMULATED    | –                                     |
    | ACCUMULATED   | ARMED   | LOCAL         | ACCUMULATING | ACCUMULATED (2)| –                                     |
    | EXCHANGING    | –       | –             | EXCHANGING   | WAITING        | FAILED: BROKEN                        |
    | WAITING       | –       | –             | –            | –              | DELIVERED: IDLE, FAILED: BROKEN,      |
    |               |         |               |              |                | DELIVERED_UNSURE: UNSURE              |
    | UNSURE        | ARMED   | LOCAL         | BROKEN (3)   | UNSURE (2)     | –                                     |
    | BROKEN        | –       | –             | BROKEN       | BROKEN         | FAILED: BROKEN                        |

    (1) The user goes backward through the wrapped module itself, or a second time through a graph that was exchanged.
    (2) No parameter got a gradient: the user asked torch for the gradient of something else.
    (3) The backward pass that ended was one inside the user's, as in reentrant checkpointing.

    A forward pass without gradients (evaluation), `zero_grad`, an optimiser's step and a change of depths are possible
    in every state and change none. A dropped graph leaves ARMED or LOCAL to the next forward pass. A backward pass that
    raises leaves ACCUMULATING or EXCHANGING; only the former lets the next forward pass begin.
    """
    after = _TRANSITIONS[state].get(event)
    if after is not None:
        return after
    if event in _FORWARD and state is not _S.AWAITING_PLAN:
        raise Error("its backward pass did not end: training cannot go on from here")
    raise Error(f"PartialBackprop: {event.value} cannot come while it is {state.value}")

"""A policy as a small automaton that reads the switches of a walk, the first one included.

A walk complies with rank r if every switch has a transition and the last state is in `accept[r]`. A missing transition
is a violation: the switch that sees one drops the packet. Ranks are preferences, best first, each containing the one
before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_STATES = 8
MAX_RANKS = 4
UNBOUNDED_HOPS = 511
"""How deep the switches search, in hops; a policy's own bound is below it."""


@dataclass(frozen=True)
class Automaton:
    name: str
    step: tuple[tuple[int, ...], ...]
    """step[state][switch] is the next state, or -1."""
    start: int
    accept: tuple[frozenset[int], ...]
    max_hops: int = UNBOUNDED_HOPS

    @property
    def states(self) -> int:
        return len(self.step)

    @property
    def trivial(self) -> bool:
        """Allows every walk."""
        return self.states == 1 and min(self.step[0]) == 0 and self.max_hops == UNBOUNDED_HOPS

    def rank_of(self, state: int) -> int | None:
        return next((r for r, states in enumerate(self.accept) if state in states), None)

    def run(self, walk: Iterable[int]) -> int | None:
        """The rank of a whole walk, or None where it violates the policy."""
        state = self.start
        for switch in walk:
            state = self.step[state][switch]
            if state < 0:
                return None
        return self.rank_of(state)


def build(
    switches: int,
    *,
    name: str = "any",
    via: Sequence[frozenset[int]] = (),
    avoid: frozenset[int] = frozenset(),
    prefer: Sequence[frozenset[int]] = (),
    after: tuple[frozenset[int], frozenset[int]] | None = None,
    max_hops: int = UNBOUNDED_HOPS,
) -> Automaton:
    """All clauses at once: a state is (waypoints passed, best preference met, `after` has happened).

    One visit serves one waypoint: two equal waypoints in a row ask for two visits.
    """
    worst = len(prefer)
    start = (0, worst, False)
    index: dict[tuple[int, int, bool], int] = {start: 0}
    table: list[tuple[int, ...]] = []
    todo = [start]
    while todo:
        passed, met, happened = todo.pop(0)
        row = []
        for switch in range(switches):
            if switch in avoid or (after and happened and switch in after[1]):
                row.append(-1)
                continue
            state = (
                passed + (passed < len(via) and switch in via[passed]),
                min([met, *(i for i, wanted in enumerate(prefer) if switch in wanted)]),
                happened or bool(after and switch in after[0]),
            )
            if state not in index:
                index[state] = len(index)
                todo.append(state)
            row.append(index[state])
        table.append(tuple(row))
    accept = tuple(
        frozenset(i for (passed, met, _), i in index.items() if passed == len(via) and met <= rank)
        for rank in range(worst + 1)
    )
    return Automaton(name, tuple(table), 0, accept, max_hops)


def backtrack_closed(automaton: Automaton) -> bool:
    """Whether a packet can never be worse off for having tried a way that turned out broken.

    Holds if whatever state a packet moves to simulates the state it came from: allows every walk that was allowed
    before, with no worse rank. Then turning back and starting again always remains possible, and a packet arrives
    whenever a compliant walk survives. A bounded length is never closed: a wrong try uses up hops.
    """
    if automaton.max_hops < UNBOUNDED_HOPS:
        return False
    n = automaton.states
    ranks = [automaton.rank_of(q) for q in range(n)]

    def no_worse(q: int, p: int) -> bool:
        mine, theirs = ranks[q], ranks[p]
        return theirs is None or (mine is not None and mine <= theirs)

    # simulates[p][q]: q can do whatever p can do. The greatest such relation, by removing what fails until none does.
    simulates = [[no_worse(q, p) for q in range(n)] for p in range(n)]
    symbols = {tuple(row[v] for row in automaton.step) for v in range(len(automaton.step[0]))}
    changed = True
    while changed:
        changed = False
        for p in range(n):
            for q in range(n):
                if simulates[p][q] and any(
                    column[p] >= 0 and (column[q] < 0 or not simulates[column[p]][column[q]]) for column in symbols
                ):
                    simulates[p][q] = False
                    changed = True
    return all(simulates[q][column[q]] for column in symbols for q in range(n) if column[q] >= 0)

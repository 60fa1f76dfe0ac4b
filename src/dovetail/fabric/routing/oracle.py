"""The oracle: graph search on the product of the surviving topology and a policy's automaton.

Plain networkx, written from the definition and sharing nothing with the bit-parallel search in the kernel, so that the
two can be compared. The walk it finds is one of the best there are, and explains why a probe took another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.fabric.extra import nx

from .automaton import Automaton


@dataclass(frozen=True)
class Best:
    rank: int
    hops: int
    walk: tuple[int, ...]


def product(graph: nx.Graph, automaton: Automaton) -> nx.DiGraph:
    """Nodes are (switch, state after that switch); an edge for every link whose far end has a transition."""
    made = nx.DiGraph()
    for state in range(automaton.states):
        for here in graph:
            made.add_node((here, state))
            for there in graph[here]:
                after = automaton.step[state][there]
                if after >= 0:
                    made.add_edge((here, state), (there, after))
    return made


def best(graph: nx.Graph, automaton: Automaton, source: int, target: int) -> Best | None:
    """The shortest walk of the best rank within the policy's length, or None where no walk complies."""
    return best_from(product(graph, automaton), automaton, source).get(target)


def best_from(searched: nx.DiGraph, automaton: Automaton, source: int) -> dict[int, Best]:
    """For one source, the best walk to every target that has one."""
    first = automaton.step[automaton.start][source]
    if first < 0:
        return {}
    paths = nx.single_source_shortest_path(searched, (source, first), cutoff=automaton.max_hops)
    found: dict[int, Best] = {}
    for (target, state), path in paths.items():
        for rank, states in enumerate(automaton.accept):
            if state not in states:
                continue
            old = found.get(target)
            if old is None or (rank, len(path) - 1) < (old.rank, old.hops):
                found[target] = Best(rank, len(path) - 1, tuple(switch for switch, _ in path))
            break
    return found


def violation(graph: nx.Graph, automaton: Automaton, walk: Sequence[int], source: int, target: int) -> str:
    """Why a walk is not a compliant one over live links; empty if it is."""
    if not walk or walk[0] != source or walk[-1] != target:
        return f"does not lead from switch {source} to switch {target}"
    for here, there in itertools.pairwise(walk):
        if not graph.has_edge(here, there):
            return f"uses the dead or missing link {here}-{there}"
    if len(walk) - 1 > automaton.max_hops:
        return f"has {len(walk) - 1} hops, {automaton.max_hops} are allowed"
    if automaton.run(walk) is None:
        return f"breaks policy {automaton.name!r}"
    return ""


def repeats(walk: Sequence[int], automaton: Automaton, failures_met: int) -> bool:
    """Whether a walk loops: it came back to the same (switch, state) although it had met no new failure.

    A packet may return to a switch after meeting a failed link, at most once per failure and state.
    """
    state = automaton.start
    seen: dict[tuple[int, int], int] = {}
    for switch in walk:
        state = automaton.step[state][switch] if state >= 0 else state
        seen[switch, state] = seen.get((switch, state), 0) + 1
    return bool(seen) and max(seen.values()) > failures_met + 1

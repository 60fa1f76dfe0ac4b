"""A policy document becomes automata that accept exactly the walks it describes; contradictions never get loaded."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import InputError
from dovetail.fabric.extra import nx
from dovetail.fabric.routing import oracle, shapes
from dovetail.fabric.routing.automaton import Automaton, backtrack_closed, build
from dovetail.fabric.routing.policy import compile_policy
from tests.fabric.cases import random_fabric

TREE = shapes.fat_tree(4)


def compiled(*classes: dict[str, Any], **rest: Any) -> Any:
    return compile_policy({"classes": list(classes), **rest}, TREE)


def by_definition(walk: list[int], clauses: dict[str, Any]) -> int | None:
    """The rank of a walk, straight from what the clauses mean in words."""
    if set(walk) & clauses.get("avoid", frozenset()):
        return None
    if after := clauses.get("after"):
        for i, switch in enumerate(walk):
            if switch in after[0] and set(walk[i + 1 :]) & after[1]:
                return None
    at = 0
    for wanted in clauses.get("via", ()):
        while at < len(walk) and walk[at] not in wanted:
            at += 1
        if at == len(walk):
            return None
        at += 1
    prefer = clauses.get("prefer", ())
    return next((r for r, wanted in enumerate(prefer) if set(walk) & wanted), len(prefer))


switches = st.frozensets(st.integers(0, 5), min_size=1, max_size=2)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.fixed_dictionaries(
        {},
        optional={
            "avoid": switches,
            "via": st.lists(switches, max_size=2).map(tuple),
            "prefer": st.lists(switches, max_size=1).map(tuple),
            "after": st.tuples(switches, switches),
        },
    ),
)
def test_an_automaton_accepts_exactly_the_walks_its_clauses_describe(walk: list[int], clauses: dict[str, Any]) -> None:
    assert build(6, **clauses).run(walk) == by_definition(walk, clauses)


@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(0, 4))
def test_the_oracle_agrees_with_trying_every_walk(seed: int, size: int, extra: int) -> None:
    rng = random.Random(seed)
    graph = random_fabric(rng, size, extra).graph

    def pick() -> frozenset[int]:
        return frozenset(rng.sample(range(size), 1))

    clauses: dict[str, Any] = (
        {"via": (pick(),), "prefer": (pick(),)} if rng.random() < 0.5 else {"after": (pick(), pick())}
    )
    automaton = build(size, **clauses, max_hops=rng.choice([3, 5]))
    source, target = rng.randrange(size), rng.randrange(size)
    answers = []
    for hops in range(automaton.max_hops + 1):
        for inner in itertools.product(range(size), repeat=hops):
            walk = [source, *inner]
            if walk[-1] == target and all(graph.has_edge(*pair) for pair in itertools.pairwise(walk)):
                rank = by_definition(walk, clauses)
                if rank is not None:
                    answers.append((rank, hops))
    found = oracle.best(graph, automaton, source, target)
    assert (found and (found.rank, found.hops)) == (min(answers) if answers else None)
    if found:
        assert not oracle.violation(graph, automaton, found.walk, source, target)


@pytest.mark.parametrize(
    ("clauses", "closed"),
    [
        ({}, True),
        ({"avoid": frozenset({1})}, True),
        ({"via": (frozenset({1}), frozenset({2}))}, True),
        ({"prefer": (frozenset({1}),)}, True),
        ({"after": (frozenset({1}), frozenset({2}))}, False),
        ({"max_hops": 4}, False),
    ],
)
def test_policies_that_can_strand_a_packet_are_told_apart(clauses: dict[str, Any], closed: bool) -> None:
    assert backtrack_closed(build(6, **clauses)) is closed


def test_a_class_applies_to_its_hosts_both_ways_with_waypoints_reversed() -> None:
    made = compiled({"name": "guarded", "from": "h0", "to": "h7", "via": [["agg0.0"], ["core0", "core1"]]})
    there, back, other = made.of(0, 7), made.of(7, 0), made.of(0, 6)
    assert isinstance(there, Automaton) and isinstance(back, Automaton) and isinstance(other, Automaton)
    assert other.trivial and not there.trivial
    agg, core = TREE.switch_index["agg0.0"], TREE.switch_index["core0"]
    assert there.run([0, agg, core, 14, 7]) == 0
    assert there.run([7, 14, core, agg, 0]) is None
    assert back.run([7, 14, core, agg, 0]) == 0


def test_a_port_has_its_own_class() -> None:
    made = compiled({"from": "h0", "to": "h7", "port": 29500, "avoid": "core0", "both_ways": False})
    assert made.of(0, 7).trivial and not made.of(0, 7, 29500).trivial
    assert made.of(7, 0, 29500).trivial


def test_tenants_are_apart_unless_a_class_says_otherwise() -> None:
    tenants = {"red": ["h0", "h1"], "blue": ["h2", "h3"]}
    made = compiled({"from": "*", "to": "*", "avoid": "core0"}, tenants=tenants)
    assert made.of(0, 1) and made.of(2, 3) and made.of(4, 5)
    for a, b in ((0, 2), (2, 0), (0, 4), (4, 0)):
        assert made.of(a, b) is None
    crossing = compiled({"from": "h0", "to": "h2", "across_tenants": True}, tenants=tenants)
    assert crossing.of(0, 2) and crossing.of(2, 0) and crossing.of(0, 3) is None


def test_deny_by_class_and_by_default() -> None:
    assert compiled({"from": "h0", "to": "h1", "deny": True}).of(0, 1) is None
    closed = compiled({"from": "h0", "to": "h1"}, default="deny")
    assert closed.of(0, 1) and closed.of(0, 2) is None


@pytest.mark.parametrize(
    ("classes", "line"),
    [
        (
            [{"name": "x", "from": "h0", "to": "h7", "via": ["core0"], "avoid": ["core0"]}],
            "x: via[0] and avoid contradict",
        ),
        (
            [{"name": "x", "from": "h0", "to": "h7", "avoid": ["edge0.0"]}],
            "x: from and avoid contradict: h0 is on edge0.0",
        ),
        (
            [
                {"name": "x", "from": "h0", "to": "h7", "via": "core0"},
                {"name": "y", "from": "h*", "to": "h7", "via": "core1"},
            ],
            "x: contradicts 'y': both rule traffic from h0 to h7",
        ),
        (
            [{"name": "x", "from": "h0", "to": "h7", "max_hops": 3}],
            "x: no compliant path from h0 to h7, even with every link up",
        ),
        ([{"name": "x", "from": "h0", "to": "h7", "avoid": "core*"}], "x: no compliant path from h0 to h7"),
        ([{"name": "x", "from": "h0", "to": "h7", "via": [["core0"]] * 8}], "x: needs 9 states, expected at most 8"),
        ([{"from": "h0", "to": "nobody"}], "classes[0].to: 'nobody' matches nothing"),
        ([{"from": "h0", "to": "h1", "vai": "core0"}], "classes[0].vai: unknown field"),
        ([{"from": "h0", "to": "h1", "max_hops": "few"}], "classes[0].max_hops: expected 0 to 511, got 'few'"),
        ([{"to": "h1"}], "classes[0].from: missing"),
        ([{"from": "h0", "to": []}], "classes[0].to: expected at least one name, got none"),
        ([{"from": "h0", "to": "h1", "via": [[]]}], "classes[0].via[0]: expected at least one name, got none"),
        ([{"from": "h0", "to": "h1", "prefer": 5}], "classes[0].prefer[0]: '5' matches nothing"),
        ([{"from": "h0", "to": "h1", "deny": "no"}], "classes[0].deny: expected true or false, got 'no'"),
        ([{"from": "h0", "to": "h1", "both_ways": 0}], "classes[0].both_ways: expected true or false, got 0"),
        (
            [{"from": "h0", "to": "h7", "port": n + 1, "max_hops": 10 + n} for n in range(63)],
            "classes: expected at most 63 different path rules, got 64",
        ),
    ],
)
def test_contradictions_and_impossible_policies_are_one_line(classes: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(InputError) as caught:
        compiled(*classes)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_policy_that_is_no_mapping_or_too_large_is_one_line() -> None:
    for document in (5, "text", ["x"]):
        with pytest.raises(InputError, match="policy: expected a mapping"):
            compile_policy(document, TREE)  # type: ignore[arg-type]
    wide = shapes.ring(200)
    with pytest.raises(InputError, match="tell too many hosts and ports apart: 40000 entries"):
        compile_policy({"tenants": {f"t{i}": [f"h{i}"] for i in range(200)}}, wide)


def test_a_policy_that_can_strand_packets_warns() -> None:
    made = compiled({"name": "once", "from": "h0", "to": "h7", "after": {"visiting": "core0", "never": "core1"}})
    assert len(made.warnings) == 1 and made.warnings[0].startswith("once: ")


def test_the_judge_of_walks_sees_each_kind_of_fault() -> None:
    graph = nx.cycle_graph(5)
    automaton = build(5, avoid=frozenset({4}), max_hops=3)
    assert not oracle.violation(graph, automaton, [0, 1, 2], 0, 2)
    assert "dead or missing link 0-2" in oracle.violation(graph, automaton, [0, 2], 0, 2)
    assert "breaks policy" in oracle.violation(graph, automaton, [0, 4, 3], 0, 3)
    assert "does not lead" in oracle.violation(graph, automaton, [0, 1], 0, 2)
    assert "hops" in oracle.violation(graph, automaton, [0, 1, 0, 1, 2], 0, 2)
    assert oracle.repeats([0, 1, 0, 1, 2], automaton, 0) and not oracle.repeats([0, 1, 0, 1, 2], automaton, 1)

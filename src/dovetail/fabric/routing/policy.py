"""Policy: which paths each class of traffic may take.

A policy document names classes of traffic (from, to, port) and for each one says what its path must do: pass
waypoints (`via`), pass them in order (several in `via`), keep away from switches (`avoid`), stay apart from other
tenants (`tenants`, `deny`), take the better path while there is one (`prefer`), be short (`max_hops`), or not visit
some switches once it has visited others (`after`). `compile_policy` turns every distinct path rule into one automaton,
finds contradictions and rules that no path fulfils, and maps (group of hosts, group of hosts, port) to automata.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.core.errors import InputError
from dovetail.fabric.structs import NOTICE_POLICY

from . import oracle
from .automaton import MAX_RANKS, MAX_STATES, UNBOUNDED_HOPS, Automaton, backtrack_closed, build
from .topology import Topology, match

MAX_POLICIES = NOTICE_POLICY
MAX_CLASSES = 32768
"""Entries of the classifier's table: half of the map, which holds the old tables beside the new ones."""
DENY = -1
_FIELDS = (
    "name", "from", "to", "both_ways", "port", "via", "avoid", "prefer", "max_hops", "after", "deny", "across_tenants",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One class of traffic in one direction, hosts and switches by index; port 0 is any port."""

    name: str
    sources: frozenset[int]
    targets: frozenset[int]
    port: int = 0
    via: tuple[frozenset[int], ...] = ()
    avoid: frozenset[int] = frozenset()
    prefer: tuple[frozenset[int], ...] = ()
    after: tuple[frozenset[int], frozenset[int]] | None = None
    max_hops: int = UNBOUNDED_HOPS
    deny: bool = False
    across_tenants: bool = False
    reverse: bool = False

    def path_rule(self) -> tuple[Any, ...]:
        return (self.via, self.avoid, self.prefer, self.after, self.max_hops, self.deny)


@dataclass(frozen=True)
class Policies:
    """What the switches load: automata, and which one applies to whom."""

    automata: tuple[Automaton, ...]
    groups: tuple[int, ...]
    """The group of each host; hosts of a group are treated alike."""
    choice: dict[tuple[int, int, int], int]
    """(source group, target group, port or 0) → index of an automaton, or DENY."""
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def of(self, source: int, target: int, port: int = 0) -> Automaton | None:
        """The automaton for traffic between two hosts; None where it is denied."""
        key = self.groups[source], self.groups[target]
        index = self.choice.get((*key, port), self.choice.get((*key, 0), DENY))
        return None if index == DENY else self.automata[index]

    def has_class(self, source: int, target: int, port: int) -> bool:
        """Whether traffic between two hosts has a class of its own on this port."""
        return (self.groups[source], self.groups[target], port) in self.choice

    @property
    def ports(self) -> set[int]:
        return {port for _, _, port in self.choice if port}


def compile_policy(document: dict[str, Any], topology: Topology, path: str | Path = "<policy>") -> Policies:
    """Automata and their use, or one line that says what contradicts what; nothing is loaded before this succeeds."""
    if not isinstance(document, dict):
        raise InputError(path, "policy", f"expected a mapping with default, tenants or classes, got {document!r}")
    rules = parse(document, topology, path)
    tenants = _tenants(document, topology, path)
    allow = document.get("default", "allow")
    if allow not in ("allow", "deny"):
        raise InputError(path, "default", f"expected allow or deny, got {allow!r}")
    return assemble(topology, rules, tenants=tenants, allow=allow == "allow", source=path)


def assemble(
    topology: Topology,
    rules: list[Rule],
    *,
    tenants: dict[int, str] | None = None,
    allow: bool = True,
    source: str | Path = "<policy>",
) -> Policies:
    tenants = tenants or {}
    for rule in rules:
        _contradictions(rule, topology, source)
    # Hosts that no rule tells apart are one group: the classifier's table has groups² entries and not hosts².
    marks = [
        (tenants.get(h, ""), *((h in r.sources, h in r.targets) for r in rules)) for h in range(len(topology.hosts))
    ]
    numbering = {mark: i for i, mark in enumerate(dict.fromkeys(marks))}
    groups = tuple(numbering[m] for m in marks)
    _fits(len(numbering) ** 2, source)
    member = {g: h for h, g in reversed(list(enumerate(groups)))}
    automata: list[Automaton] = []
    by_rule: dict[tuple[Any, ...], int] = {}

    def automaton(rule: Rule) -> int:
        if rule.deny:
            return DENY
        key = rule.path_rule()
        if key not in by_rule:
            made = build(
                len(topology.switches), name=rule.name, via=rule.via, avoid=rule.avoid, prefer=rule.prefer,
                after=rule.after, max_hops=rule.max_hops,
            )  # fmt: skip
            if made.states > MAX_STATES:
                raise InputError(source, rule.name, f"needs {made.states} states, expected at most {MAX_STATES}")
            by_rule[key] = len(automata)
            automata.append(made)
        return by_rule[key]

    anything = Rule("any path", frozenset(), frozenset())
    choice: dict[tuple[int, int, int], int] = {}
    for a, here in sorted(member.items()):
        for b, there in sorted(member.items()):
            apart = tenants.get(here) != tenants.get(there)
            for port in sorted({r.port for r in rules} | {0}):
                hits = [
                    r for r in rules
                    if r.port == port and here in r.sources and there in r.targets and (not apart or r.across_tenants)
                ]  # fmt: skip
                # A class's own direction stands before the reversed direction of another class.
                hits = [r for r in hits if not r.reverse] or hits
                if len({r.path_rule() for r in hits}) > 1:
                    names = [r.name for r in hits]
                    pair = f"{topology.hosts[here].name} to {topology.hosts[there].name}"
                    raise InputError(source, names[0], f"contradicts {names[1]!r}: both rule traffic from {pair}")
                if hits:
                    choice[a, b, port] = automaton(hits[0])
                elif not port:
                    choice[a, b, 0] = automaton(anything) if allow and not apart else DENY
    _fits(len(choice), source)
    if len(automata) > MAX_POLICIES:
        raise InputError(
            source, "classes", f"expected at most {MAX_POLICIES} different path rules, got {len(automata)}"
        )
    made = Policies(tuple(automata), groups, choice)
    _feasible(made, topology, source)
    warnings = tuple(
        f"{a.name}: a packet that meets a failure may be lost although a compliant path remains "
        "(its rule allows less the further a packet has come); later packets avoid the failure"
        for a in automata
        if not backtrack_closed(a)
    )
    return Policies(made.automata, made.groups, made.choice, warnings)


def _fits(entries: int, source: str | Path) -> None:
    if entries > MAX_CLASSES:
        raise InputError(
            source, "classes", f"tell too many hosts and ports apart: {entries} entries, expected at most {MAX_CLASSES}"
        )


def _contradictions(rule: Rule, topology: Topology, source: str | Path) -> None:
    names = topology.switches
    for i, wanted in enumerate(rule.via):
        if wanted <= rule.avoid:
            raise InputError(source, rule.name, f"via[{i}] and avoid contradict: {names[min(wanted)]} is in both")
    for side, hosts in (("from", rule.sources), ("to", rule.targets)):
        for host in sorted(hosts):
            at = topology.hosts[host].switch
            if at in rule.avoid:
                raise InputError(
                    source, rule.name, f"{side} and avoid contradict: {topology.hosts[host].name} is on {names[at]}"
                )


def _feasible(policies: Policies, topology: Topology, source: str | Path) -> None:
    """Every class has a compliant path while nothing is broken."""
    wanted: dict[int, dict[int, set[int]]] = {}
    members: dict[int, list[int]] = {}
    for host, group in enumerate(policies.groups):
        members.setdefault(group, []).append(host)
    for (a, b, _), index in policies.choice.items():
        if index != DENY and not policies.automata[index].trivial:
            sources = wanted.setdefault(index, {})
            for host in members[a]:
                sources.setdefault(host, set()).update(members[b])
    for index, sources in wanted.items():
        automaton = policies.automata[index]
        searched = oracle.product(topology.graph, automaton)
        reached: dict[int, dict[int, oracle.Best]] = {}
        for host, targets in sources.items():
            at = topology.hosts[host].switch
            if at not in reached:
                reached[at] = oracle.best_from(searched, automaton, at)
            for target in targets - {host}:
                if topology.hosts[target].switch not in reached[at]:
                    pair = f"{topology.hosts[host].name} to {topology.hosts[target].name}"
                    raise InputError(source, automaton.name, f"no compliant path from {pair}, even with every link up")


def parse(document: dict[str, Any], topology: Topology, path: str | Path) -> list[Rule]:
    """The rules of a document, both ways unless it says otherwise; the way back passes waypoints in reverse."""
    for key in document:
        if key not in ("default", "tenants", "classes", "name"):
            raise InputError(path, str(key), "unknown field; expected default, tenants or classes")
    classes = document.get("classes") or []
    if not isinstance(classes, list):
        raise InputError(path, "classes", "expected a list")
    rules: list[Rule] = []
    hosts = [h.name for h in topology.hosts]
    for i, item in enumerate(classes):
        place = f"classes[{i}]"
        if not isinstance(item, dict):
            raise InputError(path, place, "expected a mapping with from and to")
        for key in item:
            if key not in _FIELDS:
                raise InputError(path, f"{place}.{key}", f"unknown field; expected one of {', '.join(_FIELDS)}")

        def some(key: str, names: tuple[str, ...] | list[str], value: Any, where: str = place) -> frozenset[int]:
            values = value if isinstance(value, list) else [value]
            patterns = [str(v) for v in values]
            return frozenset(match(names, patterns, file=str(path), place=f"{where}.{key}"))

        def number(key: str, low: int, high: int, default: int, here: Any = item, where: str = place) -> int:
            value = here.get(key, default)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InputError(path, f"{where}.{key}", f"expected {low} to {high}, got {value!r}")
            return value

        def flag(key: str, default: bool, here: Any = item, where: str = place) -> bool:
            value = here.get(key, default)
            if not isinstance(value, bool):
                raise InputError(path, f"{where}.{key}", f"expected true or false, got {value!r}")
            return value

        for key in ("from", "to"):
            if key not in item:
                raise InputError(path, f"{place}.{key}", "missing")
        via = item.get("via", [])
        via = via if isinstance(via, list) and via and all(isinstance(v, list) for v in via) else [via] if via else []
        prefer = item.get("prefer", [])
        prefer = (
            prefer
            if isinstance(prefer, list) and prefer and all(isinstance(v, list) for v in prefer)
            else [prefer]
            if prefer
            else []
        )
        if len(prefer) >= MAX_RANKS:
            raise InputError(
                path, f"{place}.prefer", f"expected at most {MAX_RANKS - 1} preferences, got {len(prefer)}"
            )
        after = item.get("after")
        if after is not None and (not isinstance(after, dict) or set(after) != {"visiting", "never"}):
            raise InputError(path, f"{place}.after", "expected {visiting: [switches], never: [switches]}")
        forward = Rule(
            name=str(item.get("name", place)),
            sources=some("from", hosts, item["from"]),
            targets=some("to", hosts, item["to"]),
            port=number("port", 1, 65535, 0) if "port" in item else 0,
            via=tuple(some(f"via[{n}]", topology.switches, v) for n, v in enumerate(via)),
            avoid=some("avoid", topology.switches, item["avoid"]) if item.get("avoid") else frozenset(),
            prefer=tuple(some(f"prefer[{n}]", topology.switches, v) for n, v in enumerate(prefer)),
            after=(
                some("after.visiting", topology.switches, after["visiting"]),
                some("after.never", topology.switches, after["never"]),
            )
            if after
            else None,
            max_hops=number("max_hops", 0, UNBOUNDED_HOPS, UNBOUNDED_HOPS),
            deny=flag("deny", False),
            across_tenants=flag("across_tenants", False),
        )
        rules.append(forward)
        if flag("both_ways", True):
            swapped = {**forward.__dict__, "sources": forward.targets, "targets": forward.sources}
            rules.append(Rule(**{**swapped, "via": forward.via[::-1], "reverse": True}))
    return rules


def _tenants(document: dict[str, Any], topology: Topology, path: str | Path) -> dict[int, str]:
    table = document.get("tenants") or {}
    if not isinstance(table, dict):
        raise InputError(path, "tenants", "expected tenant: [hosts]")
    owner: dict[int, str] = {}
    for tenant, patterns in table.items():
        values = [str(p) for p in (patterns if isinstance(patterns, list) else [patterns])]
        for host in match([h.name for h in topology.hosts], values, file=str(path), place=f"tenants.{tenant}"):
            if owner.setdefault(host, str(tenant)) != str(tenant):
                name = topology.hosts[host].name
                raise InputError(path, f"tenants.{tenant}", f"{name} already belongs to {owner[host]}")
    return owner

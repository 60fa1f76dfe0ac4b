"""Random fabrics, policies and failures, and what must hold for every packet in them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from dovetail.core.errors import InputError
from dovetail.fabric import kernel, structs
from dovetail.fabric.dataplane import addresses
from dovetail.fabric.packets import udp
from dovetail.fabric.routing import oracle
from dovetail.fabric.routing.automaton import backtrack_closed
from dovetail.fabric.routing.policy import Policies, Rule, assemble
from dovetail.fabric.routing.topology import Host, Link, Topology

from .switch_bench import SwitchBench


def random_fabric(rng: random.Random, switches: int, extra: int) -> Topology:
    """A random tree with `extra` more links, a host on every switch: connected, and of no regular shape."""
    ends = {frozenset((i, rng.randrange(i))) for i in range(1, switches)}
    possible = switches * (switches - 1) // 2
    while len(ends) < min(switches - 1 + extra, possible):
        ends.add(frozenset(rng.sample(range(switches), 2)))
    links = tuple(Link(*sorted(e)) for e in sorted(ends, key=sorted))
    attached = tuple(Host(f"h{i}", i) for i in range(switches))
    return Topology(f"random-{switches}", tuple(f"s{i}" for i in range(switches)), links, attached).check()


@dataclass
class Tally:
    packets: int = 0
    delivered: int = 0
    no_path: int = 0
    stranded: int = 0
    """Lost although a compliant path remained: allowed only for policies that were announced as such."""
    faults: list[str] = field(default_factory=list)


def random_rule(rng: random.Random, topology: Topology, source: int, target: int) -> Rule:
    """Any mixture of clauses; both ends' switches are left alone so that the rule is not void from the start."""
    ends = {topology.hosts[source].switch, topology.hosts[target].switch}
    rest = [s for s in range(len(topology.switches)) if s not in ends]

    def some(n: int) -> frozenset[int]:
        return frozenset(rng.sample(rest, min(n, len(rest))))

    made: dict[str, object] = {}
    if rest:
        if rng.random() < 0.5:
            made["via"] = tuple(some(rng.choice([1, 2])) for _ in range(rng.choice([1, 1, 2, 3])))
        if rng.random() < 0.3:
            made["avoid"] = some(max(1, len(rest) // 8))
        if rng.random() < 0.3 and len(made.get("via", ())) <= 2:  # type: ignore[arg-type]
            made["prefer"] = tuple(some(2) for _ in range(rng.choice([1, 1, 2]) if "via" not in made else 1))
        if rng.random() < 0.15 and "via" not in made:
            made["after"] = (some(2), some(2))
    if rng.random() < 0.1:
        made["max_hops"] = rng.randrange(2, 12)
    return Rule("case", frozenset({source}), frozenset({target}), **made)  # type: ignore[arg-type]


def policies_for(topology: Topology, rule: Rule) -> Policies | None:
    """The rule compiled, or None where the compiler rightly refuses it."""
    try:
        return assemble(topology, [rule])
    except InputError:
        return None


def check_packet(bench: SwitchBench, tally: Tally, source: int, target: int, *, sport: int, v6: bool = False) -> bool:
    """Sends one packet and judges it by the oracle; returns whether it arrived."""
    topology = bench.topology
    automaton = bench.policies.of(source, target)
    assert automaton
    alive = topology.surviving(bench.failed)
    a, b = topology.hosts[source].switch, topology.hosts[target].switch
    frame = udp(addresses(source), addresses(target), sport=sport, dport=7, payload=b"intact?", v6=v6)
    # Links that are back may be avoided, and a preference be missed, for as long as switches believe them failed.
    outdated = any(bench.plane.believed(s) - bench.failed for s in range(len(topology.switches)))
    out = bench.send(source, target, packet=frame)
    best = oracle.best(alive, automaton, a, b)
    where = f"{topology.name} {automaton.name} {a}->{b} down {sorted(bench.failed)}: {out.walk}"
    tally.packets += 1
    if out.looped or oracle.repeats(out.walk, automaton, len(bench.failed) + bool(bench.failed)):
        tally.faults.append(f"loop {where}")
    # One search per failure met, once more after forgetting beliefs, and one for every part of a long path.
    if out.searches > 2 * (len(bench.failed) + 1) + len(out.walk) // structs.CARRIED:
        tally.faults.append(f"{out.searches} searches {where}")
    if out.delivered:
        tally.delivered += 1
        if why := oracle.violation(alive, automaton, out.walk, a, b):
            tally.faults.append(f"{why} {where}")
        elif out.packet != frame:
            tally.faults.append(f"payload changed {where}")
        elif best is None:
            tally.faults.append(f"impossible {where}")
        elif not outdated and automaton.run(out.walk) != best.rank and backtrack_closed(automaton):
            tally.faults.append(f"rank {automaton.run(out.walk)} instead of {best.rank} {where}")
        elif not outdated and not bench.failed and len(out.walk) - 1 != best.hops:
            tally.faults.append(f"{len(out.walk) - 1} hops instead of {best.hops} {where}")
        return True
    if best is None:
        tally.no_path += 1
    elif backtrack_closed(automaton):
        tally.faults.append(f"lost {where}")
    else:
        tally.stranded += 1
    return False


def torture(bench: SwitchBench, rng: random.Random, *, rounds: int, packets: int = 4, most: int = 8) -> Tally:
    """Rounds of a random policy and random failures, a few packets each, with beliefs left over between rounds."""
    tally = Tally()
    topology = bench.topology
    while rounds:
        source, target = rng.sample(range(len(topology.hosts)), 2)
        policies = policies_for(topology, random_rule(rng, topology, source, target))
        if policies is None:
            continue
        rounds -= 1
        bench.use(policies)
        if rng.random() < 0.5:
            bench.plane.forget(topology)
        down = min(len(topology.links), rng.choice([0, 1, 1, 2, 3, 5, most]))
        bench.fail(frozenset(rng.sample(range(len(topology.links)), down)))
        for _ in range(packets):
            check_packet(bench, tally, source, target, sport=rng.randrange(65536), v6=rng.random() < 0.3)
            for entry in kernel.keys(bench.plane.maps["pauses"], 8):
                kernel.delete(bench.plane.maps["pauses"], entry)
    return tally

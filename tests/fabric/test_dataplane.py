"""The switch program, run by the kernel's own test runner, does what the oracle says, packet by packet."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dovetail.fabric import kernel, packets, structs
from dovetail.fabric.dataplane import PAUSE, addresses, host_slot, link_slot
from dovetail.fabric.hooks import HOOKS
from dovetail.fabric.routing import shapes
from dovetail.fabric.routing.policy import compile_policy
from dovetail.fabric.routing.topology import Topology

from .cases import Tally, check_packet, policies_for, random_fabric, random_rule, torture
from .switch_bench import SwitchBench, bench

pytestmark = pytest.mark.root
TREE = shapes.fat_tree(4, hosts=2)


@pytest.fixture(scope="module", params=HOOKS)
def tree(request: pytest.FixtureRequest) -> Iterator[SwitchBench]:
    with bench(TREE, hook=request.param) as made:
        yield made


@pytest.fixture
def fresh(tree: SwitchBench) -> SwitchBench:
    tree.fail(frozenset())
    policy(tree)
    tree.plane.forget(TREE)
    return tree


def policy(b: SwitchBench, *classes: dict[str, Any], **rest: Any) -> None:
    b.use(compile_policy({"classes": list(classes), **rest}, b.topology))


def counted(b: SwitchBench, name: str) -> int:
    return b.plane.totals(b.topology)[name]


FABRICS = [
    shapes.fat_tree(4),
    shapes.leaf_spine(4, 3),
    shapes.ring(9),
    shapes.ring(70),
    shapes.fat_tree(8),
    shapes.expander(250, 4),
    shapes.expander(400, 4),
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("topology", FABRICS, ids=lambda t: t.name)
def test_every_packet_agrees_with_the_oracle(topology: Topology, hook: str) -> None:
    rng = random.Random(len(topology.links))
    rounds = 40 if len(topology.switches) < 64 else 8
    with bench(topology, hook=hook) as b:
        tally = torture(b, rng, rounds=rounds)
    assert tally.faults == []
    assert tally.delivered > tally.packets // 8


@pytest.mark.parametrize("hook", HOOKS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31), st.integers(3, 16), st.integers(0, 14))
@example(1014039, 6, 5)  # a fabric that is whole again, and switches that do not know it yet
@example(8275, 16, 6)  # a preferred switch is back, and others still believe that its links failed
def test_random_fabrics_policies_and_failures(hook: str, seed: int, size: int, extra: int) -> None:
    """Whenever a compliant path survives the packet arrives on one; otherwise it is dropped and counted."""
    rng = random.Random(seed)
    with bench(random_fabric(rng, size, extra), hook=hook) as b:
        tally = torture(b, rng, rounds=6)
        totals = b.plane.totals(b.topology)
    assert tally.faults == []
    lost = tally.packets - tally.delivered
    assert totals["delivered"] == tally.delivered
    assert sum(totals[d] for d in structs.DROPS) == lost
    assert totals["drop violation"] == totals["drop hops"] == 0


def test_flows_spread_over_all_equal_paths(fresh: SwitchBench) -> None:
    cores = [fresh.send(0, 15, sport=port).walk[2] for port in range(1000, 1400)]
    shares = [cores.count(c) / len(cores) for c in sorted(set(cores))]
    assert len(shares) == 4 and min(shares) > 0.15
    assert len({fresh.send(0, 15, sport=77).walk for _ in range(5)}) == 1  # one flow, one path


def test_a_transit_switch_stops_a_packet_that_breaks_its_policy(fresh: SwitchBench) -> None:
    """Enforcement does not trust the path in the packet: a forged one ends at the first forbidden switch."""
    policy(fresh, {"from": "h0", "to": "h15", "avoid": "core0"})
    frame = packets.udp(addresses(0), addresses(15), sport=1, dport=2)
    _, out = fresh.enter(host_slot(TREE, 0), frame)
    header = structs.read_header(fresh.plane.size, out)
    agg, core = TREE.switch_index["agg0.0"], TREE.switch_index["core0"]
    forged = bytearray(out)
    struct.pack_into("<4H", forged, 14 + 24, agg, core, 14, 7)
    assert header.length == 4
    before = counted(fresh, "drop violation")
    slot = dict(_slots(TREE, agg, 0))
    verdict, forged_out = fresh.enter(slot[agg], bytes(forged))
    assert verdict == kernel.XDP_REDIRECT
    verdict, _ = fresh.enter(dict(_slots(TREE, core, agg))[core], forged_out)
    assert verdict == kernel.XDP_DROP
    assert counted(fresh, "drop violation") == before + 1


def _slots(topology: Topology, here: int, there: int) -> list[tuple[int, int]]:
    link = topology.link_index[frozenset((here, there))]
    return [(here, link_slot(link, 0 if topology.links[link].a == here else 1))]


def test_tenants_and_denied_classes_are_dropped_at_the_first_switch_and_counted(fresh: SwitchBench) -> None:
    policy(
        fresh,
        {"from": "h4", "to": "h5", "port": 9, "deny": True},
        tenants={"red": ["h0", "h1"], "blue": ["h2", "h3"]},
    )
    before = counted(fresh, "drop denied")
    assert fresh.send(0, 1).delivered and fresh.send(4, 6).delivered
    for a, b in ((0, 2), (2, 0), (0, 8)):
        out = fresh.send(a, b)
        assert not out.delivered and out.walk == (TREE.hosts[a].switch,)
    assert fresh.send(4, 5, dport=8).delivered and not fresh.send(4, 5, dport=9).delivered
    assert counted(fresh, "drop denied") == before + 4


def test_hosts_on_one_switch_meet_there_unless_a_waypoint_calls_them_out(fresh: SwitchBench) -> None:
    assert fresh.send(0, 1).walk == (0,)
    policy(fresh, {"from": "h0", "to": "h1", "via": "core0"})
    walk = fresh.send(0, 1).walk
    assert walk[0] == walk[-1] == 0 and TREE.switch_index["core0"] in walk


def test_a_new_policy_is_whole_or_not_at_all_for_every_packet(fresh: SwitchBench) -> None:
    """A packet on its way when the tables change is judged to its end by those it entered under."""
    policy(fresh, {"from": "h0", "to": "h15", "via": "core0"})
    frame = packets.udp(addresses(0), addresses(15), sport=1, dport=2)
    _, out = fresh.enter(host_slot(TREE, 0), frame)
    core = TREE.switch_index["core0"]
    policy(fresh, {"from": "h0", "to": "h15", "avoid": "core0"})
    here, walk = 0, [0]
    while out[12:14] == b"\x88\xb5":
        header = structs.read_header(fresh.plane.size, out)
        there = header.path[header.hop - 1]
        slot = dict(_slots(TREE, there, here))[there]
        verdict, out = fresh.enter(slot, out)
        assert verdict == kernel.XDP_REDIRECT
        here = there
        walk.append(here)
    assert core in walk and walk[-1] == 7
    assert core not in fresh.send(0, 15).walk
    # Two changes later its tables are gone: dropped and counted, never judged by the wrong ones.
    policy(fresh)
    _, out = fresh.enter(host_slot(TREE, 0), frame)
    policy(fresh)
    policy(fresh)
    before = counted(fresh, "drop stale")
    first = structs.read_header(fresh.plane.size, out).path[0]
    verdict, _ = fresh.enter(dict(_slots(TREE, first, 0))[first], out)
    assert verdict == kernel.XDP_DROP and counted(fresh, "drop stale") == before + 1


def test_every_single_store_of_an_installation_leaves_one_whole_policy_in_force(
    fresh: SwitchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From no class with a port to one that denies a port, and back: each write leaves the old or the new."""
    closed = {"from": "h0", "to": "h15", "port": 9, "deny": True}
    written: list[tuple[bool, bool]] = []
    store = kernel.update

    def update(fd: int, key: bytes | int, value: bytes) -> None:
        store(fd, key, value)
        with monkeypatch.context() as quiet:
            quiet.setattr(kernel, "update", store)
            fresh.settings = fresh.plane.config()
            written.append((fresh.send(0, 15, dport=8).delivered, fresh.send(0, 15, dport=9).delivered))

    for classes, before, after in (([closed], True, False), ([], False, True)):
        written.clear()
        made = compile_policy({"classes": classes}, TREE)
        with monkeypatch.context() as watched:
            watched.setattr(kernel, "update", update)
            fresh.plane.install(TREE, made, grace=0)
        fresh.settings = fresh.plane.config()
        assert len(written) > 60 and all(plain for plain, _ in written)
        assert [denied for _, denied in written] == [before] * (len(written) - 1) + [after]


def test_as_many_path_rules_as_the_compiler_lets_through_can_be_loaded(fresh: SwitchBench) -> None:
    policy(fresh, *({"from": "h0", "to": "h15", "port": n + 1, "max_hops": 10 + n} for n in range(62)))
    assert len(fresh.policies.automata) == 63
    assert fresh.send(0, 15, dport=62).delivered and fresh.send(1, 14).delivered


def test_a_link_taken_out_of_the_topology_is_not_used(fresh: SwitchBench) -> None:
    walk = fresh.send(0, 15, sport=5).walk
    gone = TREE.link_index[frozenset(walk[1:3])]
    fresh.use(fresh.policies, without=frozenset({gone}))
    out = fresh.send(0, 15, sport=5)
    assert out.delivered and set(walk[1:3]) not in [set(p) for p in itertools.pairwise(out.walk)]
    assert out.searches == 1


def _far_failure(b: SwitchBench, sport: int) -> tuple[tuple[int, ...], int]:
    """The last link before the target's switch on a flow's path: its source cannot know of it."""
    walk = b.send(0, 15, sport=sport).walk
    return walk, TREE.link_index[frozenset(walk[-2:])]


def test_detours_end_once_the_way_back_has_told_the_source(fresh: SwitchBench) -> None:
    _, link = _far_failure(fresh, 5)
    fresh.fail(frozenset({link}))
    first = fresh.send(0, 15, sport=5)
    assert first.delivered and first.failures == {link} and len(first.walk) > 5
    assert fresh.plane.believed(7) == {link}
    assert fresh.send(15, 0, sport=9).delivered  # any packet back carries what its first switch believes
    assert link in fresh.plane.believed(0)
    again = fresh.send(0, 15, sport=5)
    assert again.delivered and again.searches == 1 and len(again.walk) == 5
    kept = fresh.send(0, 15, sport=5)
    assert kept.walk == again.walk and kept.searches == 0


def test_a_stale_belief_costs_no_delivery(fresh: SwitchBench) -> None:
    """All ways are believed broken, none is: the packet forgets what it was told and arrives."""
    into = frozenset(i for i, k in enumerate(TREE.links) if 7 in (k.a, k.b))
    fresh.fail(into)
    assert not fresh.send(0, 15).delivered
    assert fresh.plane.believed(0) == into
    for entry in kernel.keys(fresh.plane.maps["pauses"], 8):
        kernel.delete(fresh.plane.maps["pauses"], entry)
    fresh.fail(frozenset())
    out = fresh.send(0, 15)
    assert out.delivered and len(out.walk) == 5


def test_belief_expires(fresh: SwitchBench) -> None:
    _, link = _far_failure(fresh, 5)
    fresh.fail(frozenset({link}))
    fresh.send(0, 15, sport=5)
    assert fresh.plane.believed(7) == {link}
    fresh.configure(life=1)  # ns: every belief that is renewed now is over at once
    fresh.plane.forget(TREE)
    fresh.send(0, 15, sport=5)
    fresh.send(15, 0)
    fresh.configure(life=10**9)
    assert fresh.plane.believed(7) == frozenset()


def test_a_belief_that_is_over_does_not_come_back_with_the_next_one(fresh: SwitchBench) -> None:
    flows = {fresh.send(0, 15, sport=s).walk[-2]: s for s in range(1000, 1100)}
    links = {agg: TREE.link_index[frozenset((agg, 7))] for agg in flows}
    first, second = flows
    fresh.configure(life=1)  # ns: over at once
    fresh.fail(frozenset({links[first]}))
    assert fresh.send(0, 15, sport=flows[first]).delivered
    fresh.configure(life=10**9)
    assert fresh.plane.believed(7) == frozenset()
    fresh.fail(frozenset({links[second]}))
    assert fresh.send(0, 15, sport=flows[second]).delivered
    assert fresh.plane.believed(7) == {links[second]}


def test_a_repaired_preference_is_taken_again_when_the_belief_is_over(fresh: SwitchBench) -> None:
    core = TREE.switch_index["core0"]
    policy(fresh, {"from": "h0", "to": "h15", "prefer": "core0"})
    assert core in fresh.send(0, 15).walk
    fresh.fail(frozenset(i for i, k in enumerate(TREE.links) if core in (k.a, k.b)))
    assert fresh.send(0, 15).delivered and fresh.send(15, 0).delivered
    fresh.fail(frozenset())
    assert fresh.send(0, 15).delivered  # perhaps still on the second best
    fresh.plane.forget(TREE)
    assert core in fresh.send(0, 15).walk


def test_a_class_that_no_path_can_serve_stops_exploring(fresh: SwitchBench) -> None:
    """The first packet finds out; its notice lets the source drop the next ones without a search, for a while."""
    fresh.plane.configure(pause=60 * 10**9)  # longer than this test takes on any machine
    try:
        fresh.fail(frozenset(i for i, k in enumerate(TREE.links) if 7 in (k.a, k.b)))
        first = fresh.send(0, 15)
        assert not first.delivered and first.notice[-1] == 0
        before, searched = counted(fresh, "drop paused"), counted(fresh, "searched")
        assert all(fresh.send(0, 15, sport=i).walk == (0,) for i in range(5))
        assert counted(fresh, "drop paused") == before + 5 and counted(fresh, "searched") == searched
        assert fresh.send(0, 13).delivered  # another target, not paused
    finally:
        fresh.plane.configure(pause=int(PAUSE * 1e9))


def test_a_notice_carries_nothing_of_the_packet(fresh: SwitchBench) -> None:
    fresh.fail(frozenset(i for i, k in enumerate(TREE.links) if 7 in (k.a, k.b)))
    frame = packets.udp(addresses(0), addresses(15), sport=1, dport=2, payload=b"secret" * 50)
    slot, here = host_slot(TREE, 0), 0
    sizes = []
    while True:
        verdict, frame = fresh.enter(slot, frame)
        if verdict != kernel.XDP_REDIRECT:
            break
        header = structs.read_header(fresh.plane.size, frame)
        sizes.append((header.kind, len(frame)))
        there = header.path[header.hop - 1]
        slot, here = dict(_slots(TREE, there, here))[there], there
    notices = [n for kind, n in sizes if kind == 1]
    assert notices and set(notices) == {14 + fresh.plane.size.header}


def test_a_policy_that_stranded_a_packet_does_not_strand_the_next(fresh: SwitchBench) -> None:
    """Not backtrack-closed: a packet may be lost, its notice tells the source, later ones arrive."""
    rng = random.Random(4)
    stranded = 0
    for _ in range(400):
        source, target = rng.sample(range(16), 2)
        rule = random_rule(rng, TREE, source, target)
        made = policies_for(TREE, rule) if rule.after or rule.max_hops < 500 else None
        if made is None:
            continue
        fresh.use(made)
        fresh.plane.forget(TREE)
        fresh.fail(frozenset(rng.sample(range(len(TREE.links)), 4)))
        tally = Tally()
        if check_packet(fresh, tally, source, target, sport=3) or not tally.stranded:
            continue
        stranded += 1
        assert any(check_packet(fresh, Tally(), source, target, sport=3) for _ in range(5))
    assert stranded


def test_arp_and_neighbour_solicitations_are_answered_for_every_host(fresh: SwitchBench) -> None:
    me, other = addresses(0), addresses(15)
    verdict, out = fresh.enter(host_slot(TREE, 0), packets.arp_request(me, other))
    assert verdict == kernel.XDP_REDIRECT
    assert out[:14] == packets.mac_bytes(me.mac) + packets.mac_bytes(other.mac) + b"\x08\x06"
    assert out[20:22] == b"\x00\x02" and out[22:28] == packets.mac_bytes(other.mac)
    verdict, out = fresh.enter(host_slot(TREE, 0), packets.neighbour_solicitation(me, other))
    assert verdict == kernel.XDP_REDIRECT
    assert out[:12] == packets.mac_bytes(me.mac) + packets.mac_bytes(other.mac)
    ip, nd = out[14:54], out[54:]
    assert nd[0] == 136 and nd[24:] == b"\x02\x01" + packets.mac_bytes(other.mac)
    assert ip[8:24] == nd[8:24]  # sent by the address that was asked for
    assert packets.checksum(ip[8:40] + struct.pack(">II", len(nd), packets.ICMPV6) + nd) == 0


def test_a_host_cannot_speak_in_the_name_of_another(fresh: SwitchBench) -> None:
    before = counted(fresh, "drop spoofed")
    verdict, _ = fresh.enter(host_slot(TREE, 0), packets.udp(addresses(2), addresses(3), sport=1, dport=1))
    assert verdict == kernel.XDP_DROP and counted(fresh, "drop spoofed") == before + 1


def test_what_is_not_for_the_fabric_is_dropped_and_counted(fresh: SwitchBench) -> None:
    me, nobody = addresses(0), addresses(4000)
    cases = [
        (packets.arp_request(me, nobody), "drop unknown host"),
        (packets.udp(me, nobody, sport=1, dport=1), "drop unknown host"),
        (packets.neighbour_solicitation(me, addresses(15), unspecified=True), "drop other"),
        (packets.ethernet(me, addresses(1), 0x8899, b"x" * 60), "drop other"),
        (packets.ethernet(me, addresses(1), structs.ETH_PROBE, b"x" * 60), "drop malformed"),
    ]
    for frame, why in cases:
        before = counted(fresh, why)
        verdict, _ = fresh.enter(host_slot(TREE, 0), frame)
        assert verdict == kernel.XDP_DROP
        assert counted(fresh, why) == before + 1, why
    before = counted(fresh, "drop malformed")
    verdict, _ = fresh.enter(link_slot(0, 0), packets.udp(me, addresses(15), sport=1, dport=1))
    assert verdict == kernel.XDP_DROP and counted(fresh, "drop malformed") == before + 1


def test_a_probe_is_signed_by_every_switch_and_treated_like_its_packet(fresh: SwitchBench) -> None:
    for v6 in (False, True):
        frame = packets.udp(addresses(0), addresses(15), sport=5, dport=7, payload=b"x", v6=v6)
        plain, probed = fresh.send(0, 15, packet=frame), fresh.send(0, 15, packet=packets.probe(frame, (3, 4)))
        walk, tag, inside = packets.read_probe(probed.packet)
        assert walk == probed.walk == plain.walk and tag == (3, 4) and inside == frame


def test_long_paths_are_continued_by_the_last_switch_they_name() -> None:
    ring = shapes.ring(70)
    with bench(ring) as b:
        out = b.send(0, 35)
        assert out.delivered and len(out.walk) == 36
        assert b.plane.totals(ring)["continued"] == 2

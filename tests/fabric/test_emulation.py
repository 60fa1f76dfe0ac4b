"""A fabric of namespaces carries real traffic and keeps its promises while links break."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.core.errors import Error
from dovetail.fabric import check, emulation, netns
from dovetail.fabric.dataplane import GRACE, addresses
from dovetail.fabric.heartbeat import HeartbeatSender
from dovetail.fabric.hooks import HOOKS, TC, TC_MTU, XDP
from dovetail.fabric.routing import oracle, shapes
from dovetail.fabric.routing.policy import compile_policy
from dovetail.fabric.routing.topology import Link, Topology

from .traffic import sockets, transfer

pytestmark = pytest.mark.root
TREE = shapes.fat_tree(4, hosts=2)
POLICY = {
    "tenants": {"red": ["h2", "h3"]},
    "classes": [{"name": "guarded", "from": "h0", "to": "h15", "via": "core0"}],
}


@pytest.fixture(scope="module", params=HOOKS)
def shared(request: pytest.FixtureRequest) -> Iterator[emulation.Fabric]:
    with emulation.temporary(TREE, POLICY, hook=request.param) as made:
        assert made.plane.hook == request.param
        yield made


@pytest.fixture
def fabric(shared: emulation.Fabric) -> Iterator[emulation.Fabric]:
    yield shared
    for link in shared.failed():
        shared.heal(link)
    if shared.document is not POLICY:
        shared.use(POLICY)


def walk_of_stream(f: emulation.Fabric) -> tuple[int, ...]:
    """The way of datagrams from h0, port 20000, to h15, port 7000; the prober counts flows from port 1024."""
    return check.find_walk(f, 0, 15, flow=20000 - 1024, port=7000)


def checksum_errors(f: emulation.Fabric, host: int) -> int:
    with netns.inside(f.names.host(host)):
        text = Path("/proc/thread-self/net/snmp").read_text()
    head, values = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(head, values, strict=True))["InCsumErrors"])


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_tcp_arrives_intact_with_right_checksums(fabric: emulation.Fabric, family: int) -> None:
    data = random.Random(1).randbytes(1 << 20)
    assert transfer(fabric, 0, 15, data, family) == data
    assert transfer(fabric, 15, 1, data, family) == data
    assert checksum_errors(fabric, 15) == checksum_errors(fabric, 1) == 0


@pytest.mark.parametrize(
    ("mtu", "hook"), [(1500, TC), (9000, TC), (TC_MTU, TC), (1500, XDP), (9000, XDP), (65_000, "")]
)
def test_full_sized_packets_pass_unfragmented(mtu: int, hook: str) -> None:
    """A host's MTU is what the topology says; the links inside are wider by the header."""
    line = shapes.ring(3, mtu=mtu)
    with emulation.temporary(line, hook=hook) as f:
        assert f.plane.hook == (hook or XDP)
        a, b = (sockets(f, h, socket.AF_INET, socket.SOCK_DGRAM) for h in (0, 1))
        with contextlib.closing(a), contextlib.closing(b):
            b.bind(("", 5000))
            a.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: never fragment
            body = os.urandom(mtu - 28)
            a.sendto(body, (addresses(1).v4, 5000))
            assert b.recv(65536) == body
            with pytest.raises(OSError, match="Message too long"):
                a.sendto(body + b"x", (addresses(1).v4, 5000))
            a.setsockopt(socket.IPPROTO_IP, 10, 0)  # fragments are put together again at the far end
            longer = os.urandom(min(3 * mtu, 65_507))
            a.sendto(longer, (addresses(1).v4, 5000))
            assert b.recv(65536) == longer


def test_every_pair_agrees_with_the_oracle_while_links_break(fabric: emulation.Fabric) -> None:
    rng = random.Random(3)
    with check.Prober(fabric) as prober:
        for n in (0, 1, 3, 5):
            for link in rng.sample(range(len(TREE.links)), n):
                fabric.fail(link, how=rng.choice(["down", "drained"]), end=rng.randrange(2))
            assert len(fabric.failed()) == n
            report = check.check(fabric, flows=1, seed=n, v6=bool(n % 2), prober=prober)
            assert report.holds, (report.violations + report.loops + report.lost)[:3]
            assert report.delivered > 100 and report.denied > 50
            for link in fabric.failed():
                fabric.heal(link)


def test_a_link_that_comes_back_during_a_check_is_no_violation(
    fabric: emulation.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [frozenset(range(len(TREE.links))), frozenset[int]()]  # as read just before and after it has its carrier
    monkeypatch.setattr(fabric, "failed", lambda: seen.pop(0) if len(seen) > 1 else seen[0])
    report = check.check(fabric, flows=1, most=50)
    assert report.holds and report.probes == 50
    flapping = itertools.cycle([frozenset({0}), frozenset[int]()])
    monkeypatch.setattr(fabric, "failed", lambda: next(flapping))
    with pytest.raises(Error, match="links kept failing or coming back"):
        check.check(fabric, flows=1, most=5)


def test_check_probes_classes_of_one_port_and_notices_what_is_not_in_force(fabric: emulation.Fabric) -> None:
    document = {
        "classes": [
            {"from": "h0", "to": "h15", "port": 29500, "via": "core0"},
            {"from": "h4", "to": "h12", "prefer": "core1"},
        ]
    }
    fabric.use(document)
    fabric.plane.forget(TREE)
    assert "core0" in check.trace(fabric, 0, 15, port=29500).walk
    report = check.check(fabric, flows=4)
    assert report.holds and report.probes == 4 * (16 * 15 + 2)
    fabric.plane.install(TREE, compile_policy({}, TREE))  # behind its back
    report = check.check(fabric, flows=4)
    assert not report.holds and not report.loops and not report.lost
    assert {v.split(":")[0] for v in report.violations} <= {"h0 to h15", "h15 to h0"} and report.violations
    assert {v.split(":")[0] for v in report.less_preferred} <= {"h4 to h12", "h12 to h4"} and report.less_preferred


def test_no_datagram_is_lost_when_a_link_loses_its_carrier(fabric: emulation.Fabric) -> None:
    """Datagrams one at a time, a link of their path cut between two of them: the next one already goes another way."""
    a, b = (sockets(fabric, h, socket.AF_INET, socket.SOCK_DGRAM) for h in (0, 15))
    with contextlib.closing(a), contextlib.closing(b):
        b.bind(("", 7000))
        a.bind(("", 20000))
        for position in range(4):
            walk = walk_of_stream(fabric)
            link = TREE.link_index[frozenset(walk[position : position + 2])]
            for n in range(20):
                if n == 10:
                    fabric.fail(link, end=n % 2)
                a.sendto(n.to_bytes(4, "little"), (addresses(15).v4, 7000))
                assert int.from_bytes(b.recv(100), "little") == n
            fabric.heal(link)


def test_a_tcp_stream_survives_a_cut_of_its_path(fabric: emulation.Fabric) -> None:
    data = random.Random(2).randbytes(8 << 20)
    stop = threading.Event()

    def break_things() -> None:
        rng = random.Random(5)
        while not stop.is_set():
            link = rng.randrange(16, 32)  # between aggregation and core
            fabric.fail(link)
            time.sleep(0.03)
            fabric.heal(link)

    breaker = threading.Thread(target=break_things)
    breaker.start()
    try:
        assert transfer(fabric, 1, 14, data) == data
    finally:
        stop.set()
        breaker.join(10)


def test_a_policy_changes_without_a_window(fabric: emulation.Fabric) -> None:
    """Probes run while the waypoint changes to and fro: each walk obeys one of the two policies, none is lost.

    A change comes whenever a whole batch was sent and received since the last one: no probe is on its way through two.
    """
    documents = [{"classes": [{"from": "h0", "to": "h15", "via": core}]} for core in ("core0", "core3")]
    policies = [compile_policy(document, TREE) for document in documents]
    fabric.use(documents[0])
    batches, changes = 0, 0
    quiet, stop = threading.Condition(), threading.Event()

    def swap() -> None:
        nonlocal changes
        while not stop.is_set():
            changes += 1
            fabric.plane.install(TREE, policies[changes % 2], grace=0)
            with quiet:
                wanted = batches + 2  # the one under way, and one that begins after this change
                while batches < wanted and not stop.is_set():
                    quiet.wait(1.0)

    walks: list[tuple[int, ...]] = []
    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        with check.Prober(fabric) as prober:
            for i in range(60):
                walks += [walk for _, walk in prober.send([(0, 15, i * 20 + j) for j in range(20)]).values()]
                with quiet:
                    batches += 1
                    quiet.notify_all()
    finally:
        stop.set()
        with quiet:
            quiet.notify_all()
        swapper.join(10)
    assert len(walks) == 60 * 20 and changes > 5
    rules = [made.of(0, 15) for made in policies]
    obeyed = {tuple(not oracle.violation(TREE.graph, rule, walk, 0, 7) for rule in rules if rule) for walk in walks}
    assert (False, False) not in obeyed  # a link believed failed may lead a walk over both, which obeys either
    assert {(True, False), (False, True)} <= obeyed


def test_changes_in_quick_succession_wait_for_the_packets_under_way(fabric: emulation.Fabric) -> None:
    changed = []
    for document in ({}, POLICY):
        fabric.use(document)
        changed.append(fabric.plane.config()["changed"])
    assert changed[1] - changed[0] >= GRACE * 1e9


def test_silent_and_one_way_failures_are_found_by_missing_heartbeats(fabric: emulation.Fabric) -> None:
    found = emulation.find(fabric.name)  # as another process finds it: by what the ports' programs hold
    beat = HeartbeatSender(found, misses=3)
    beat._thread = threading.Thread(target=lambda: None)  # rounds are made by hand here
    beat.start()
    try:
        for how in ("silent", "one-way"):
            walk = walk_of_stream(fabric)
            link = TREE.link_index[frozenset(walk[2:4])]
            end = 0 if TREE.links[link].a == walk[3] else 1  # frames vanish on arrival at the far end
            fabric.fail(link, how=how, end=end)
            assert walk_of_stream(fabric) == ()  # nobody can know yet
            for _ in range(200):
                beat.round()
                time.sleep(0.005)
                if walk_of_stream(fabric):
                    break
            else:
                pytest.fail("the switches did not learn of it")
            fabric.heal(link)
            for _ in range(200):
                beat.round()
                time.sleep(0.005)
                fabric.plane.forget(TREE)
                if walk_of_stream(fabric) == walk:
                    break
            else:
                pytest.fail("the link is not used again")
    finally:
        beat.stop()
        found.close()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_rate_limits_a_link(hook: str) -> None:
    slow = shapes.ring(3)
    slow = Topology(slow.name, slow.switches, tuple(Link(k.a, k.b, 2e6) for k in slow.links), slow.hosts)
    with emulation.temporary(slow, hook=hook) as f:
        begin = time.monotonic()
        assert len(transfer(f, 0, 1, bytes(400_000))) == 400_000
        assert time.monotonic() - begin > 0.12  # 0.4 MB at 2 MB/s, less what the queue holds


def test_up_is_idempotent_and_refuses_another_topology(fabric: emulation.Fabric) -> None:
    before = fabric.plane.config()["generation"]
    again = emulation.up(TREE, POLICY, name=fabric.name)
    try:
        assert again.names == fabric.names
        assert again.plane.config()["generation"] == before + 1
    finally:
        again.close()
    with pytest.raises(Error, match="is up with another topology"):
        emulation.up(shapes.ring(3), name=fabric.name)
    with pytest.raises(Error, match="fabric name: expected"):
        emulation.up(TREE, name="../x")

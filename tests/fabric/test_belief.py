"""What a switch heard of failures fades link by link, although nobody ever says that a link has come back."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from dovetail.fabric import kernel
from dovetail.fabric.hooks import HOOKS
from dovetail.fabric.routing import shapes

from .switch_bench import SwitchBench, bench

pytestmark = pytest.mark.root
TREE = shapes.fat_tree(4, hosts=2)
SECOND = 10**9  # ns
LIFE = 1000 * SECOND
SOURCE, TARGET = 0, 7
"""The switches of h0 and h15."""


@pytest.fixture(scope="module", params=HOOKS)
def tree(request: pytest.FixtureRequest) -> Iterator[SwitchBench]:
    with bench(TREE, hook=request.param) as made:
        made.configure(life=LIFE)
        yield made


@pytest.fixture
def fresh(tree: SwitchBench) -> SwitchBench:
    tree.fail(frozenset())
    tree.plane.forget(TREE)
    return tree


def ends(b: SwitchBench, switch: int) -> dict[int, int]:
    """Links believed failed, and when each belief is over, ns."""
    size = b.plane.size
    raw = kernel.lookup(b.plane.maps["nodes"], switch, size.node)
    until = struct.unpack_from(f"<{size.links}Q", raw, size.links // 8)
    return {link: until[link] for link in b.plane.believed(switch)}


def let_believe(b: SwitchBench, switch: int, until: dict[int, int]) -> None:
    """Exactly these links, each until its own time."""
    size = b.plane.size
    raw = bytearray(kernel.lookup(b.plane.maps["nodes"], switch, size.node))
    bits = sum(1 << link for link in until).to_bytes(size.links // 8, "little")
    times = struct.pack(f"<{size.links}Q", *(until.get(link, 0) for link in range(size.links)))
    packed = bits + times + struct.pack("<Q", min(until.values(), default=0))
    raw[: len(packed)] = packed
    (version,) = struct.unpack_from("<I", raw, size.node - 8)
    struct.pack_into("<I", raw, size.node - 8, version + 1)
    kernel.update(b.plane.maps["nodes"], switch, bytes(raw))


def link(*names: str) -> int:
    return TREE.link_index[frozenset(TREE.switch_index[n] for n in names)]


def test_each_belief_ends_at_its_own_time(fresh: SwitchBench) -> None:
    over, lasting = link("core0", "agg3.0"), link("core1", "agg3.0")
    now = time.monotonic_ns()
    let_believe(fresh, SOURCE, {over: now - 1, lasting: now + 100 * SECOND})
    assert fresh.plane.believed(SOURCE) == {lasting}
    out = fresh.send(0, 15)
    assert out.delivered and out.failures == {lasting}
    assert set(ends(fresh, SOURCE)) == {lasting}


def test_a_flow_goes_back_to_a_repaired_link_without_being_told(fresh: SwitchBench) -> None:
    walk = fresh.send(0, 15, sport=5).walk
    repaired = TREE.link_index[frozenset(walk[2:4])]
    other = next(k for k in (link("agg1.0", "core0"), link("agg1.1", "core3")) if k != repaired)
    later = time.monotonic_ns() + 100 * SECOND
    let_believe(fresh, SOURCE, {repaired: later, other: later})
    for _ in range(2):  # found, then kept
        assert fresh.send(0, 15, sport=5).walk != walk
    let_believe(fresh, SOURCE, {repaired: 1, other: later})
    for _ in range(2):
        assert fresh.send(0, 15, sport=5).walk == walk


def test_the_hearsay_beside_a_failure_that_a_packet_meets_lives_no_longer_for_it(fresh: SwitchBench) -> None:
    rumour = link("agg1.0", "core0")
    walk = fresh.send(0, 15, sport=5).walk
    broken = TREE.link_index[frozenset(walk[-2:])]
    now = time.monotonic_ns()
    let_believe(fresh, SOURCE, {rumour: now + 20 * SECOND})
    fresh.fail(frozenset({broken}))
    out = fresh.send(0, 15, sport=5)
    assert out.delivered and out.failures == {rumour, broken}
    learned = ends(fresh, TARGET)
    assert learned[rumour] <= now + 20 * SECOND
    assert learned[broken] >= now + LIFE * 254 // 255


def test_two_switches_cannot_keep_a_rumour_alive_between_them(fresh: SwitchBench) -> None:
    """News of other failures comes all the time; what was heard of the first one still ends when it should."""
    rumour, end = link("agg1.0", "core0"), time.monotonic_ns() + 20 * SECOND
    let_believe(fresh, SOURCE, {rumour: end})
    for n in range(40):
        walk = fresh.send(0, 15, sport=n).walk
        fresh.fail(frozenset({TREE.link_index[frozenset(walk[n % 2 * 2 + 1 : n % 2 * 2 + 3])]}))
        assert fresh.send(0, 15, sport=n).delivered and fresh.send(15, 0, sport=n).delivered
        for switch in (SOURCE, TARGET):
            assert ends(fresh, switch).get(rumour, 0) <= end


def test_a_failure_that_is_met_again_is_believed_anew(fresh: SwitchBench) -> None:
    broken = TREE.link_index[frozenset(fresh.send(0, 15, sport=5).walk[-2:])]
    fresh.fail(frozenset({broken}))
    now = time.monotonic_ns()
    let_believe(fresh, TARGET, {broken: now + 20 * SECOND})
    assert fresh.send(0, 15, sport=5).delivered
    assert ends(fresh, TARGET)[broken] >= now + LIFE * 254 // 255
    assert fresh.send(15, 0).delivered
    assert ends(fresh, SOURCE)[broken] >= now + LIFE // 2  # and passed on with what is left of that

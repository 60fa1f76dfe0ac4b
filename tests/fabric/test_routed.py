"""The baselines are real: the same fabric with kernel routers, a controller, and FRR."""

from __future__ import annotations

import subprocess
import time

import pytest

from dovetail.fabric import emulate, frr, netns, routed, shapes
from dovetail.fabric.dataplane import addresses

pytestmark = pytest.mark.root


def reaches(fabric: routed.Routed, a: int, b: int) -> bool:
    ping = fabric.run(a, ["ping", "-c", "1", "-W", "1", addresses(b).v4], stdout=subprocess.DEVNULL)
    return ping.wait(10) == 0


def eventually(fabric: routed.Routed, a: int, b: int, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if reaches(fabric, a, b):
            return True
    return False


def test_static_routes_reach_every_host_and_a_cut_downward_link_is_not_repaired() -> None:
    tree = shapes.fat_tree(4)
    with routed.routed(tree) as fabric:
        name = fabric.names.name
        assert reaches(fabric, 0, 7)
        walk = fabric.path(0, 7, 20000, 7000)
        assert len(walk) == 5 and (walk[0], walk[-1]) == (0, 7)
        for core in range(16, 20):  # every way down into the pod but one is cut
            for agg in (14, 15):
                if frozenset((core, agg)) in tree.link_index and core != 19:
                    fabric.fail(tree.link_index[frozenset((core, agg))])
        answers = {reaches(fabric, a, 7) for a in range(6)}
        assert False in answers
    assert not netns.named(f"dvf-{name}-")


def test_a_controller_repairs_what_static_routes_cannot() -> None:
    ring = shapes.ring(5)
    with routed.routed(ring) as fabric:
        controller = routed.Controller(fabric, delay=0.05)
        controller.start()
        try:
            fabric.fail(ring.link_index[frozenset((0, 1))])
            assert eventually(fabric, 0, 1)
        finally:
            controller.stop()


@pytest.mark.skipif(bool(frr.missing()), reason="FRR is not installed")
def test_frr_finds_and_repairs_routes() -> None:
    ring = shapes.ring(4)
    with frr.frr(ring) as fabric:
        home = emulate.RUN / fabric.names.name
        assert home.exists()
        assert eventually(fabric, 0, 1)
        fabric.fail(ring.link_index[frozenset((0, 1))])
        assert eventually(fabric, 0, 1)
    assert not home.exists() and not netns.named(f"dvf-{fabric.names.name}-")

"""The benchmark's baselines are real: the same fabric with kernel routers, a controller, and FRR."""

from __future__ import annotations

import importlib
import subprocess
import time
from types import ModuleType
from typing import Any

import pytest

from dovetail.fabric import netns
from dovetail.fabric.dataplane import addresses
from dovetail.fabric.lock import RUN
from dovetail.fabric.routing import shapes
from tests.paths import BENCHMARKS

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def routers(benchmarks: None) -> ModuleType:
    return importlib.import_module("fabric_routed")


def reaches(fabric: Any, a: int, b: int) -> bool:
    ping = fabric.run(a, ["ping", "-c", "1", "-W", "1", addresses(b).v4], stdout=subprocess.DEVNULL)
    return bool(ping.wait(10) == 0)


def eventually(fabric: Any, a: int, b: int, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if reaches(fabric, a, b):
            return True
    return False


def test_static_routes_reach_every_host_and_a_cut_downward_link_is_not_repaired(routers: ModuleType) -> None:
    tree = shapes.fat_tree(4)
    with routers.routed(tree) as fabric:
        name = fabric.names.name
        assert reaches(fabric, 0, 7)
        walk = fabric.walk_of(0, 7, 20000, 7000)
        assert len(walk) == 5 and (walk[0], walk[-1]) == (0, 7)
        for core in range(16, 20):  # every way down into the pod but one is cut
            for agg in (14, 15):
                if frozenset((core, agg)) in tree.link_index and core != 19:
                    fabric.fail(tree.link_index[frozenset((core, agg))])
        answers = {reaches(fabric, a, 7) for a in range(6)}
        assert False in answers
    assert not netns.named(f"dvf-{name}-")


def test_a_silent_cut_of_routers_heals(routers: ModuleType) -> None:
    ring = shapes.ring(3)
    link = ring.link_index[frozenset((0, 1))]
    with routers.routed(ring) as fabric:
        assert reaches(fabric, 0, 1)
        fabric.fail(link, how="silent")
        assert not reaches(fabric, 0, 1)
        fabric.heal(link)
        assert eventually(fabric, 0, 1)


def test_a_controller_repairs_what_static_routes_cannot(routers: ModuleType) -> None:
    ring = shapes.ring(5)
    with routers.routed(ring) as fabric:
        controller = routers.RouteController(fabric, delay=0.05)
        controller.start()
        try:
            fabric.fail(ring.link_index[frozenset((0, 1))])
            assert eventually(fabric, 0, 1)
        finally:
            controller.stop()


def test_frr_finds_and_repairs_routes() -> None:
    baseline = importlib.import_module("fabric_frr")
    if why := baseline.missing():
        pytest.skip(why)
    ring = shapes.ring(4)
    with baseline.frr(ring) as fabric:
        home = RUN / fabric.names.name
        assert home.exists()
        assert eventually(fabric, 0, 1)
        fabric.fail(ring.link_index[frozenset((0, 1))])
        assert eventually(fabric, 0, 1)
    assert not home.exists() and not netns.named(f"dvf-{fabric.names.name}-")

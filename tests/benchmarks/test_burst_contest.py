"""The contest of burst plans on emulated devices: real ranks, real tensors, times as the profile says."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from dovetail.emulate.contest import EmulatedCluster
from tests.paths import BENCHMARKS
from tests.simulate.test_burst import profile


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("burst_contest")


def test_plans_take_turns_and_move_the_predicted_bytes(contest: ModuleType) -> None:
    small = profile(3, parameters=4000).scaled(forward=4e-3, backward=8e-3)
    outcome = contest.run(
        small,
        ["ddp", "dp:2", "best-dp", "burst", "burst:1"],
        EmulatedCluster(ranks=2, rate=None),
        batch=6,
        bucket_bytes=4000,
        rounds=1,
        iterations=2,
        network_seconds=1.0,
        timeout=900,
    )
    assert [e.policy for e in outcome.entries if e.policy == "ddp"] == ["ddp"] and len(outcome.entries) == 5
    assert outcome.entry("dp:2").plan.counts == (2, 2, 2) and outcome.entry("burst:1").plan.counts == (1, 1, 1)
    assert list(outcome.networks) == [2] and outcome.networks[2].emulated
    assert sorted(outcome.moves) == ["1-2", "2-1"]
    for move in outcome.moves.values():
        assert all(s.seconds.median > 0 and s.seconds.samples >= 3 for s in move.samples)
    for entry in outcome.entries:
        assert len(entry.seconds) == 2 and entry.moved == entry.predicted_moved
        assert entry.predicted.emulated and entry.predicted.source == "predicted"
        same = [
            e for e in outcome.entries if "ddp" not in (e.policy, entry.policy) and e.plan.counts == entry.plan.counts
        ]
        assert set(entry.same_as) == {e.policy for e in same} - {entry.policy}
        assert all(e.seconds == entry.seconds for e in same)
    # Of two devices one has nothing to do while the other works.
    alone = outcome.entry("burst:1")
    assert alone.recorded is not None and alone.recorded.source == "measured" and alone.idle is not None
    assert alone.idle >= sum(layer.forward(6) + layer.backward(6) for layer in small.layers)
    assert {s.track.partition("/")[0] for s in alone.recorded.spans} == {"rank 0", "rank 1"}
    assert outcome.entry("ddp").recorded is None

"""A contest lets every contestant run the same iterations and reports each beside its prediction."""

from __future__ import annotations

import pytest

from dovetail import planning
from dovetail.core.profile import Profile
from dovetail.emulate.contest import DOVETAIL, EmulatedCluster, run
from dovetail.view.example import profile as example_profile

QUICK = {"warmup": 1, "measure": 2, "candidates": 3, "steps": 1, "rounds": 1, "network_seconds": 0.2}


@pytest.fixture(scope="module")
def small() -> Profile:
    return example_profile().scaled(forward=0.004, backward=0.008)


@pytest.mark.parametrize("latency", [None, 0.002], ids=["gloo", "added latency"])
def test_every_contestant_runs_as_often_and_is_predicted_from_the_same_profile(
    small: Profile, latency: float | None
) -> None:
    lines: list[str] = []
    outcome = run(
        small,
        ["single", "per-tensor", "threshold:1000"],
        EmulatedCluster(ranks=2, rate=None, latency=latency),
        rounds=2,
        iterations=2,
        tuning=QUICK,
        timeout=900,
        on_line=lines.append,
    )
    assert {e.policy for e in outcome.entries} == {"ddp", "single", "per-tensor", "threshold:1000", DOVETAIL}
    assert all(len(e.seconds) == 4 and min(e.seconds) > 0.012 for e in outcome.entries)
    assert outcome.entry("single").buckets == 1
    # One program under two names: the same turns, the same times.
    assert "threshold:1000" in outcome.entry("single").same_as
    assert outcome.entry("threshold:1000").seconds == outcome.entry("single").seconds
    assert not {"single", "per-tensor"} & set(outcome.entry("ddp").same_as)
    assert outcome.entry("per-tensor").buckets == len(small.tensors)
    for policy in ("ddp", "single", "per-tensor"):
        expected = planning.plan(small, outcome.network, policy=policy).prediction
        assert outcome.entry(policy).predicted == pytest.approx(expected.iteration)
    kept = outcome.kept or planning.plan(small, outcome.network, policy="ddp")
    again = planning.predict(kept, small, outcome.network).prediction.iteration
    assert outcome.entry(DOVETAIL).predicted == pytest.approx(again)
    assert outcome.entry(DOVETAIL).buckets == len(kept.buckets)
    assert any(line.startswith("round 2 of 2") for line in lines) and "workers" in outcome.explained
    for name, timeline in outcome.timelines.items():
        assert timeline.emulated and timeline.source == "measured"
        assert sum(s.kind == "forward" for s in timeline.spans) == 1
        assert sum(s.kind == "communication" for s in timeline.spans) == outcome.entry(name).buckets
        assert sum(s.bytes for s in timeline.spans) == small.parameter_bytes
    if latency:
        samples = outcome.network.collectives["all_reduce"].samples
        assert outcome.network.emulated and all(s.seconds.median >= latency for s in samples)

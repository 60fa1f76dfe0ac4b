"""The predicted timeline of a plan that overlaps with forward: one period, every wait in it, and what hid what."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.network import Collective, Fit, Network
from dovetail.core.profile import Profile
from dovetail.core.timeline import Span, Timeline
from dovetail.planning import plan
from dovetail.planning.merge.policies import COMPARED
from dovetail.simulate import simulate
from dovetail.simulate.overlap import hidden
from dovetail.view import tracks
from tests.planning.merge.oracle import made_profile


def network(scatter: float, gather: float, latency: float = 1e-3) -> Network:
    fits = {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}
    return Network(
        name="made",
        ranks=4,
        source="a test",
        measured=False,
        collectives={
            name: Collective(fit=Fit(latency=latency, seconds_per_byte=b, error=0.0))  # type: ignore[misc]
            for name, b in fits.items()
        },
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    n = draw(st.integers(1, 10))
    times = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=n, max_size=n)
    sizes = draw(st.lists(st.integers(0, 10**8), min_size=n, max_size=n))
    return made_profile(sizes, draw(times), forward=draw(times), late=draw(st.sampled_from([0.0, 0.25])))


@settings(max_examples=40)
@given(
    profiles(),
    st.sampled_from(["auto", *COMPARED]),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([0.0, 0.125]),
    st.sampled_from([1e-9, 2e-9, 1e-8]),
)
def test_the_timeline_lasts_as_long_as_the_plan_predicts(
    profile: Profile, policy: str, workers: int, optimizer: float, gather: float
) -> None:
    net = network(2e-9, gather)
    made = plan(profile, net, workers=workers, policy=policy, overlap="forward", optimizer=optimizer)
    timeline = simulate(made, profile, net)
    timeline.check()
    assert timeline.duration == pytest.approx(made.prediction.iteration, rel=1e-12)
    assert timeline.busy("forward") == pytest.approx(made.prediction.forward, abs=1e-9)
    assert timeline.busy("backward") == pytest.approx(made.prediction.backward, abs=1e-9)
    assert timeline.busy("optimizer") == pytest.approx(optimizer if made.bytes else 0.0, abs=1e-9)
    for name in ("rank 0/compute", "rank 0/network"):
        spans = sorted((s.start, s.stop) for s in timeline.spans if s.track == name)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans)), "one thing at a time"
    assert files.decode(files.encode(timeline), Timeline) == timeline


def spans(timeline: Timeline, prefix: str) -> dict[str, Span]:
    return {s.name: s for s in timeline.spans if s.name.startswith(prefix)}


def test_every_bucket_is_gathered_before_forward_needs_it_and_reduced_after_backward_made_it() -> None:
    profile = made_profile([10, 20, 30], [1.0, 1.0, 1.0], forward=[1.0, 1.0, 1.0])
    net = network(0.1, 0.2, latency=0.0)
    timeline = simulate(plan(profile, net, policy="per-tensor", overlap="forward"), profile, net)
    gathers, scatters = spans(timeline, "all-gather"), spans(timeline, "reduce-scatter")
    assert [(s.name, s.start, s.stop) for s in gathers.values()] == [
        ("all-gather 2 (1 tensor)", 0.0, pytest.approx(6.0)),
        ("all-gather 1 (1 tensor)", pytest.approx(6.0), pytest.approx(10.0)),
        ("all-gather 0 (1 tensor)", pytest.approx(10.0), pytest.approx(12.0)),
    ]
    waits = [(s.name, s.start, s.stop) for s in timeline.spans if s.kind == "wait"]
    assert waits == [
        ("wait for layer0", 0.0, pytest.approx(6.0)),
        ("wait for layer1", pytest.approx(7.0), pytest.approx(10.0)),
        ("wait for layer2", pytest.approx(11.0), pytest.approx(12.0)),
    ]
    assert [t for s in scatters.values() for t in (s.start, s.stop)] == pytest.approx([14, 15, 15, 17, 17, 20])
    assert timeline.duration == pytest.approx(20.0)
    assert tracks.exposed(timeline) == pytest.approx(14.0)


def test_what_hides_behind_which_layer_is_told() -> None:
    profile = made_profile([10, 10, 10], [1.0, 1.0, 1.0], forward=[2.0, 2.0, 2.0])
    net = network(0.05, 0.1, latency=0.0)
    timeline = simulate(plan(profile, net, policy="per-tensor", overlap="forward"), profile, net)
    found = {h.span.name.partition(" (")[0]: h for h in hidden(timeline)}
    assert found["all-gather 2"].behind == () and found["all-gather 2"].exposed == pytest.approx(1.0)
    assert [s.name for s in found["all-gather 1"].behind] == ["layer0"]
    assert [s.name for s in found["all-gather 0"].behind] == ["layer0"]
    assert found["all-gather 0"].exposed == pytest.approx(0.0)
    assert [s.kind for s in found["reduce-scatter 0"].behind] == ["backward"]
    assert found["reduce-scatter 2"].exposed == pytest.approx(0.5)


def test_one_worker_communicates_with_nobody() -> None:
    profile, net = made_profile([10, 10], [1.0, 1.0]), network(1e-9, 1e-9)
    timeline = simulate(plan(profile, net, workers=1, overlap="forward"), profile, net)
    assert {s.kind for s in timeline.spans} == {"forward", "backward"}

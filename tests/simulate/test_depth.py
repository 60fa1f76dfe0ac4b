"""The timeline of an iteration of partial depth agrees with the plan that predicts it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.planning.depth.planner import POLICIES, WorkerDevice, plan
from dovetail.simulate.depth import savings, simulate_depth
from dovetail.view import units
from dovetail.view.timeline import headline
from dovetail.view.tracks import exposed
from tests.planning.merge.oracle import made_network, made_profile

PROFILE = made_profile([1000] * 8, [2.0] * 8, forward=[1.0] * 8)
NETWORK = made_network(0.1, 1e-4)


@pytest.mark.parametrize("policy", ["full", "ladder", "balanced", "late-ladder"])
def test_every_worker_computes_as_long_as_predicted_and_the_iteration_ends_with_the_slowest(policy: str) -> None:
    chosen = plan(PROFILE, NETWORK, workers=4, policy=policy)
    timeline = simulate_depth(chosen, PROFILE, NETWORK)
    timeline.check()
    phase = chosen.phases[-1]
    assert timeline.duration == pytest.approx(phase.iteration)
    for worker, prediction in enumerate(phase.workers):
        own = [s for s in timeline.spans if s.track == f"rank {worker}/compute"]
        for kind, seconds in (("forward", prediction.forward), ("backward", prediction.backward)):
            assert sum(s.duration for s in own if s.kind == kind) == pytest.approx(seconds)
        assert len([s for s in own if s.kind == "backward"]) == phase.depths[worker]
        assert max(s.stop for s in own) == pytest.approx(phase.iteration), "a worker that is done waits"
        assert all(a.stop == pytest.approx(b.start) for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("policy", list(POLICIES))
@given(
    layers=st.lists(
        st.tuples(st.integers(1, 10_000), st.floats(0.0, 10.0), st.floats(0.0, 10.0)), min_size=1, max_size=6
    ),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=5),
    late=st.sampled_from([0.0, 0.3]),
    seconds_per_byte=st.sampled_from([0.0, 1e-5, 1e-2]),
)
def test_a_plan_predicts_exactly_what_its_timeline_shows(
    policy: str, layers: list[tuple[int, float, float]], speeds: list[float], late: float, seconds_per_byte: float
) -> None:
    sizes, backward, forward = (list(column) for column in zip(*layers, strict=True))
    profile = made_profile(sizes, backward, forward=forward, late=late)
    network = made_network(0.01, seconds_per_byte)
    chosen = plan(profile, network, policy=policy, devices=[WorkerDevice(speed=speed) for speed in speeds])
    for i, phase in enumerate(chosen.phases):
        assert simulate_depth(chosen, profile, network, phase=i).duration == phase.iteration


def test_a_small_head_does_not_lengthen_what_is_predicted_of_balanced_batches() -> None:
    # The last of four segments takes next to no time, so a worker that goes through it alone is done with forward.
    profile = made_profile([1000] * 4, [0.1, 2.0, 2.0, 2.0], forward=[0.1, 2.0, 2.0, 2.0])
    free = made_network(0.0, 0.0)
    phase = plan(profile, free, workers=4, policy="balanced").phases[0]
    assert phase.iteration == max(w.forward + w.backward for w in phase.workers)


def test_gradients_are_sent_segment_by_segment_once_all_contributors_have_them() -> None:
    chosen = plan(PROFILE, NETWORK, workers=4, policy="ladder")
    timeline = simulate_depth(chosen, PROFILE, NETWORK)
    sent = [s for s in timeline.spans if s.kind == "communication"]
    assert sum(s.bytes for s in sent) == PROFILE.parameter_bytes
    assert all(a.stop <= b.start + 1e-9 for a, b in itertools.pairwise(sent)), "one channel"
    for segment in range(4):
        ready = max(s.stop for s in timeline.spans if s.kind == "backward" and s.name == f"segment {segment}")
        last = max(s.start for s in sent if s.name.startswith(f"segment {segment} "))
        assert last >= ready - 1e-9
    assert sent[-1].name == "segment 0 (2 tensors of 1 of 4 workers)"


@pytest.mark.parametrize("policy", ["full", "ladder", "balanced"])
def test_what_is_exposed_is_the_time_after_the_last_worker_has_computed(policy: str) -> None:
    chosen = plan(PROFILE, made_network(0.1, 4e-3), workers=4, policy=policy)
    timeline = simulate_depth(chosen, PROFILE, made_network(0.1, 4e-3))
    longest = max(w.forward + w.backward for w in chosen.phases[-1].workers)
    waited = chosen.phases[-1].iteration - longest
    assert waited > 1.0
    assert exposed(timeline) == pytest.approx(waited)
    assert f"{units.seconds(waited)} of communication exposed" in headline(timeline)


def test_alone_or_without_a_network_nothing_is_sent() -> None:
    for chosen in (plan(PROFILE, workers=4), plan(PROFILE, NETWORK, workers=1)):
        timeline = simulate_depth(chosen, PROFILE)
        assert not [s for s in timeline.spans if s.kind == "communication"]
        assert timeline.duration == pytest.approx(24.0)


def test_what_a_ladder_saves_is_the_mean_of_its_depths() -> None:
    saved = savings(plan(PROFILE, workers=4))
    assert saved.backward == saved.activations == pytest.approx((0.75 + 0.5 + 0.25 + 0.0) / 4)
    assert (saved.peak, saved.iteration) == (0.0, 0.0)  # the deepest worker keeps everything, and sets the pace


def test_slow_devices_show_in_the_timeline() -> None:
    devices = [WorkerDevice(speed=0.5), WorkerDevice()]
    chosen = plan(PROFILE, NETWORK, policy="ladder", devices=devices)
    timeline = simulate_depth(chosen, PROFILE, NETWORK)
    slow = [s for s in timeline.spans if s.track == "rank 0/compute" and s.kind == "forward"]
    assert slow[-1].stop == pytest.approx(16.0)
    assert timeline.duration == pytest.approx(chosen.phases[0].iteration)

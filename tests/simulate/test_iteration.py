"""One iteration as a timeline: it ends when the plan says, and everything is where it belongs."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline
from dovetail.planning import plan
from dovetail.planning.merge import stream as streams
from dovetail.planning.merge.policies import COMPARED
from dovetail.simulate import simulate
from tests.planning.merge.oracle import made_network, made_profile

PROFILE = made_profile([4000, 100, 2_000_000, 500, 9000], [0.02, 0.001, 0.03, 0.005, 0.01])
NETWORK = made_network(4e-3, 2e-9)


def track(timeline: Timeline, name: str) -> list[tuple[float, float]]:
    return [(s.start, s.stop) for s in timeline.spans if s.track == name]


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    n = draw(st.integers(1, 12))
    times = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=n, max_size=n)
    sizes = draw(st.lists(st.integers(0, 10**8), min_size=n, max_size=n))
    return made_profile(sizes, draw(times), forward=draw(times), late=draw(st.sampled_from([0.0, 0.25])))


@given(
    profiles(), st.sampled_from(["auto", *COMPARED]), st.sampled_from([1, 2, 64]), st.sampled_from([None, 1, 8, 100])
)
def test_the_timeline_lasts_as_long_as_the_plan_predicts(
    profile: Profile, policy: str, workers: int, batch: int | None
) -> None:
    made = plan(profile, NETWORK, workers=workers, batch=batch, policy=policy)
    timeline = simulate(made, profile, NETWORK)
    timeline.check()
    assert timeline.duration == made.prediction.iteration
    assert timeline.busy("forward") == pytest.approx(made.prediction.forward, abs=1e-12)
    assert timeline.busy("backward") == pytest.approx(made.prediction.backward, abs=1e-12)
    for name in ("rank 0/compute", "rank 0/network"):
        assert all(a[1] <= b[0] for a, b in pairwise(track(timeline, name))), "one thing at a time"
    assert files.decode(files.encode(timeline), Timeline) == timeline


def test_layers_go_forward_in_order_and_backward_in_reverse() -> None:
    timeline = simulate(plan(PROFILE, NETWORK), PROFILE, NETWORK)
    names = [layer.name for layer in PROFILE.layers]
    assert [s.name for s in timeline.spans if s.kind == "forward"] == names
    assert [s.name for s in timeline.spans if s.kind == "backward"] == names[::-1]
    assert [s.duration for s in timeline.spans if s.kind == "backward"] == pytest.approx(
        [0.02, 0.001, 0.03, 0.005, 0.01]
    )
    assert timeline.source == "predicted"
    assert not timeline.emulated


def test_every_bucket_has_its_span_its_bytes_and_its_time() -> None:
    network = made_network(2e-2, 2e-9)
    made = plan(PROFILE, network, policy="accumulate-while-busy")
    timeline = simulate(made, PROFILE, network)
    spans = [s for s in timeline.spans if s.kind == "communication"]
    assert [s.bytes for s in spans] == [b.bytes for b in made.buckets]
    counts = [b.stop - b.start for b in made.buckets]
    assert counts == [1, 1, 2, 1]
    assert [s.name for s in spans] == [
        "bucket 0 (1 tensor)",
        "bucket 1 (1 tensor)",
        "bucket 2 (2 tensors)",
        "bucket 3 (1 tensor)",
    ]
    cost, forward = network.cost(), made.prediction.forward
    for span, bucket in zip(spans, made.buckets, strict=True):
        assert span.duration == pytest.approx(float(cost(bucket.bytes)))
        assert span.start >= forward + PROFILE.tensors[bucket.stop - 1].ready
    assert {s.track for s in spans} == {"rank 0/network"}


def test_gradients_that_are_late_stretch_the_layers_to_the_end_of_backward() -> None:
    profile = made_profile([10, 10], [1.0, 3.0], late=1.0)
    timeline = simulate(plan(profile, NETWORK), profile, NETWORK)
    edges = [(s.start, s.stop) for s in timeline.spans if s.kind == "backward"]
    assert [t for edge in edges for t in edge] == pytest.approx([2.0, 3.25, 3.25, 7.0])


def test_one_worker_communicates_with_nobody() -> None:
    timeline = simulate(plan(PROFILE, NETWORK, workers=1), PROFILE, NETWORK)
    assert {s.track for s in timeline.spans} == {"rank 0/compute"}


def test_what_is_emulated_says_so() -> None:
    profile = PROFILE.scaled(forward=1.0, backward=2.0)
    assert simulate(plan(profile, NETWORK), profile, NETWORK).emulated


def test_a_plan_can_be_tried_on_another_network() -> None:
    made, slow = plan(PROFILE, NETWORK, policy="ddp"), made_network(1.0, 0.0, name="slow")
    ends = streams.finish(streams.stream(PROFILE), [b.stop for b in made.buckets], slow.cost())
    assert simulate(made, PROFILE, slow).duration == pytest.approx(made.prediction.forward + ends)


def test_a_plan_for_another_model_is_refused_in_one_line() -> None:
    made = plan(PROFILE, NETWORK)
    shorter = made_profile([4000, 100], [0.02, 0.001])
    renamed = msgspec.structs.replace(
        PROFILE, tensors=(msgspec.structs.replace(PROFILE.tensors[0], name="head"), *PROFILE.tensors[1:])
    )
    grown = msgspec.structs.replace(
        PROFILE, tensors=(msgspec.structs.replace(PROFILE.tensors[0], bytes=1), *PROFILE.tensors[1:])
    )
    for other, text in [
        (shorter, "5 tensors against 2"),
        (renamed, "tensor 0 is 'layer4.weight' against 'head'"),
        (grown, "bytes against"),
    ]:
        with pytest.raises(Error, match=text) as e:
            simulate(made, other, NETWORK)
        assert "\n" not in str(e.value)
        assert "make a plan from this profile" in str(e.value)

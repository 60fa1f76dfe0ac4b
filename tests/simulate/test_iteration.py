"""One iteration as a timeline: it ends when the plan says, every span is on its track, and it is said what hid what."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import Collective, Fit, Network, Precision
from dovetail.core.plan import BucketKind
from dovetail.core.profile import Profile
from dovetail.core.timeline import Span, Timeline
from dovetail.planning import plan
from dovetail.planning.merge import stream as streams
from dovetail.planning.merge.policies import COMPARED
from dovetail.simulate import simulate
from dovetail.simulate.iteration import hidden, link_idle
from dovetail.view import tracks
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


def test_the_timeline_of_an_emulated_profile_is_called_emulated() -> None:
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


@settings(max_examples=40)
@given(
    profiles(),
    st.sampled_from(["auto", *COMPARED]),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([0.0, 0.125]),
    st.sampled_from([1e-9, 2e-9, 1e-8]),
)
def test_with_forward_overlap_too_the_timeline_lasts_as_long_as_the_plan_predicts(
    profile: Profile, policy: str, workers: int, optimizer: float, gather: float
) -> None:
    net = network(2e-9, gather)
    made = plan(profile, net, workers=workers, policy=policy, overlap="forward", optimizer=optimizer)
    timeline = simulate(made, profile, net)
    timeline.check()
    assert timeline.duration == pytest.approx(made.prediction.iteration, rel=1e-12)
    assert timeline.busy("forward") == pytest.approx(made.prediction.forward, abs=1e-9)
    assert timeline.busy("backward") == pytest.approx(made.prediction.backward, abs=1e-9)
    # A whole bucket is updated on every rank, a split one in shards.
    updated = sum(b.bytes * (workers if b.kind == "whole" else 1) for b in made.buckets)
    assert timeline.busy("optimizer") == pytest.approx(
        optimizer * updated / made.bytes if made.bytes else 0.0, abs=1e-9
    )
    for name in ("rank 0/compute", "rank 0/network"):
        spans = sorted((s.start, s.stop) for s in timeline.spans if s.track == name)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans)), "one thing at a time"
    assert files.decode(files.encode(timeline), Timeline) == timeline


def spans(timeline: Timeline, prefix: str) -> dict[str, Span]:
    return {s.name: s for s in timeline.spans if s.name.startswith(prefix)}


def test_every_bucket_is_gathered_before_forward_needs_it_and_reduced_after_backward_made_it() -> None:
    profile = made_profile([10, 20, 30], [1.0, 1.0, 1.0], forward=[1.0, 1.0, 1.0])
    net = network(0.1, 0.2, latency=0.0)
    timeline = simulate(plan(profile, net, policy="per-tensor", overlap="forward", kinds=("split",)), profile, net)
    assert link_idle(timeline) == pytest.approx(2.0)
    gathers, scatters = spans(timeline, "all-gather"), spans(timeline, "reduce-scatter")
    assert list(gathers) == [f"all-gather {i} (1 tensor)" for i in (2, 1, 0)]
    assert [t for s in gathers.values() for t in (s.start, s.stop)] == pytest.approx([0, 6, 6, 10, 10, 12])
    waits = [s for s in timeline.spans if s.kind == "wait"]
    assert [s.name for s in waits] == [f"wait for layer{i}" for i in (0, 1, 2)]
    assert [t for s in waits for t in (s.start, s.stop)] == pytest.approx([0, 6, 7, 10, 11, 12])
    assert [t for s in scatters.values() for t in (s.start, s.stop)] == pytest.approx([14, 15, 15, 17, 17, 20])
    assert timeline.duration == pytest.approx(20.0)
    assert tracks.exposed(timeline) == pytest.approx(14.0)


def test_every_communication_is_listed_with_the_layers_it_hid_behind() -> None:
    profile = made_profile([10, 10, 10], [1.0, 1.0, 1.0], forward=[2.0, 2.0, 2.0])
    net = network(0.05, 0.1, latency=0.0)
    timeline = simulate(plan(profile, net, policy="per-tensor", overlap="forward", kinds=("split",)), profile, net)
    found = {h.span.name.partition(" (")[0]: h for h in hidden(timeline)}
    assert found["all-gather 2"].behind == () and found["all-gather 2"].exposed == pytest.approx(1.0)
    assert [s.name for s in found["all-gather 1"].behind] == ["layer0"]
    assert [s.name for s in found["all-gather 0"].behind] == ["layer0"]
    assert found["all-gather 0"].exposed == pytest.approx(0.0)
    assert [s.kind for s in found["reduce-scatter 0"].behind] == ["backward"]
    assert found["reduce-scatter 2"].exposed == pytest.approx(0.5)


def test_with_forward_overlap_too_one_worker_communicates_with_nobody() -> None:
    profile, net = made_profile([10, 10], [1.0, 1.0]), network(1e-9, 1e-9)
    timeline = simulate(plan(profile, net, workers=1, overlap="forward"), profile, net)
    assert {s.kind for s in timeline.spans} == {"forward", "backward"}


def test_spans_say_of_every_bucket_whether_it_is_whole_or_split_and_its_precision() -> None:
    profile = made_profile([10, 20, 30], [1.0, 1.0, 1.0], forward=[1.0, 1.0, 1.0])
    net = network(0.1, 0.2, latency=0.0)
    whole = Collective(fit=Fit(latency=0.0, seconds_per_byte=0.3, error=0.0))
    net = msgspec.structs.replace(
        net, collectives={**net.collectives, "all_reduce": whole}, reduced={"int8": net.collectives}
    )
    made = plan(profile, net, policy="per-tensor", overlap="forward", kinds=("split",))
    ways: tuple[tuple[BucketKind, Precision], ...] = (("split", "full"), ("whole", "full"), ("split", "int8"))
    buckets = tuple(
        msgspec.structs.replace(b, kind=kind, precision=bits)
        for b, (kind, bits) in zip(made.buckets, ways, strict=True)
    )
    timeline = simulate(msgspec.structs.replace(made, buckets=buckets), profile, net)
    assert [s.name for s in timeline.spans if s.kind == "communication"] == [
        "all-gather 2 (1 tensor, int8)",
        "all-gather 0 (1 tensor)",
        "reduce-scatter 0 (1 tensor)",
        "all-reduce 1 (1 tensor)",
        "reduce-scatter 2 (1 tensor, int8)",
    ]
    # layer0 waits for its 6 s; layer1's bucket was reduced whole, and layer2's comes while layer1 computes.
    assert [(s.name, s.start, s.stop) for s in timeline.spans if s.kind == "wait"] == [
        ("wait for layer0", 0.0, pytest.approx(6.0))
    ]
    communicating = sum(s.duration for s in timeline.spans if s.kind == "communication")
    assert link_idle(timeline) == pytest.approx(timeline.duration - communicating)


def test_a_link_without_communication_idles_all_the_time() -> None:
    profile = made_profile([10], [1.0], forward=[1.0])
    assert link_idle(simulate(plan(profile, NETWORK, workers=1), profile, NETWORK)) == pytest.approx(2.0)

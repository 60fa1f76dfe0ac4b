"""The orders in which gradients are packed: nothing is lost, nothing is ready early, kinds never share a bucket."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from dovetail import planning
from dovetail.core.profile import Profile
from dovetail.train.data_parallel.tuning import packing
from tests.planning.merge.oracle import made_network, made_profile

NETWORK = made_network(0.001, 5e-9)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, 10**7), min_size=count, max_size=count))
    gaps = draw(st.lists(st.floats(0, 0.1), min_size=count, max_size=count))
    kinds = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=count, max_size=count))
    made = made_profile(sizes, gaps)
    return packing.by_kind(made, {t.name: kind for t, kind in zip(made.tensors, kinds, strict=True)})


def ready(profile: Profile) -> dict[str, float]:
    return {t.name: t.ready for t in profile.tensors}


@given(profiles())
def test_gathering_keeps_every_gradient_and_makes_none_ready_early(profile: Profile) -> None:
    found = packing.gathered(profile)
    assert sorted(t.name for t in found.tensors) == sorted(t.name for t in profile.tensors)
    assert all(a.ready <= b.ready for a, b in pairwise(found.tensors))
    assert all(ready(found)[name] >= at for name, at in ready(profile).items())
    assert found.tensors[-1].ready == profile.tensors[-1].ready


@given(profiles())
def test_all_kinds_but_the_largest_are_one_run_each(profile: Profile) -> None:
    found = packing.gathered(profile)
    size: dict[str, int] = {}
    for tensor in profile.tensors:
        size[tensor.dtype] = size.get(tensor.dtype, 0) + tensor.bytes
    runs = [kind for kind, _ in groupby(t.dtype for t in found.tensors)]
    largest = max(size, key=lambda kind: size[kind])
    assert all(runs.count(kind) == 1 for kind in size if kind != largest)


@given(profiles())
def test_plans_of_an_arranged_stream_keep_kinds_apart_and_are_predicted_no_slower(profile: Profile) -> None:
    arranged = packing.arranged(profile, NETWORK)
    plan = planning.plan(arranged, NETWORK, policy="optimal")
    kinds = {t.name: t.dtype for t in profile.tensors}
    assert all(len({kinds[name] for name in bucket}) == 1 for bucket in packing.members(plan))
    as_ready = planning.plan(profile, NETWORK, policy="optimal")
    assert plan.prediction.iteration <= as_ready.prediction.iteration


@given(profiles(), st.randoms(use_true_random=False))
def test_buckets_in_any_order_are_a_plan_of_the_stream_in_their_order(profile: Profile, random: object) -> None:
    names = [t.name for t in profile.tensors]
    buckets = [
        list(bucket) for _, bucket in groupby(names, key=lambda n: {t.name: t.dtype for t in profile.tensors}[n])
    ]
    random.shuffle(buckets)  # type: ignore[attr-defined]
    plan, packed = packing.as_plan(buckets, profile, NETWORK, policy="ddp")
    assert packing.members(plan) == [frozenset(bucket) for bucket in buckets]
    assert plan.tensors == tuple(t.name for t in packed.tensors)
    assert plan.prediction.iteration >= plan.prediction.lower_bound * (1 - 1e-9)

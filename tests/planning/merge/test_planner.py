"""plan, compare and candidates: what users and the runtime call."""

from __future__ import annotations

import random

import pytest

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import Collective, CostSample, Fit, Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile, exactly
from dovetail.planning import candidates, compare, plan
from dovetail.planning.merge import stream as streams
from dovetail.planning.merge.policies import COMPARED

from .oracle import made_network, made_profile


def model(seed: int = 0, n: int = 80) -> Profile:
    rng = random.Random(seed)
    return made_profile([rng.randint(50, 1_500_000) for _ in range(n)], [rng.uniform(1e-4, 3e-3) for _ in range(n)])


NETWORKS = [made_network(a, b, ranks=8) for a in (5e-5, 1e-3, 2e-2) for b in (1e-10, 2e-9, 2e-8)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_auto_is_never_predicted_slower_than_ddp(network: Network, seed: int) -> None:
    profile = model(seed)
    ddp, auto = plan(profile, network, policy="ddp"), plan(profile, network)
    assert auto.prediction.iteration <= ddp.prediction.iteration
    assert auto.policy == "auto"


def test_auto_stays_with_ddp_where_only_ddp_is_not_slower_than_ddp() -> None:
    """One tensor: there is nothing to choose."""
    profile = made_profile([1000], [0.1])
    assert plan(profile, NETWORKS[0]).buckets == plan(profile, NETWORKS[0], policy="ddp").buckets


def test_the_prediction_is_forward_and_the_longer_of_backward_and_communication() -> None:
    profile = made_profile([1, 1, 1], [0.9, 0.9, 0.9], forward=[2.0, 1.0, 1.0])
    made = plan(profile, made_network(1.0, 1.0), policy="optimal")
    assert [b.stop for b in made.buckets] == [1, 3]
    p = made.prediction
    assert (p.forward, p.backward) == pytest.approx((4.0, 2.7))
    assert (p.iteration, p.exposed) == pytest.approx((4.0 + 5.9, 5.9 - 2.7))
    assert p.lower_bound == pytest.approx(4.0 + max(2.7 + 2, 1.8 + 3, 0.9 + 4))
    assert (made.workers, made.batch, made.profile, made.network) == (4, 8, "made", "made")


def test_hidden_communication_exposes_nothing() -> None:
    profile = made_profile([10, 10], [1.0, 1.0], late=0.0)
    hidden = plan(profile, made_network(1e-9, 0.0), policy="per-tensor").prediction
    assert hidden.exposed == pytest.approx(1e-9)
    assert plan(profile, made_network(1e-9, 0.0), workers=1).prediction.exposed == 0.0


def test_alone_no_time_goes_to_communication_and_one_bucket_is_enough() -> None:
    profile = model()
    made = plan(profile, NETWORKS[5], workers=1)
    assert made.prediction.iteration == made.prediction.forward + made.prediction.backward
    assert len(made.buckets) == 1


def test_more_workers_and_larger_batches_are_planned_for_what_they_cost() -> None:
    profile, network = model(), NETWORKS[4]
    few, many = (plan(profile, network, workers=w, policy="optimal").prediction for w in (8, 64))
    assert few.iteration < many.iteration
    twice = plan(profile, network, batch=16, policy="optimal").prediction
    assert twice.backward == pytest.approx(2 * few.backward)
    assert twice.forward == pytest.approx(2 * few.forward)


def test_a_measured_table_is_planned_with_as_it_is() -> None:
    """A step in the table that no affine law has: buckets must stay below it."""
    samples = tuple(
        CostSample(bytes=b, seconds=exactly(s)) for b, s in [(1, 0.1), (100, 0.1), (101, 50.0), (400, 50.0)]
    )
    fit = Fit(latency=0.1, seconds_per_byte=0.0, error=0.0)
    steps = Collective(fit=fit, samples=samples)
    network = Network(name="steps", ranks=2, source="a test", measured=True, collectives={"all_reduce": steps})
    made = plan(made_profile([50] * 8, [0.001] * 8), network, policy="optimal")
    assert [b.bytes for b in made.buckets] == [100] * 4


def test_mixed_dtypes_never_share_a_bucket() -> None:
    profile = made_profile([10] * 6, [0.1] * 6, dtypes=["float32"] * 2 + ["float16"] * 3 + ["float32"])
    for made in compare(profile, NETWORKS[8]):
        assert {2, 5} <= {b.stop for b in made.buckets}


def test_a_comparison_has_one_plan_for_every_policy_the_fastest_first() -> None:
    plans = compare(model(), NETWORKS[4])
    assert sorted(p.policy for p in plans) == sorted(COMPARED)
    times = [p.prediction.iteration for p in plans]
    assert times == sorted(times)
    assert plans[0].prediction.lower_bound <= times[0] * (1 + 1e-12)
    optimum = next(p for p in plans if p.policy == "optimal")
    assert optimum.prediction.iteration == pytest.approx(times[0], rel=1e-12)
    assert [p.policy for p in compare(model(), NETWORKS[4], policies=["single"])] == ["single"]


def test_of_equally_fast_plans_the_one_with_fewer_buckets_comes_first() -> None:
    plans = compare(model(), NETWORKS[0], workers=1)
    assert [len(p.buckets) for p in plans] == sorted(len(p.buckets) for p in plans)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_candidates_are_distinct_and_ddp_is_first(network: Network, count: int) -> None:
    found = candidates(model(), network, workers=8, count=count)
    assert found[0].policy == "ddp"
    assert len({p.buckets for p in found}) == len(found) == count
    if count >= 3:
        optimum = plan(model(), network, policy="optimal").prediction.iteration
        assert min(p.prediction.iteration for p in found) <= 1.01 * optimum


def test_candidates_are_all_there_are_where_the_model_is_small() -> None:
    assert [len(p.buckets) for p in candidates(made_profile([5], [1.0]), NETWORKS[0], workers=2)] == [1]
    two = candidates(made_profile([5, 5], [1.0, 1.0]), made_network(1e-3, 0.1), workers=4, count=9)
    assert sorted(len(p.buckets) for p in two) == [1, 2]


@pytest.mark.parametrize("policy", ["auto", *COMPARED])
def test_a_plan_survives_its_file(policy: str) -> None:
    made = plan(model(), NETWORKS[3], policy=policy)
    made.check()
    assert files.decode(files.encode(made), Plan) == made


@pytest.mark.parametrize(("option", "value"), [("workers", 0), ("workers", -2), ("batch", 0), ("batch", 2**31)])
def test_impossible_settings_are_named(option: str, value: int) -> None:
    with pytest.raises(Error, match=f"^{option}: expected 1 to 2,147,483,647, got {value}$"):
        plan(model(), NETWORKS[0], **{option: value})  # type: ignore[arg-type]


def test_a_stream_of_a_profile_has_its_breaks_and_its_end_of_backward() -> None:
    profile = made_profile([1, 2, 3], [1.0, 2.0, 3.0], dtypes=["float32", "float16", "float16"], late=0.5)
    made = streams.stream(profile, cap=7)
    assert (made.ready, made.sizes, made.breaks, made.cap) == ((1.5, 3.5, 6.5), (1, 2, 3), frozenset({1}), 7)
    assert made.backward == 6.5
    assert streams.stream(profile, batch=16).ready == (3.0, 7.0, 13.0)

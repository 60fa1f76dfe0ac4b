"""The best plan for both phases against every partition there is, judged by playing several iterations through."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, Collective, CollectiveName, Cost, Fit, Network
from dovetail.core.plan import BucketKind, Plan
from dovetail.core.profile import Profile
from dovetail.planning import candidates, compare, plan, predict
from dovetail.planning.merge import cycle_choice, cycle_exact, exact, rules
from dovetail.planning.merge.cycle import Bucketing, Cycle, Way, cycle, period, phases, uniform
from dovetail.planning.merge.cycle_labels import CompletionBounds, extended, lower_bound, walk
from dovetail.planning.merge.policies import COMPARED
from dovetail.planning.merge.setting import KINDS
from dovetail.planning.merge.stream import Stream, allowed, bucket_bytes

from . import oracle
from .oracle import made_profile

SAME = 1e-12


def random_profile(rng: random.Random, n: int) -> Profile:
    """Ties, zero gaps, zero sizes, several tensors in a layer, and layers that finish out of order."""
    step: Callable[[], float] = rng.choice([lambda: float(rng.randint(0, 3)), rng.random, lambda: 0.0, lambda: 0.9])
    sizes = [rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(n)]
    made = made_profile(
        sizes,
        [step() for _ in range(n)],
        forward=[step() for _ in range(n)],
        dtypes=[rng.choice(["float32"] * 5 + ["float16"]) for _ in range(n)],
        late=rng.choice([0.0, 0.0, 0.5]),
    )
    if rng.random() < 0.4:
        layers = [rng.randrange(n) for _ in range(n)] if rng.random() < 0.5 else [t.layer // 2 for t in made.tensors]
        tensors = tuple(msgspec.structs.replace(t, layer=i) for t, i in zip(made.tensors, layers, strict=True))
        made = msgspec.structs.replace(made, tensors=tensors)
    return made


def instances(seed: int, count: int, *, longest: int = 6) -> Iterator[tuple[Profile, Cycle]]:
    rng = random.Random(seed)
    for _ in range(count):
        profile = random_profile(rng, rng.randint(1, longest))
        ways = oracle.random_ways(rng, profile.parameter_bytes)
        yield profile, cycle(profile, ways, cap=rng.choice([None, None, 3, 6]))


def halves(scatter: Cost, gather: Cost, update: Cost | None = None) -> list[Way]:
    return [Way("split", "full", scatter, gather, update)]


def both(cost: AffineCost, *, update: float = 0.0, workers: int = 4) -> list[Way]:
    """An all-reduce and its halves; `update`: seconds per byte of the optimiser on a shard."""
    half = AffineCost(cost.latency * 0.6, cost.seconds_per_byte * 0.52)
    own, all_of_it = (AffineCost(0.0, update * n) if update else None for n in (1, workers))
    return [Way("whole", "full", cost, None, all_of_it), Way("split", "full", half, half, own)]


@pytest.mark.parametrize("seed", range(4))
def test_no_bucketing_has_a_shorter_period_than_the_optimum(seed: int) -> None:
    for profile, made in instances(seed, 150, longest=5):
        play = oracle.Played(profile, made)
        least = min(map(play, oracle.bucketings(made)))
        best = cycle_exact.optimal(made)
        assert allowed(made.backward, list(best.cuts))
        assert play(best) == pytest.approx(least, rel=1e-9)
        assert lower_bound(made) <= least * (1 + 1e-9)


def test_the_period_is_what_playing_iterations_through_gives() -> None:
    for profile, made in instances(17, 60, longest=5):
        play = oracle.Played(profile, made, iterations=4)
        for bucketing in oracle.bucketings(made):
            assert period(made, bucketing) == pytest.approx(play(bucketing), rel=1e-9, abs=1e-9)


def ends_by_count(made: Cycle) -> dict[int, float]:
    ends: dict[int, float] = {}
    for bucketing in oracle.bucketings(made):
        ends[len(bucketing)] = min(period(made, bucketing), ends.get(len(bucketing), float("inf")))
    return ends


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.2])
def test_fewest_has_the_smallest_count_within_tolerance_and_is_the_best_of_that_count(tolerance: float) -> None:
    for _, made in instances(11, 80, longest=5):
        ends = ends_by_count(made)
        budget = min(ends.values()) * (1 + tolerance) * (1 + 1e-11)
        count = min(k for k, end in ends.items() if end <= budget)
        chosen = cycle_exact.fewest(made, tolerance=tolerance)
        assert allowed(made.backward, list(chosen.cuts))
        assert len(chosen) == count
        assert period(made, chosen) == pytest.approx(ends[count], rel=SAME)


def test_the_best_bucketing_for_every_count_is_found_where_it_is_within_the_limit() -> None:
    for _, made in instances(23, 80, longest=5):
        ends = ends_by_count(made)
        limit = sorted(ends.values())[len(ends) // 2]
        found = cycle_exact.best_per_count(made, 99, limit=limit)
        within = {k for k, end in ends.items() if end <= limit}
        assert within <= set(found) <= {k for k, end in ends.items() if end <= limit * (1 + 1e-9)}
        for count, bucketing in found.items():
            assert len(bucketing) == count
            assert period(made, bucketing) == pytest.approx(ends[count], rel=SAME)


def test_the_most_bytes_are_split_that_the_limit_allows() -> None:
    for _, made in instances(31, 120, longest=5):
        limit = period(made, cycle_exact.optimal(made)) * 1.02
        whole = {d: whole_bytes(made, d) for d in oracle.bucketings(made) if period(made, d) <= limit * (1 + 1e-11)}
        found = cycle_exact.most_split(made, limit)
        assert found is not None and period(made, found) <= limit * (1 + 1e-11)
        assert whole_bytes(made, found) == min(whole.values())


def whole_bytes(made: Cycle, bucketing: Bucketing) -> int:
    sizes = bucket_bytes(made.backward, list(bucketing.cuts)).tolist()
    return sum(s for s, w in zip(sizes, bucketing.ways, strict=True) if made.ways[w].kind == "whole")


def test_given_buckets_get_the_ways_that_are_best_for_them() -> None:
    for _, made in instances(37, 80, longest=5):
        for cuts in oracle.partitions(made.backward):
            among = [d for d in oracle.bucketings(made) if d.cuts == tuple(cuts)]
            best = min(period(made, d) for d in among)
            assert period(made, cycle_exact.ways_for(made, cuts)) == pytest.approx(best, rel=SAME)


def test_looking_in_cells_loses_at_most_twice_their_edge_for_each_bucket() -> None:
    coarser = 0
    for _, made in instances(29, 40, longest=10):
        exactly = cycle_exact.best_per_count(made, 99, limit=float("inf"))
        cell = period(made, exactly[min(exactly)]) / 8
        found = cycle_exact.best_per_count(made, 99, limit=float("inf"), cell=cell)
        assert set(found) == set(exactly)
        for count, bucketing in found.items():
            best, mine = period(made, exactly[count]), period(made, bucketing)
            assert best * (1 - 1e-9) <= mine <= best + 2 * cell * count + 1e-9
            coarser += mine > best * (1 + 1e-9)
    assert coarser  # the cells are large enough to matter, so the bound was put to the test


@st.composite
def made_cycles(draw: st.DrawFn, *, longest: int = 5) -> Cycle:
    n = draw(st.integers(1, longest))
    times = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=n, max_size=n)
    sizes = tuple(draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)))
    breaks = draw(st.frozensets(st.integers(1, n - 1))) if n > 1 else frozenset()
    cap = draw(st.none() | st.integers(1, 60))
    ready = tuple(np.cumsum(draw(times)).tolist())
    tails = tuple(draw(times))  # in any order: layers may finish in another order than they are used
    affine = st.builds(AffineCost, st.floats(0, 20, allow_subnormal=False), st.floats(0, 3, allow_subnormal=False))
    costs = affine | st.lists(st.floats(0, 20), min_size=161, max_size=161).map(oracle.Lookup)
    every: list[BucketKind] = ["whole", "split"]
    kinds = draw(st.lists(st.sampled_from(every), min_size=1, max_size=3))
    return Cycle(
        backward=Stream(ready, sizes, breaks, cap, ready[-1]),
        tails=tails,
        forward=max(tails) + draw(st.sampled_from([0.0, 3.0])),
        ways=tuple(
            Way(kind, "full", draw(costs), draw(costs) if kind == "split" else None, draw(st.none() | costs))
            for kind in kinds
        ),
    )


@settings(max_examples=80, deadline=None)
@given(made_cycles())
def test_the_optimum_matches_brute_force_and_nothing_is_below_the_bound(made: Cycle) -> None:
    least = min(period(made, bucketing) for bucketing in oracle.bucketings(made))
    assert period(made, cycle_exact.optimal(made)) == pytest.approx(least, rel=SAME)
    assert lower_bound(made) <= least * (1 + SAME)


@pytest.mark.parametrize("seed", range(30))
def test_within_a_limit_there_is_the_optimum_or_nothing(seed: int) -> None:
    rng = random.Random(seed)
    job = made_profile([rng.randint(1, 50) for _ in range(6)], [rng.random() for _ in range(6)])
    made = cycle(job, both(AffineCost(rng.random(), 0.02)))
    shortest = period(made, cycle_exact.optimal(made))
    found = cycle_exact.within(made, shortest * (1 + 1e-9))
    assert found is not None and period(made, found) == pytest.approx(shortest, rel=SAME)
    assert cycle_exact.within(made, shortest * (1 - 1e-6)) is None


def test_limits_and_thinned_fronts_cost_next_to_nothing_on_long_streams() -> None:
    for n, ratio in ((24, 0.8), (32, 1.2)):
        profile = model(n, seed=n, forward=0.5)
        total, busy = profile.parameter_bytes, profile.backward_time() * 1.5
        for update in (0.0, 0.02 * busy / total):
            made = cycle(profile, both(AffineCost(busy * 0.005, ratio * busy / total), update=update))
            fronts = extended(CompletionBounds.of(made, period(made, cycle_exact.optimal(made))), most=3000)
            assert fronts.cell == 0.0 or update, "exact where only two values count"
            if fronts.last.size:
                exactly = period(made, walk([fronts]))
                assert period(made, cycle_exact.optimal(made)) <= exactly * 1.002


def test_one_phase_alone_is_the_merging_problem() -> None:
    """With a forward pass that hides everything only backward counts, and the other way round."""
    for stream, cost in oracle.instances(5, 60, longest=6):
        free, none = AffineCost(0.0, 0.0), (0.0,) * len(stream)
        best = max(stream.backward, min(oracle.finish(stream, c, cost) for c in oracle.partitions(stream)))
        still = Stream(none, stream.sizes, stream.breaks, stream.cap, 0.0)
        for made in (
            Cycle(stream, none, 0.0, tuple(halves(cost, free))),
            Cycle(still, stream.ready, stream.backward, tuple(halves(free, cost))),
            Cycle(stream, none, 0.0, (Way("whole", "full", cost),)),
        ):
            assert period(made, cycle_exact.optimal(made)) == pytest.approx(best, rel=SAME)


def test_gathers_follow_the_last_update_on_end_with_the_last_bucket_first_and_whole_buckets_have_none() -> None:
    profile = made_profile([10, 20, 30], [1.0, 1.0, 1.0], forward=[1.0, 1.0, 1.0])
    way = halves(AffineCost(0.0, 0.1), AffineCost(0.0, 0.2), AffineCost(0.5 / 3, 0.0))[0]
    made = cycle(profile, [way, Way("whole", "full", AffineCost(0.0, 0.3), None, AffineCost(0.25, 0.0))])
    found = phases(made, Bucketing((1, 2, 3), (0, 0, 0)))
    assert np.array(found.reductions) == pytest.approx(np.array([(1.0, 2.0), (2.0, 4.0), (4.0, 7.0)]))
    assert found.updates[-1] == pytest.approx((7.0, 7.0 + 0.5 / 3))
    assert found.gathers == [pytest.approx((10.0, 12.0)), pytest.approx((6.0, 10.0)), pytest.approx((0.0, 6.0))]
    assert found.forward == pytest.approx(13.0)  # the last layer waits for its 12 s and takes one more
    assert found.period == pytest.approx(20.0 + 0.5 / 3)
    mixed = phases(made, Bucketing((1, 2, 3), (0, 1, 0)))
    assert mixed.gathers == [pytest.approx((6.0, 8.0)), None, pytest.approx((0.0, 6.0))]
    assert mixed.reductions[1] == pytest.approx((2.0, 8.0)) and mixed.forward == pytest.approx(9.0)


def test_updates_hide_behind_later_reductions() -> None:
    profile = made_profile([10, 10], [1.0, 1.0])
    made = cycle(profile, halves(AffineCost(0.0, 1.0), AffineCost(0.0, 0.0), AffineCost(0.0, 0.4)))
    assert period(made, Bucketing((2,), (0,))) - period(made, Bucketing((1, 2), (0, 0))) == pytest.approx(5.0)
    assert cycle_exact.optimal(made).cuts == (1, 2)


def network(latency: float, seconds_per_byte: float, *, ranks: int = 4) -> Network:
    """Ring law: an all-reduce is a reduce-scatter and an all-gather."""
    whole = Fit(latency=latency, seconds_per_byte=seconds_per_byte, error=0.0)
    half = Collective(fit=Fit(latency=latency / 2, seconds_per_byte=seconds_per_byte / 2, error=0.0))
    every: dict[CollectiveName, Collective] = {
        "all_reduce": Collective(fit=whole),
        "reduce_scatter": half,
        "all_gather": half,
    }
    return Network(name="ring", ranks=ranks, source="a test", measured=False, collectives=every)


def model(n: int = 16, seed: int = 1, *, forward: float | None = None) -> Profile:
    """`forward`: the forward time of every layer as a share of its backward time; random if None."""
    rng = random.Random(seed)
    sizes = [rng.choice([2_000, 400_000, 5_000_000]) for _ in range(n)]
    times = [rng.uniform(0.001, 0.01) for _ in range(n)]
    return made_profile(sizes, times, forward=[t * (forward or rng.uniform(0.2, 0.8)) for t in times])


@pytest.mark.parametrize("latency", [1e-4, 4e-3])
@pytest.mark.parametrize("optimizer", [0.0, 0.02])
def test_plans_of_this_mode_say_so_and_none_beats_the_optimum(latency: float, optimizer: float) -> None:
    profile, net = model(), network(latency, 3e-9)
    plans = compare(profile, net, overlap="forward", optimizer=optimizer)
    assert {p.policy for p in plans} == set(COMPARED)
    best = next(p for p in plans if p.policy == "optimal").prediction
    for made in [*plans, plan(profile, net, overlap="forward", optimizer=optimizer)]:
        p = made.prediction
        assert made.overlap == "forward"
        assert p.iteration >= best.iteration * (1 - SAME) and p.iteration >= p.lower_bound * (1 - SAME)
        assert p.optimizer == optimizer
        assert p.iteration == pytest.approx(p.forward + p.backward + p.optimizer + p.exposed)
        assert files.decode(files.encode(made), Plan) == made
    auto, ddp = (plan(profile, net, policy=name, overlap="forward", kinds=("split",)) for name in ("auto", "ddp"))
    assert auto.prediction.iteration <= ddp.prediction.iteration


def test_both_kinds_are_never_predicted_slower_than_the_best_all_reduces_or_the_best_of_one_kind() -> None:
    for seed in range(6):
        profile = model(seed=seed)
        net = network(1e-3, 10 ** random.Random(seed).uniform(-9.5, -8))
        best = plan(profile, net, policy="optimal", overlap="forward").prediction.iteration
        assert best <= plan(profile, net, policy="optimal").prediction.iteration * (1 + SAME)
        for kind in KINDS:
            made = plan(profile, net, policy="optimal", overlap="forward", kinds=(kind,))
            assert {b.kind for b in made.buckets} == {kind}
            assert best <= made.prediction.iteration * (1 + SAME)


def test_candidates_are_distinct_torchs_sizes_first_and_near_the_optimum() -> None:
    profile, net = model(), network(2e-3, 5e-9)
    found = candidates(profile, net, count=4, overlap="forward")
    assert [p.overlap for p in found] == ["forward"] * 4
    assert found[0].policy == "ddp"
    assert len({p.buckets for p in found}) == 4
    best = plan(profile, net, policy="optimal", overlap="forward").prediction.iteration
    assert min(p.prediction.iteration for p in found) <= 1.01 * best


def test_a_plan_is_predicted_anew_in_its_own_mode() -> None:
    profile = model()
    made = plan(profile, network(2e-3, 5e-9), overlap="forward", optimizer=0.01)
    assert predict(made, profile, network(2e-3, 5e-9)) == made
    slower = predict(made, profile, network(2e-3, 5e-8))
    assert slower.overlap == "forward" and slower.prediction.iteration > made.prediction.iteration


def test_a_plan_of_before_this_mode_still_reads_and_torch_refuses_one_of_this_mode() -> None:
    made = plan(model(), network(2e-3, 5e-9))
    text = files.encode(made)
    old = text.replace(',\n "overlap": "backward"', "").replace(',\n  "optimizer": 0.0', "")
    assert old != text and "overlap" not in old and "optimizer" not in old
    assert files.decode(old, Plan) == made
    with pytest.raises(Error, match="cannot overlap with forward") as e:
        plan(model(), network(2e-3, 5e-9), overlap="forward").ddp_kwargs()
    assert "\n" not in str(e.value)


def test_what_is_missing_or_meaningless_is_named_in_one_line() -> None:
    with pytest.raises(Error, match="has no reduce_scatter"):
        plan(model(), oracle.made_network(1e-3, 1e-9), overlap="forward")
    with pytest.raises(Error, match="overlap: expected 'backward' or 'forward', got 'both'"):
        plan(model(), network(1e-3, 1e-9), overlap="both")  # type: ignore[arg-type]
    with pytest.raises(Error, match="kinds: expected some of whole, split, got half"):
        plan(model(), network(1e-3, 1e-9), overlap="forward", kinds=("half",))  # type: ignore[arg-type]
    with pytest.raises(Error, match="precision: network 'ring' has no collectives in int8: measure them"):
        plan(model(), network(1e-3, 1e-9), overlap="forward", precision="int8")
    for option in ({"precision": "bf16"}, {"memory": "shard"}):
        with pytest.raises(Error, match="expected with overlap='forward' only"):
            plan(model(), network(1e-3, 1e-9), **option)  # type: ignore[arg-type]
    with pytest.raises(Error, match="optimizer: expected seconds"):
        plan(model(), network(1e-3, 1e-9), overlap="forward", optimizer=-1.0)
    with pytest.raises(Error, match="optimizer: expected with overlap='forward' only"):
        plan(model(), network(1e-3, 1e-9), optimizer=1.0)


def test_alone_nothing_is_communicated() -> None:
    made = plan(model(), network(1e-3, 1e-9), workers=1, overlap="forward", optimizer=0.1)
    assert made.prediction.exposed == pytest.approx(0.0, abs=1e-12)
    assert len(made.buckets) == 1


def test_the_robust_choice_is_the_same_every_time_and_never_slower_than_torchs_sizes() -> None:
    made = cycle(model(), both(AffineCost(1e-3, 3e-9)))
    ceiling = min(period(made, d) for d in uniform(made, rules.ddp(made.backward)))
    assert cycle_choice.safest(made) == cycle_choice.safest(made)
    assert period(made, cycle_choice.safest(made)) <= ceiling
    assert period(made, cycle_choice.robust(made)) <= 1.1 * period(made, cycle_exact.optimal(made))


def test_bounds_of_one_phase_are_those_of_merging_and_of_both_the_work_of_the_channel() -> None:
    made = cycle(model(), halves(AffineCost(1e-3, 2e-9), AffineCost(2e-3, 1e-9)))
    ready = tuple(np.maximum.accumulate(made.tails).tolist())
    gathers = exact.lower_bound(Stream(ready, made.backward.sizes), made.ways[0].gather or AffineCost(0, 0))
    assert lower_bound(made) >= made.backward.backward + gathers
    made = cycle(model(), both(AffineCost(1e-3, 2e-8)))
    assert lower_bound(made) >= 1e-3 + 2e-8 * sum(made.backward.sizes)

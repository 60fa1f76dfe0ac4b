"""The best plan for both phases against every partition there is, judged by playing several iterations through."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, Collective, CollectiveName, Cost, Fit, Network, TableCost
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.planning import candidates, compare, plan, predict
from dovetail.planning.merge import cycle_exact, exact, rules
from dovetail.planning.merge.cycle import Cycle, cycle, lower_bound, period, phases
from dovetail.planning.merge.policies import COMPARED
from dovetail.planning.merge.stream import Stream, allowed

from . import oracle
from .oracle import made_profile

SAME = 1e-12


class Played:
    """Iterations played through on one channel and one device, with no formula of the planner's."""

    def __init__(self, profile: Profile, made: Cycle) -> None:
        self.profile, self.made = profile, made
        self.forward = [layer.forward(profile.batch) for layer in profile.layers]
        self.scatter, self.gather = _remembered(made.scatter), _remembered(made.gather)
        self.update = _remembered(made.update) if made.update else None

    def __call__(self, cuts: list[int]) -> float:
        """Seconds from the start of the second forward to that of the third."""
        return played(self, cuts)


def _remembered(cost: Cost) -> Callable[[int], float]:
    return functools.cache(lambda nbytes: float(cost(nbytes)))


def played(game: Played, cuts: list[int]) -> float:
    profile = game.profile
    buckets = list(itertools.pairwise([0, *cuts]))
    size = [sum(t.bytes for t in profile.tensors[a:b]) for a, b in buckets]
    there = [0.0] * len(buckets)
    now = channel = 0.0
    needs = [
        [b for b, (i, j) in enumerate(buckets) if any(t.layer == index for t in profile.tensors[i:j])]
        for index in range(len(profile.layers))
    ]
    starts = []
    for _ in range(2):
        starts.append(now)
        for needed, seconds in zip(needs, game.forward, strict=True):
            now = max([now, *(there[b] for b in needed)]) + seconds
        assert channel <= now + 1e-9, "the network is free when backward starts"
        began, reduced = now, []
        for (_, stop), nbytes in zip(buckets, size, strict=True):
            channel = max(channel, began + profile.tensors[stop - 1].ready) + game.scatter(nbytes)
            reduced.append(channel)
        now = began + profile.backward_time()
        if game.update is None:
            now = max(now, channel) + game.made.step
        else:
            for nbytes, at in zip(size, reduced, strict=True):
                now = max(now, at) + game.update(nbytes)
        channel = now
        for b in reversed(range(len(buckets))):
            channel += game.gather(size[b])
            there[b] = channel
    return now - starts[-1]


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


def instances(seed: int, count: int, *, longest: int = 7) -> Iterator[tuple[Profile, Cycle]]:
    rng = random.Random(seed)
    for _ in range(count):
        profile = random_profile(rng, rng.randint(1, longest))
        most = profile.parameter_bytes
        yield (
            profile,
            cycle(
                profile,
                oracle.random_cost(rng, most),
                oracle.random_cost(rng, most),
                cap=rng.choice([None, None, 3, 6]),
                step=(step := rng.choice([0.0, 0.0, 2.0])),
                update=None if step or rng.random() < 0.5 else oracle.random_cost(rng, most),
            ),
        )


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_has_a_shorter_period_than_the_optimum_of_both_phases(seed: int) -> None:
    for profile, made in instances(seed, 400, longest=6):
        play = Played(profile, made)
        least = min(map(play, oracle.partitions(made.backward)))
        cuts = cycle_exact.optimal(made)
        assert allowed(made.backward, cuts)
        assert play(cuts) == pytest.approx(least, rel=1e-9)


def test_the_period_is_what_playing_iterations_through_gives() -> None:
    for profile, made in instances(17, 100):
        play = Played(profile, made)
        for cuts in oracle.partitions(made.backward):
            assert period(made, cuts) == pytest.approx(play(cuts), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.2])
def test_fewest_has_the_smallest_count_within_tolerance_and_is_the_best_of_that_count(tolerance: float) -> None:
    for _, made in instances(11, 120, longest=6):
        ends: dict[int, float] = {}
        for cuts in oracle.partitions(made.backward):
            ends[len(cuts)] = min(period(made, cuts), ends.get(len(cuts), float("inf")))
        budget = min(ends.values()) * (1 + tolerance) * (1 + 1e-11)
        count = min(k for k, end in ends.items() if end <= budget)
        chosen = cycle_exact.fewest(made, tolerance=tolerance)
        assert allowed(made.backward, chosen)
        assert len(chosen) == count
        assert period(made, chosen) == pytest.approx(ends[count], rel=SAME)


def test_the_best_partition_for_every_count_is_found_where_it_is_within_the_limit() -> None:
    for _, made in instances(23, 120, longest=6):
        ends: dict[int, float] = {}
        for cuts in oracle.partitions(made.backward):
            ends[len(cuts)] = min(period(made, cuts), ends.get(len(cuts), float("inf")))
        limit = sorted(ends.values())[len(ends) // 2]
        found = cycle_exact.best_per_count(made, 99, limit=limit)
        within = {k for k, end in ends.items() if end <= limit}
        assert within <= set(found) <= {k for k, end in ends.items() if end <= limit * (1 + 1e-9)}
        for count, cuts in found.items():
            assert len(cuts) == count
            assert period(made, cuts) == pytest.approx(ends[count], rel=SAME)


def test_looking_in_cells_loses_at_most_twice_their_edge_for_each_bucket() -> None:
    coarser = 0
    for _, made in instances(29, 40, longest=14):
        exactly = cycle_exact.best_per_count(made, 99, limit=float("inf"))
        cell = period(made, exactly[min(exactly)]) / 8
        found = cycle_exact.best_per_count(made, 99, limit=float("inf"), cell=cell)
        assert set(found) == set(exactly)
        for count, cuts in found.items():
            best, mine = period(made, exactly[count]), period(made, cuts)
            assert best * (1 - 1e-9) <= mine <= best + 2 * cell * count + 1e-9
            coarser += mine > best * (1 + 1e-9)
    assert coarser  # the cells are large enough to matter, so the bound was put to the test


@st.composite
def made_cycles(draw: st.DrawFn, *, longest: int = 6) -> Cycle:
    n = draw(st.integers(1, longest))
    times = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=n, max_size=n)
    sizes = tuple(draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)))
    breaks = draw(st.frozensets(st.integers(1, n - 1))) if n > 1 else frozenset()
    cap = draw(st.none() | st.integers(1, 60))
    ready, tails = (tuple(np.cumsum(draw(times)).tolist()) for _ in range(2))
    affine = st.builds(AffineCost, st.floats(0, 20, allow_subnormal=False), st.floats(0, 3, allow_subnormal=False))
    costs = affine | st.lists(st.floats(0, 20), min_size=161, max_size=161).map(oracle.Lookup)
    return Cycle(
        backward=Stream(ready, sizes, breaks, cap, ready[-1]),
        forward=Stream(tails, sizes, breaks, cap, tails[-1]),
        scatter=draw(costs),
        gather=draw(costs),
        step=draw(st.sampled_from([0.0, 1.5])),
        update=draw(st.none() | costs),
    )


@settings(max_examples=60)
@given(made_cycles())
def test_the_optimum_of_both_phases_matches_brute_force_and_nothing_is_below_the_bound(made: Cycle) -> None:
    least = min(period(made, cuts) for cuts in oracle.partitions(made.backward))
    assert period(made, cycle_exact.optimal(made)) == pytest.approx(least, rel=SAME)
    assert lower_bound(made) <= least * (1 + SAME)


@pytest.mark.parametrize("seed", range(30))
def test_within_a_limit_there_is_the_optimum_or_nothing(seed: int) -> None:
    rng = random.Random(seed)
    job = made_profile([rng.randint(1, 50) for _ in range(6)], [rng.random() for _ in range(6)])
    made = cycle(job, AffineCost(rng.random(), 0.01), AffineCost(rng.random(), 0.02))
    shortest = period(made, cycle_exact.optimal(made))
    found = cycle_exact.within(made, shortest * (1 + 1e-9))
    assert found is not None and period(made, found) == pytest.approx(shortest, rel=SAME)
    assert cycle_exact.within(made, shortest * (1 - 1e-6)) is None


def test_dropping_labels_by_the_limit_changes_nothing_on_long_streams() -> None:
    rng = random.Random(3)
    for n in (50, 65):
        profile = random_profile(rng, n)
        for cost in (AffineCost(1.0, 0.5), TableCost((1.0, 40.0, 90.0), (1.0, 3.0, 30.0))):
            made = cycle(profile, cost, AffineCost(0.7, 0.4), update=rng.choice([None, AffineCost(0.0, 0.1)]))
            everything = cycle_exact.CompletionBounds.of(made, float("inf"))
            slow = cycle_exact.walk(made, [cycle_exact.extended(made, everything, None)], 0)
            assert period(made, cycle_exact.optimal(made)) == pytest.approx(period(made, slow), rel=SAME)


def test_one_phase_alone_is_the_merging_problem() -> None:
    """With a forward pass that hides everything only backward counts, and the other way round."""
    for stream, cost in oracle.instances(5, 60, longest=6):
        free = AffineCost(0.0, 0.0)
        still = Stream((0.0,) * len(stream), stream.sizes, stream.breaks, stream.cap, 0.0)
        best = max(stream.backward, min(oracle.finish(stream, c, cost) for c in oracle.partitions(stream)))
        for made in (Cycle(stream, still, cost, free), Cycle(still, stream, free, cost)):
            assert period(made, cycle_exact.optimal(made)) == pytest.approx(best, rel=SAME)


def test_gathers_follow_the_last_update_on_end_with_the_last_bucket_first() -> None:
    profile = made_profile([10, 20, 30], [1.0, 1.0, 1.0], forward=[1.0, 1.0, 1.0])
    made = cycle(profile, AffineCost(0.0, 0.1), AffineCost(0.0, 0.2), step=0.5)
    found = phases(made, [1, 2, 3])
    assert np.array(found.scatters) == pytest.approx(np.array([(1.0, 2.0), (2.0, 4.0), (4.0, 7.0)]))
    assert found.updates[0] == pytest.approx((7.0, 7.5)) and len(found.updates) == 1
    assert np.array(found.gathers) == pytest.approx(np.array([(10.0, 12.0), (6.0, 10.0), (0.0, 6.0)]))
    assert found.forward == pytest.approx(13.0)  # the last layer waits for its 12 s and takes one more
    assert found.period == pytest.approx(20.5)


def test_shards_that_are_updated_one_by_one_hide_behind_later_reductions() -> None:
    profile = made_profile([10, 10], [1.0, 1.0])
    at_once = cycle(profile, AffineCost(0.0, 1.0), AffineCost(0.0, 0.0), step=8.0)
    one_by_one = cycle(profile, AffineCost(0.0, 1.0), AffineCost(0.0, 0.0), update=AffineCost(0.0, 0.4))
    assert period(at_once, [1, 2]) - period(one_by_one, [1, 2]) == pytest.approx(4.0)
    assert cycle_exact.optimal(one_by_one) == [1, 2]


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
    auto, ddp = (plan(profile, net, policy=name, overlap="forward") for name in ("auto", "ddp"))
    assert auto.prediction.iteration <= ddp.prediction.iteration


def test_hiding_behind_forward_too_is_never_predicted_slower_than_the_best_all_reduces() -> None:
    """Where forward takes half of backward, layer by layer, and the halves of an all-reduce cost what it costs."""
    for seed in range(6):
        profile = model(seed=seed, forward=0.5)
        net = network(1e-3, 10 ** random.Random(seed).uniform(-9.5, -8))
        both = plan(profile, net, policy="optimal", overlap="forward").prediction.iteration
        assert both <= plan(profile, net, policy="optimal").prediction.iteration * (1 + SAME)


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
    with pytest.raises(Error, match="optimizer: expected seconds"):
        plan(model(), network(1e-3, 1e-9), overlap="forward", optimizer=-1.0)
    with pytest.raises(Error, match="optimizer: expected with overlap='forward' only"):
        plan(model(), network(1e-3, 1e-9), optimizer=1.0)


def test_alone_nothing_is_communicated() -> None:
    made = plan(model(), network(1e-3, 1e-9), workers=1, overlap="forward", optimizer=0.1)
    assert made.prediction.exposed == pytest.approx(0.0, abs=1e-12)
    assert len(made.buckets) == 1


def test_the_robust_choice_is_the_same_every_time_and_never_slower_than_asked() -> None:
    made = cycle(model(), AffineCost(1e-3, 2e-9), AffineCost(1e-3, 2e-9))
    ceiling = period(made, rules.ddp(made.backward))
    assert cycle_exact.safest(made) == cycle_exact.safest(made)
    assert period(made, cycle_exact.safest(made)) <= ceiling
    assert period(made, cycle_exact.robust(made)) <= 1.1 * period(made, cycle_exact.optimal(made))


def test_bounds_of_one_phase_are_those_of_merging() -> None:
    made = cycle(model(), AffineCost(1e-3, 2e-9), AffineCost(2e-3, 1e-9))
    assert lower_bound(made) >= made.backward.backward + exact.lower_bound(made.forward, made.gather)

"""The named policies: valid for every stream, never better than the optimum, and what their names promise."""

from __future__ import annotations

import random

import pytest

from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, TableCost
from dovetail.core.plan import MIB
from dovetail.planning.merge import exact, robust, rules
from dovetail.planning.merge import stream as streams
from dovetail.planning.merge.policies import COMPARED, POLICIES
from dovetail.planning.merge.stream import Stream

from . import oracle

EVERY = ("auto", *COMPARED, "threshold:0.000002")


@pytest.mark.parametrize("name", EVERY)
def test_every_policy_respects_breaks_and_cap_and_never_beats_the_optimum(name: str) -> None:
    choose = POLICIES.parse(name).value
    for stream, cost in oracle.instances(31, 120, longest=10):
        cuts = choose(stream, cost)
        assert streams.allowed(stream, cuts)
        optimum = streams.finish(stream, exact.optimal(stream, cost), cost)
        assert exact.lower_bound(stream, cost) <= optimum * (1 + 1e-12)
        assert optimum <= streams.finish(stream, cuts, cost) * (1 + 1e-12)


def test_the_greedy_rule_is_beaten_from_three_tensors_on() -> None:
    cost = AffineCost(1.0, 1.0)
    stream = Stream((0.9, 1.8, 2.7), (1, 1, 1))
    assert rules.mgwfbp_greedy(stream, cost) == [3]
    assert streams.finish(stream, [3], cost) == pytest.approx(6.7)
    for choose in (exact.optimal, exact.optimal_affine):
        assert choose(stream, cost) == [1, 3]
        assert streams.finish(stream, [1, 3], cost) == pytest.approx(5.9)


def test_the_greedy_rule_is_exact_for_two_tensors() -> None:
    rng = random.Random(3)
    for _ in range(500):
        stream, cost = oracle.random_stream(rng, 2, limits=False), oracle.random_affine(rng)
        greedy = streams.finish(stream, rules.mgwfbp_greedy(stream, cost), cost)
        assert greedy == pytest.approx(streams.finish(stream, exact.optimal(stream, cost), cost), rel=1e-12)


def test_the_greedy_rule_collapses_to_one_bucket_and_half_the_speed_where_layers_are_short() -> None:
    cost, ratios = AffineCost(1.0, 1.0), []
    for n in (16, 128, 1024):
        stream = Stream(tuple(0.99 * (i + 1) for i in range(n)), (1,) * n)
        greedy = rules.mgwfbp_greedy(stream, cost)
        assert greedy == [n]
        ratios.append(streams.finish(stream, greedy, cost) / streams.finish(stream, exact.optimal(stream, cost), cost))
    assert ratios == sorted(ratios)
    assert 1.9 < ratios[-1] < 2.0


def test_accumulating_sends_what_is_ready_whenever_the_channel_is_free() -> None:
    stream, cost = Stream((1.0, 1.0, 2.0, 3.0, 3.5, 9.0), (1,) * 6), AffineCost(2.0, 0.0)
    assert rules.accumulate_while_busy(stream, cost) == [2, 4, 5, 6]
    assert streams.schedule(stream, [2, 4, 5, 6], cost) == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0), (9.0, 11.0)]


def test_size_rules_close_at_or_above_their_threshold_and_start_again_after_a_break() -> None:
    mib = tuple(m * MIB for m in (0, 1, 20, 4, 1, 30, 2, 9))
    ready = tuple(map(float, range(8)))
    assert rules.ddp(Stream(ready, mib)) == [2, 5, 6, 8]
    assert rules.ddp(Stream(ready, mib, breaks=frozenset({3}))) == [2, 3, 4, 6, 8]
    assert POLICIES.parse("threshold:5").value(Stream(ready, mib), AffineCost(1, 1)) == [3, 5, 6, 8]
    assert rules.by_size(Stream(ready, mib, cap=20 * MIB), 25 * MIB) == [2, 3, 5, 6, 8]


@pytest.mark.parametrize("name", ["ddp", "threshold:2", "threshold:25"])
def test_size_rules_cut_where_torch_cuts(name: str) -> None:
    """torch's own assignment of tensors to buckets, for one dtype and for one run of each of two."""
    torch = pytest.importorskip("torch")
    assign = torch.distributed._compute_bucket_assignment_by_size
    limits = [1 * MIB, 25 * MIB] if name == "ddp" else [int(float(name.partition(":")[2]) * MIB)]
    rng = random.Random(name)
    for _ in range(25):
        n = rng.randint(1, 60)
        elements = [rng.choice([1, 1000, MIB // 4, rng.randint(1, 4 * MIB)]) for _ in range(n)]
        halves = rng.choice([n, rng.randint(0, n)])  # from here on float16
        tensors = [torch.empty(e, dtype=torch.float32 if i < halves else torch.float16) for i, e in enumerate(elements)]
        buckets, _ = assign(tensors, limits, [False] * n)
        stream = Stream(
            tuple(map(float, range(n))),
            tuple(t.numel() * t.element_size() for t in tensors),
            breaks=frozenset({halves} if 0 < halves < n else ()),
        )
        assert POLICIES.parse(name).value(stream, AffineCost(1e-3, 1e-9)) == [b[-1] + 1 for b in buckets]


def test_an_unknown_policy_is_answered_with_what_exists() -> None:
    with pytest.raises(Error) as e:
        POLICIES.parse("fastest")
    for name in ("per-tensor", "single", "ddp", "threshold:MB", "accumulate-while-busy", "mgwfbp-greedy", "optimal"):
        assert name in str(e.value)
    assert "\n" not in str(e.value)
    with pytest.raises(Error, match="no policy 'threshold'"):
        POLICIES.parse("threshold")


@pytest.mark.parametrize(
    "text", ["threshold:", "threshold:ten", "threshold:0", "threshold:-1", "threshold:nan", "threshold:inf"]
)
def test_a_threshold_must_be_a_positive_number(text: str) -> None:
    with pytest.raises(Error, match=r"expected threshold:MB with MB a number above zero"):
        POLICIES.parse(text)


def test_every_policy_describes_itself_in_one_line() -> None:
    assert {name for name, _ in POLICIES.described()} == {*COMPARED, "auto", "threshold:MB"} - {"threshold:10"}
    for _, text in POLICIES.described():
        assert text
        assert "\n" not in text


class TestRobust:
    def stream(self, seed: int = 0, n: int = 60) -> Stream:
        rng = random.Random(seed)
        ready = sorted(rng.uniform(0, 0.1) for _ in range(n))
        return Stream(tuple(ready), tuple(rng.randint(100, 2_000_000) for _ in range(n)), backward=ready[-1])

    def test_the_choice_is_the_same_for_the_same_seed(self) -> None:
        for cost in (AffineCost(1e-3, 1e-9), TableCost((1e3, 1e5, 1e6), (1e-4, 1e-3, 3e-3))):
            assert robust.robust(self.stream(), cost, seed=5) == robust.robust(self.stream(), cost, seed=5)

    def test_the_choice_stays_near_the_optimum_it_guards(self) -> None:
        for seed in range(10):
            stream, cost = self.stream(seed), AffineCost(1e-3, 1e-9)
            best = streams.objective(stream, exact.optimal(stream, cost), cost)
            assert streams.objective(stream, robust.robust(stream, cost), cost) <= 1.05 * best

    def test_the_choice_suffers_less_than_the_optimum_when_latency_was_underestimated(self) -> None:
        """Summed over models: twice the latency that was planned for."""
        planned, met = AffineCost(5e-4, 1e-9), AffineCost(1e-3, 1e-9)
        guarded = optimum = 0.0
        for seed in range(10):
            stream = self.stream(seed)
            guarded += streams.objective(stream, robust.robust(stream, planned), met)
            optimum += streams.objective(stream, exact.optimal(stream, planned), met)
        assert guarded < optimum

    def test_a_hidden_network_gets_as_few_buckets_as_still_hide(self) -> None:
        stream = Stream((0.1, 0.2, 0.3, 0.4), (100,) * 4, backward=1.0)
        assert robust.robust(stream, AffineCost(1e-4, 1e-9)) == [4]

    def test_free_communication_gets_one_bucket(self) -> None:
        assert robust.robust(self.stream(), AffineCost(0.0, 0.0)) == [60]

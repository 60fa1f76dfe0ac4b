"""How an iteration scales: one point for every number of workers and every policy."""

from __future__ import annotations

import pytest

from dovetail.core.errors import Error
from dovetail.planning import plan
from dovetail.planning.merge.policies import COMPARED
from dovetail.simulate import scale
from tests.planning.merge.oracle import made_network, made_profile

PROFILE = made_profile([4000, 100, 2_000_000, 500, 9000] * 6, [0.02, 0.001, 0.03, 0.005, 0.01] * 6)
NETWORK = made_network(4e-3, 2e-9, ranks=4)


def test_every_number_of_workers_and_every_policy_has_its_point_in_order() -> None:
    points = scale(PROFILE, NETWORK, workers=[4, 1, 32], policies=["single", "optimal"])
    assert [(p.workers, p.policy) for p in points] == [(w, p) for w in (4, 1, 32) for p in ("single", "optimal")]


def test_a_point_is_the_plan_for_that_many_workers() -> None:
    for p in scale(PROFILE, NETWORK, workers=[1, 4, 256]):
        made = plan(PROFILE, NETWORK, workers=p.workers, policy=p.policy)
        alone = made.prediction.forward + made.prediction.backward
        assert (p.iteration, p.buckets) == (made.prediction.iteration, len(made.buckets))
        assert p.speedup == pytest.approx(p.workers * alone / p.iteration)
        assert p.efficiency == pytest.approx(p.speedup / p.workers)


def test_one_worker_has_a_speedup_of_exactly_one() -> None:
    assert {(p.speedup, p.efficiency) for p in scale(PROFILE, NETWORK, workers=[1])} == {(1.0, 1.0)}


def test_no_policy_scales_better_than_the_optimum_and_efficiency_only_falls() -> None:
    points = scale(PROFILE, NETWORK, workers=[1, 2, 8, 64, 512])
    best = {p.workers: p.efficiency for p in points if p.policy == "optimal"}
    assert all(p.efficiency <= best[p.workers] * (1 + 1e-12) for p in points)
    assert list(best.values()) == sorted(best.values(), reverse=True)
    assert {p.policy for p in points} == set(COMPARED)


def test_a_model_without_any_time_does_not_divide_by_zero() -> None:
    nothing = made_profile([1], [0.0])
    assert [p.efficiency for p in scale(nothing, NETWORK, workers=[1], policies=["single"])] == [1.0]


def test_a_wrong_number_of_workers_is_named() -> None:
    with pytest.raises(Error, match="workers: expected 1 to 2,147,483,647, got 0"):
        scale(PROFILE, NETWORK, workers=[0])

"""Links as measured: every number of ranks and every way of re-sharding answers from its own table."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from dovetail.core.network import Collective, CostSample, Fit, Network
from dovetail.core.profile import Quantiles
from dovetail.planning.burst.cost import MeasuredLinks, ProfileCost
from dovetail.planning.burst.planner import BurstPlanner
from dovetail.train.burst.measurement import together
from tests.planning.merge.oracle import made_profile


def collective(latency: float, per_byte: float) -> Collective:
    def at(nbytes: int) -> CostSample:
        seconds = latency + per_byte * nbytes
        return CostSample(bytes=nbytes, seconds=Quantiles(median=seconds, low=seconds, high=seconds, samples=3))

    fit = Fit(latency=latency, seconds_per_byte=per_byte, error=0.0)
    return Collective(fit=fit, samples=(at(1000), at(2000), at(10000)))


LINKS = MeasuredLinks(
    networks={
        n: Network(name="m", ranks=n, source="made up", measured=True, collectives={"all_reduce": collective(*law)})
        for n, law in {2: (1e-3, 1e-6), 4: (7e-3, 2e-6)}.items()
    },
    moves={
        (1, 2): collective(1e-3, 1e-6),
        (2, 1): collective(2e-3, 1e-6),
        (2, 4): collective(3e-3, 1e-6),
        (4, 1): collective(4e-3, 5e-6),
    },
    crowded={4: 1.5},
)


def test_a_number_of_ranks_answers_from_its_own_measurement() -> None:
    assert LINKS.all_reduce(5000, [1, 2, 4]) == pytest.approx([0.0, 6e-3, 17e-3])
    assert float(LINKS.reduction(2)(2000)) == pytest.approx(3e-3)
    ring = float(LINKS.networks[4].cost("all_reduce", ranks=3)(5000))
    assert LINKS.all_reduce(5000, 3) == pytest.approx(ring), "others follow the widest by the ring law"


def test_re_sharding_costs_depend_on_the_ranks_before_and_after() -> None:
    assert float(LINKS.move(2000, 4, 1)) == pytest.approx(14e-3)
    assert float(LINKS.move(20000, 2, 1)) == pytest.approx(22e-3), "beyond the table along its last slope"
    each = LINKS.move([[1000.0], [2000.0]], [[1], [2]], [2, 4])
    # Growing from 1 to 4 was not measured: from 2 to 4 is the nearest that grows.
    assert np.asarray(each) == pytest.approx(np.array([[2e-3, 4e-3], [0.0, 5e-3]]))


def test_crowding_is_known_only_for_measured_numbers_of_ranks() -> None:
    assert (LINKS.crowding(4), LINKS.crowding(2)) == (1.5, 1.0)


def test_a_planner_counts_re_sharding_in_both_directions() -> None:
    model = made_profile([0, 0], [1e-3, 1e-3])
    planner = BurstPlanner(model, ProfileCost(model, 8, wires=LINKS), 4, counts=(1, 2, 4))
    moved = 6 * model.layers[0].activation_bytes  # six samples come to the one that stays
    border = float(planner.cost.reshard(0, 4, 1))
    assert border == pytest.approx(float(LINKS.move(moved, 4, 1)) + float(LINKS.move(moved, 1, 4)))
    assert float(planner.cost.reshard(0, 1, 4)) == pytest.approx(border)


def test_one_bad_measurement_among_several_does_not_count() -> None:
    def slower(factor: float) -> MeasuredLinks:
        networks = {
            n: msgspec.structs.replace(network, collectives={"all_reduce": collective(n * 1e-3, factor * 1e-6)})
            for n, network in LINKS.networks.items()
        }
        return MeasuredLinks(networks, {(1, 2): collective(1e-3, factor * 1e-6)}, {4: factor})

    found = together([slower(9.0), slower(2.0), slower(1.0)])
    assert found.all_reduce(10000, [2, 4]) == pytest.approx([22e-3, 24e-3])
    assert found.networks[4].collectives["all_reduce"].fit.seconds_per_byte == pytest.approx(2e-6)
    assert float(found.move(10000, 1, 2)) == pytest.approx(21e-3) and found.crowding(4) == 2.0

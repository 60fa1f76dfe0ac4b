"""One more node: what its link costs, by the ring law and by bytes over the slowest link."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.errors import Error
from dovetail.core.network import Collective, CostSample, Fit, Network
from dovetail.core.profile import exactly
from dovetail.simulate.node import joined, with_node
from tests.planning.merge.oracle import made_network, made_profile

PROFILE = made_profile([10**6] * 6, [0.01] * 6)


def measured() -> Network:
    """A network with a table of its own, which the affine law does not follow."""
    samples = tuple(CostSample(bytes=n, seconds=exactly(t)) for n, t in ((10**3, 2e-4), (10**6, 3e-3), (10**7, 2e-2)))
    fit = Fit(latency=1e-4, seconds_per_byte=2e-9, error=0.1)
    table = Collective(fit=fit, samples=samples)
    return msgspec.structs.replace(made_network(1e-4, 2e-9), collectives={"all_reduce": table})


NETWORKS = [made_network(1e-4, 2e-9), measured()]


@pytest.mark.parametrize("network", NETWORKS)
def test_a_fast_link_is_the_ring_law(network: Network) -> None:
    more = joined(network, network.ranks + 1, "1000000gbit")
    sizes = [1e3, 1e6, 1e8]
    assert more.cost()(sizes) == pytest.approx(network.cost(ranks=network.ranks + 1)(sizes))


@given(st.sampled_from(NETWORKS), st.floats(1, 1e4), st.integers(10**5, 10**9))
def test_no_message_is_faster_than_the_new_link(network: Network, mbit: float, nbytes: int) -> None:
    more = joined(network, network.ranks + 1, f"{mbit:.3f}mbit")
    wire = 2 * (more.ranks - 1) / more.ranks * nbytes * 8 / (float(f"{mbit:.3f}") * 1e6)
    slack = 1 + 1e-9
    assert float(more.cost()(nbytes)) * slack >= wire
    assert float(more.cost()(nbytes)) * slack >= float(network.cost(ranks=more.ranks)(nbytes))


def test_a_slow_link_makes_the_iteration_longer_and_the_prediction_says_by_how_much() -> None:
    fast, slow = (with_node(PROFILE, NETWORKS[1], rate=rate) for rate in ("1000gbit", "1kbit"))
    assert slow.then > fast.then and slow.now == fast.now
    assert slow.speedup < 0.1 < fast.speedup <= slow.workers / (slow.workers - 1)
    assert slow.then == pytest.approx(2 * (slow.workers - 1) / slow.workers * PROFILE.parameter_bytes * 8e-3, rel=0.01)
    assert str(slow).startswith("predicted with one more node at 1kbit: ")


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(Error, match="rate: expected"):
        with_node(PROFILE, NETWORKS[0], rate="fast")
    with pytest.raises(Error, match="workers: expected at least 1"):
        with_node(PROFILE, NETWORKS[0], rate="1gbit", workers=0)

"""What the nouns can say of themselves."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.core.network import AffineCost, Collective, CostSample, Fit, Network, TableCost
from dovetail.core.profile import Layer, LayerTime, combined_noise, doubt, exactly
from dovetail.core.timeline import Span, Timeline, compare

from .test_files import NETWORK, PLAN, PROFILE


def layer(**times: float) -> Layer:
    return Layer(
        name="l",
        type="Linear",
        parameter_bytes=0,
        activation_bytes=0,
        times=tuple(LayerTime(batch=int(b[1:]), forward=exactly(t), backward=exactly(2 * t)) for b, t in times.items()),
    )


def test_layer_times_are_linear_between_and_beyond_measured_batches() -> None:
    assert layer(b4=1.0, b8=3.0).forward(6) == pytest.approx(2.0)
    assert layer(b4=1.0, b8=3.0).backward(16) == pytest.approx(14.0)
    assert layer(b4=1.0, b8=3.0).forward(1) == 0.0  # never negative
    assert layer(b4=1.0).forward(8) == pytest.approx(2.0)  # one point: in proportion
    three = layer(b1=1.0, b2=2.0, b4=6.0)
    assert [three.forward(b) for b in (1, 2, 3, 4)] == pytest.approx([1.0, 2.0, 4.0, 6.0])


def test_a_scaled_profile_keeps_proportions_and_says_that_it_is_emulated() -> None:
    scaled = PROFILE.scaled(forward=1.0, backward=3.0)
    assert scaled.forward_time() == pytest.approx(1.0) and scaled.backward_time() == pytest.approx(3.0)
    assert scaled.emulated and not PROFILE.emulated
    assert scaled.tensors[1].ready / scaled.tensors[0].ready == pytest.approx(3.0)


def test_ready_times_follow_the_batch() -> None:
    double = PROFILE.ready_times(16)
    ratio = sum(la.backward(16) for la in PROFILE.layers) / sum(la.backward(8) for la in PROFILE.layers)
    assert double == pytest.approx([t * ratio for t in PROFILE.ready_times()])
    assert PROFILE.ready_times(8) == PROFILE.ready_times()


@given(st.integers(2, 2048), st.floats(1, 1e9))
def test_other_rank_counts_follow_the_ring_law(ranks: int, nbytes: float) -> None:
    network = Network(
        name="n",
        ranks=4,
        source="",
        measured=False,
        collectives={"all_reduce": Collective(fit=Fit(latency=3e-3, seconds_per_byte=1.5e-8, error=0.0))},
    )
    expected = (ranks - 1) * 1e-3 + 2e-8 * (ranks - 1) / ranks * nbytes
    assert float(network.cost(ranks=ranks)(nbytes)) == pytest.approx(expected)
    assert float(network.affine(ranks=ranks)(nbytes)) == pytest.approx(expected)


def test_a_measured_table_scales_to_other_rank_counts_as_its_fit_does() -> None:
    fit = Fit(latency=1e-3, seconds_per_byte=1e-8, error=0.0)
    law = AffineCost(fit.latency, fit.seconds_per_byte)
    samples = tuple(CostSample(bytes=b, seconds=exactly(float(law(b)))) for b in (1024, 2**20, 2**24))
    network = Network(
        name="n", ranks=4, source="", measured=True, collectives={"all_reduce": Collective(fit=fit, samples=samples)}
    )
    for nbytes in (1024, 5_000_000, 2**26):
        assert float(network.cost(ranks=4)(nbytes)) == pytest.approx(float(law(nbytes)))
        assert float(network.cost(ranks=64)(nbytes)) == pytest.approx(float(network.affine(ranks=64)(nbytes)))


def test_a_table_is_flat_below_and_goes_on_above() -> None:
    table = TableCost((100.0, 200.0, 400.0), (1.0, 2.0, 4.0))
    assert table(np.array([0, 100, 150, 400, 800])) == pytest.approx([1.0, 1.0, 1.5, 4.0, 8.0])
    noisy = TableCost((100.0, 200.0), (2.0, 1.0))
    assert float(noisy(10_000)) == pytest.approx(1.0)  # never a negative price for more bytes


def test_a_collective_that_was_not_measured_is_named() -> None:
    with pytest.raises(Error, match="has no all_gather"):
        NETWORK.cost("all_gather")


def test_caps_reach_torch_without_losing_a_byte() -> None:
    assert [int(c * 2**20) for c in PLAN.ddp_kwargs()["bucket_cap_mb_list"]] == [800, 400]


@given(st.integers(1, 2**45))
def test_any_bucket_size_survives_the_way_through_mebibytes(nbytes: int) -> None:
    assert int(nbytes / 2**20 * 2**20) == nbytes


def test_a_plan_for_several_dtypes_has_no_torch_keywords() -> None:
    with pytest.raises(Error, match="bfloat16, float32"):
        msgspec.structs.replace(PLAN, dtypes=("bfloat16", "float32")).ddp_kwargs()


def spans(*parts: tuple[str, str, float, float]) -> Timeline:
    return Timeline(
        name="t",
        source="measured",
        spans=tuple(Span(track=t, name="x", kind=k, start=a, stop=b) for t, k, a, b in parts),  # type: ignore[arg-type]
    )


def test_busy_time_counts_overlap_once_and_takes_the_busiest_track() -> None:
    timeline = spans(
        ("a", "communication", 0, 2),
        ("a", "communication", 1, 3),
        ("a", "communication", 5, 6),
        ("b", "communication", 0, 1),
    )
    assert timeline.busy("communication") == 4 and timeline.busy("forward") == 0
    assert timeline.duration == 6


def test_a_comparison_states_the_error_relative_to_what_happened() -> None:
    result = compare(spans(("a", "forward", 0, 9)), spans(("a", "forward", 1, 11)))
    assert result.error == pytest.approx(-0.1)
    assert result.by_kind["forward"] == (9, 10)


def test_noise_and_contention_are_nothing_in_files_that_do_not_have_them() -> None:
    for noun, fields in ((PROFILE, ("noise", "lost")), (NETWORK, ("noise", "lost", "contention", "reduced"))):
        data = json.loads(files.encode(noun))
        for field in fields:
            del data[field]
        assert files.decode(json.dumps(data), type(noun)) == noun
    assert (PROFILE.noise, PROFILE.lost, NETWORK.noise, NETWORK.lost, NETWORK.contention) == (0, 0, 0, 0, None)


def test_a_reduced_table_is_checked_like_any_other() -> None:
    fit = Fit(latency=1e-3, seconds_per_byte=1e-8, error=0.0)
    samples = tuple(CostSample(bytes=b, seconds=exactly(1.0)) for b in (2048, 1024))
    wrong = msgspec.structs.replace(NETWORK, reduced={"int8": {"all_reduce": Collective(fit=fit, samples=samples)}})
    with pytest.raises(ValueError, match=r"reduced\.int8\.all_reduce\.samples: expected ascending bytes"):
        wrong.check()


def test_a_gain_within_the_noise_of_its_inputs_is_doubted() -> None:
    line = doubt(0.03, 0.12, 0.05)
    assert line is not None
    assert line.startswith("predicted gain 3.0 % is within the noise of the measurements (13.0 %): measure again")
    assert doubt(0.14, 0.12, 0.05) is None
    assert doubt(0.03) is None and doubt(0.0, 0.12) is None and doubt(-0.1, 0.12) is None
    assert combined_noise(0.03, 0.04) == pytest.approx(0.05)

"""What one plan for everything chooses, what it leaves out, and that the reasons it gives are true."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.plan import Plan
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.measure.presets import preset
from dovetail.planning.auto.options import Question
from dovetail.planning.auto.search import AutoPlan, Candidate
from dovetail.simulate.auto import choose
from dovetail.view.auto import sentences
from tests.planning.merge.oracle import made_network, made_profile

from .auto_oracle import network, profile

# What is asked for.


def uneven() -> Profile:
    """Layers that halve well behind large ones that do not: data parallelism on all devices is slow."""
    times = {"conv": (0.0, 1e-3), "dense": (2e-3, 0.0)}
    layers = []
    for i, kind in enumerate(["conv"] * 4 + ["dense"] * 2):
        fixed, each = times[kind]
        layers.append(
            Layer(
                name=f"{kind}{i}",
                type=kind,
                parameter_bytes=400 if kind == "conv" else 40_000_000,
                activation_bytes=1000,
                times=tuple(
                    LayerTime(
                        batch=b, forward=exactly((fixed + each * b) / 3), backward=exactly((fixed + each * b) * 2 / 3)
                    )
                    for b in (1, 2, 4, 8, 16, 32)
                ),
            )
        )
    tensors, ready = [], 0.0
    for i in reversed(range(6)):
        ready += layers[i].backward(4)
        tensors.append(
            ParameterTensor(
                name=f"{layers[i].name}.w", layer=i, bytes=layers[i].parameter_bytes, dtype="float32", ready=ready
            )
        )
    return Profile(name="uneven", device="none", batch=4, layers=tuple(layers), tensors=tuple(tensors))


def test_burst_is_chosen_where_layers_are_uneven_and_links_slow() -> None:
    found = choose(uneven(), preset("10gbe-8"))
    assert found.chosen.technique == "burst" and isinstance(found.chosen.plan, BurstPlan)
    assert found.question.batch == 32 and found.chosen.score.iteration < 0.8 * found.baseline.score.iteration
    assert found.steps[0].technique == "ddp" and found.steps[-1] is found.chosen
    assert 0 <= found.gap < 1 and found.bound <= found.value


def test_one_device_is_best_where_communication_costs_more_than_it_saves() -> None:
    found = choose(made_profile([10**9] * 3, [1e-3] * 3), preset("10gbe-8"))
    assert (found.chosen.technique, found.chosen.devices) == ("ddp", 1)
    assert found.baseline.devices == 8 and found.gap == 0.0
    assert [(c.technique, c.devices) for c in found.steps] == [("ddp", 8), ("ddp", 1)]


def test_where_everything_hides_nothing_gains_over_torchs_ddp() -> None:
    found = choose(made_profile([100, 100], [1.0, 1.0]), preset("nvlink-8"))
    gain = found.baseline.score.iteration / found.chosen.score.iteration
    assert gain < 1.001


def test_the_ablation_adds_one_part_at_a_time() -> None:
    job = made_profile([30_000_000] * 8, [0.02] * 8, forward=[0.02] * 8)
    found = choose(job, preset("10gbe-8"))
    assert [c.technique for c in found.steps] == ["ddp", "merging", "overlap"]
    times = [c.score.iteration for c in found.steps]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]
    assert all(isinstance(c.plan, Plan) for c in found.steps)


def test_a_plan_has_no_cut_that_it_does_not_need() -> None:
    """Everything hides in any number of buckets; the fewest have the last gradient in a bucket of its own."""
    job = made_profile([1000] * 12, [0.1] * 12)
    search = choose(job, preset("10gbe-4")).search
    for technique in ("merging", "overlap"):
        found = search.of(technique, 4)
        assert found is not None and isinstance(found.plan, Plan) and len(found.plan.buckets) <= 2


def test_device_time_and_throughput_keep_the_speed_of_torchs_own() -> None:
    for objective in ("device-time", "throughput"):
        found = choose(uneven(), preset("10gbe-8"), objective=objective)
        assert found.within == found.baseline.score.iteration
        assert found.chosen.score.iteration <= found.within * (1 + 1e-9)
        assert found.chosen.score.device_time <= found.baseline.score.device_time
    slow = choose(uneven(), preset("10gbe-8"), objective="device-time", within=10.0)
    assert slow.chosen.devices == 1, "whoever has time needs one device"


def test_a_speed_that_nothing_reaches_is_one_clear_line() -> None:
    with pytest.raises(Error, match=r"within: no plan for 'uneven' takes at most 0\.001 s .* can take less than"):
        choose(uneven(), preset("10gbe-8"), within=1e-3)


def test_partial_depth_is_only_for_those_who_allow_it() -> None:
    job, net = profile(3, 6), network(0.0, 1e-6, ranks=4)
    strict, loose = (choose(job, net, batch=16, statistics=s) for s in (False, True))
    assert not any(c.technique == "balanced" for c in strict.scored)
    assert any("--allow-statistics" in e.reason for e in strict.excluded)
    assert loose.chosen.technique == "balanced" and isinstance(loose.chosen.plan, DepthPlan)
    assert [c.technique for c in loose.steps] == ["ddp", "merging", "ladder", "balanced"]
    assert loose.value < strict.value


# What cannot be considered.


def reasons(found: AutoPlan) -> dict[str, str]:
    return {e.technique: e.reason for e in found.excluded}


def test_burst_needs_several_measured_batches_and_says_how_to_get_them() -> None:
    why = reasons(choose(made_profile([100], [0.1]), preset("10gbe-4")))["burst"]
    assert "only one local batch (8) was measured" in why and "dovetail profile MODEL --batches 8,16,32" in why
    assert "does not tell how layer times follow it" in why and "uneven" not in why


def test_what_was_not_considered_is_not_said_to_be_worse() -> None:
    found = choose(made_profile([100], [0.1]), preset("10gbe-4"))
    told = " ".join(sentences(found))
    assert found.gap == 0 and "None of them can be better. Not among them: burst." in told
    several = choose(uneven(), preset("10gbe-8"))
    assert "Not among them" not in " ".join(sentences(several))


def test_that_the_optimiser_counts_for_overlap_only_is_said_where_it_takes_time() -> None:
    job, net = made_profile([30_000_000] * 8, [0.02] * 8, forward=[0.02] * 8), preset("10gbe-8")
    assert "optimiser counts for overlap only" in " ".join(sentences(choose(job, net, optimizer=0.01)))
    assert "optimiser" not in " ".join(sentences(choose(job, net)))


def test_overlap_needs_both_halves_of_an_all_reduce_and_one_dtype() -> None:
    only = reasons(choose(made_profile([100], [0.1]), made_network(1e-3, 1e-9)))
    assert "has no reduce_scatter" in only["overlap"] and "dovetail network" in only["overlap"]
    mixed = made_profile([100, 100], [0.1, 0.1], dtypes=["float32", "float16"])
    both = reasons(choose(mixed, preset("10gbe-4")))
    assert "several dtypes" in both["merging"] and "one dtype" in both["overlap"]
    assert choose(mixed, preset("10gbe-4")).chosen.technique == "ddp"


def test_devices_that_do_not_share_the_batch_evenly_are_not_used_by_data_parallelism() -> None:
    found = choose(made_profile([100], [0.1]), preset("10gbe-8"), batch=12)
    assert {c.devices for c in found.scored} | {d.combination.devices for d in found.dropped} <= {1, 2, 3, 4, 6}
    assert found.baseline.devices == 6
    assert any("8 devices do not share a global batch of 12 evenly; 6 do" in e.reason for e in found.excluded)


def test_memory_takes_small_numbers_of_devices_away() -> None:
    wide = tuple(msgspec.structs.replace(x, activation_bytes=1000) for x in made_profile([4] * 2, [0.1] * 2).layers)
    job = msgspec.structs.replace(made_profile([4] * 2, [0.1] * 2), layers=wide)
    net = preset("10gbe-8")
    roomy, tight = (choose(job, net, memory=m, objective="device-time", within=10.0) for m in (None, 40_000))
    assert roomy.chosen.devices == 1
    assert tight.chosen.devices == 4, "16 samples of 2,000 bytes are 32,000; twice as many do not fit"
    assert any("GiB" in e.reason for e in tight.excluded)
    with pytest.raises(Error, match="need 16,032 bytes each, expected at most 100"):
        choose(job, net, memory=100)


def needed(found: AutoPlan, c: Candidate) -> int:
    """Bytes of the device of a plan that needs the most, by the plan's own figure where it has one."""
    if isinstance(c.plan, BurstPlan):
        return c.plan.prediction.memory
    if isinstance(c.plan, DepthPlan):
        return max(w.memory for phase in c.plan.phases for w in phase.workers)
    return found.question.needed(c.devices)


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.floats(0.3, 1.2),
    st.sampled_from([(4, 8), (3, 7), (4, 12)]),
    st.sampled_from([(0.2, 0.01), (5.0, 0.0), (40.0, 0.0)]),
    st.booleans(),
)
def test_every_plan_that_is_scored_fits_into_memory(
    seed: int, share: float, size: tuple[int, int], wire: tuple[float, float], statistics: bool
) -> None:
    """Where collectives are slow fewer devices would be faster, each with more to keep."""
    devices, batch = size
    made, net = profile(seed, 4), network(*wire)
    wide = tuple(msgspec.structs.replace(x, activation_bytes=500) for x in made.layers)
    job = made if seed % 2 else msgspec.structs.replace(made, layers=wide)
    limit = int(share * Question(job, net, devices=devices, batch=batch).needed(2))
    try:
        found = choose(job, net, devices=devices, batch=batch, memory=limit, statistics=statistics)
    except Error as e:
        assert "bytes each, expected at most" in str(e)
        return
    for c in (found.chosen, *found.scored, *(c for c in found.steps if c is not found.baseline)):
        assert needed(found, c) <= limit, c.technique


def test_partial_depth_and_burst_are_tried_where_data_parallelism_does_not_fit() -> None:
    job, net = profile(3, 6), network(0.0, 1e-6, ranks=4)
    whole = Question(job, net, devices=4, batch=16).needed(4)
    with pytest.raises(Error, match=rf"need {whole:,} bytes each, expected at most {whole - 1:,}"):
        choose(job, net, batch=16, memory=whole - 1)
    wide = tuple(msgspec.structs.replace(x, activation_bytes=1000) for x in job.layers)
    deep = msgspec.structs.replace(job, layers=wide)
    whole = Question(deep, net, devices=4, batch=16).needed(4)
    found = choose(deep, net, batch=16, memory=whole - 1, statistics=True)
    assert found.chosen.technique == "balanced" and needed(found, found.chosen) < whole
    assert not any(c.technique == "ddp" for c in found.scored) and found.steps[0] is found.baseline
    assert any(e.technique == "data parallelism" and "GiB each" in e.reason for e in found.excluded)
    uneven_batch = choose(deep, net, batch=17, memory=int(0.9 * Question(deep, net, devices=1, batch=17).needed(1)))
    assert uneven_batch.chosen.technique == "burst"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"objective": "joy"}, "objective: expected one of time, device-time, throughput"),
        ({"devices": 0}, "devices: expected 1 to"),
        ({"batch": 0}, "batch: expected 1 to"),
        ({"within": -1.0}, "within: expected seconds"),
    ],
)
def test_wrong_questions_are_one_line(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(Error, match=words):
        choose(made_profile([100], [0.1]), preset("10gbe-4"), **wrong)  # type: ignore[arg-type]


def test_a_network_without_all_reduce_is_named() -> None:
    net = preset("10gbe-4")
    halves = {k: v for k, v in net.collectives.items() if k != "all_reduce"}
    with pytest.raises(Error, match="has no all_reduce"):
        choose(made_profile([100], [0.1]), msgspec.structs.replace(net, collectives=halves))


def test_a_technique_of_which_nothing_better_was_found_is_not_said_to_be_proven_worse() -> None:
    """No plan of burst was made that is faster than overlap, yet its bound is below."""
    found = choose(profile(0, 3), network(1.0, 1e-2), devices=2, batch=4)
    dropped = {d.combination.technique: d.reason for d in found.dropped}
    assert dropped["burst"] == "none" and found.gap > 0
    exact = [d for d in found.dropped if d.combination.exact]
    assert all(d.reason in ("bound", "slow") for d in exact)
    told = " ".join(sentences(found))
    assert "1 without a better plan" in told and "might be up to 14.9 % better" in told


def test_a_burst_plan_carries_the_figures_that_it_was_chosen_by() -> None:
    found = choose(uneven(), preset("10gbe-8"))
    bursts = [c for c in (found.chosen, *found.scored) if isinstance(c.plan, BurstPlan)]
    assert bursts
    for c in bursts:
        assert isinstance(c.plan, BurstPlan)
        told = c.plan.prediction
        assert (told.iteration, told.device_time) == (c.score.iteration, c.score.device_time)

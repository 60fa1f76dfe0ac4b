"""Slow ranks are named by rank, phase and layer from simulated stamps, and equal ranks are not named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.train import rank_times, stragglers
from dovetail.train.rank_times import LOSS, GradientMark, LayerVisit, RankIteration
from dovetail.view.page import document, sort
from straggler_study import DELAYED, StudyNoise, drawn_delay, drawn_model, named_right, simulated

RUNS = 100
SHARES = (0.05, 0.5)
"""Smallest and largest injected delay, as a share of an iteration."""


@pytest.mark.parametrize("noise", [StudyNoise(), StudyNoise(layer=0.1, rank=0.03, lasting=0.01, burst=0.1)])
def test_delays_of_5_to_50_percent_are_named_right_in_95_of_100_runs(noise: StudyNoise) -> None:
    wrong = []
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        model, ranks = drawn_model(rng), int(rng.integers(2, 9))
        delay = drawn_delay(rng, model, ranks, DELAYED[seed % len(DELAYED)], float(rng.uniform(*SHARES)))
        found = simulated(rng, model, ranks, noise, delay)
        if not named_right(found, delay):
            wrong.append((ranks, delay, found.slow))
    assert len(wrong) <= 0.05 * RUNS, wrong


@pytest.mark.parametrize("noise", [StudyNoise(), StudyNoise(layer=0.3, rank=0.1, lasting=0.0, burst=0.2)])
def test_equal_ranks_are_named_in_at_most_5_of_100_runs(noise: StudyNoise) -> None:
    alarms = []
    for seed in range(2 * RUNS):
        rng = np.random.default_rng(seed)
        found = simulated(rng, drawn_model(rng), int(rng.integers(2, 9)), noise, None)
        if found.slow:
            alarms.append(found.slow)
    assert len(alarms) <= 0.05 * 2 * RUNS, alarms


def ranks_with(*rows: tuple[RankIteration, ...]) -> stragglers.RankComparison:
    columns = rank_times.columns_of(rows[0])
    return stragglers.compare(columns, np.asarray([rank_times.table_of(row, columns) for row in rows]))


def iteration(forward: dict[str, float], **given: float) -> RankIteration:
    return RankIteration(input=given.pop("input", 0.1), forward=forward, backward={"a": 0.2}, **given)


def test_a_loss_inside_several_layers_of_a_block_is_named_by_the_block() -> None:
    fast = (iteration({"": 0.0, "stem": 0.1, "block.0.conv": 0.1, "block.0.norm": 0.1, "block.1": 0.1}),) * 5
    slow = (iteration({"": 0.0, "stem": 0.1, "block.0.conv": 0.15, "block.0.norm": 0.15, "block.1": 0.1}),) * 5
    (found,) = ranks_with(fast, slow, fast).slow
    assert (found.rank, found.phase, found.layer) == (1, "forward", "block.0")
    assert found.seconds == pytest.approx(0.1)


def test_a_loss_in_all_layers_is_named_without_a_layer() -> None:
    fast = (iteration({"a": 0.1, "b": 0.1, "c": 0.1}),) * 5
    slow = (iteration({"a": 0.15, "b": 0.15, "c": 0.15}),) * 5
    (found,) = ranks_with(fast, slow).slow
    assert (found.rank, found.phase, found.layer) == (1, "forward", "")
    assert str(found) == "rank 1 is slow: 150 ms a step, in forward"


def test_the_picture_has_a_row_for_each_rank_and_shows_what_is_lost_and_who_waits() -> None:
    fast, slow = (iteration({"a": 0.1}, waiting=0.2),) * 5, (iteration({"a": 0.3}),) * 5
    drawn = ranks_with(fast, slow).timeline()
    (sentence,) = document(sort([drawn])).lead.more
    assert sentence == "Rank 1 is slow: 200 ms of every 600 ms, 33.3 %, are lost in forward (a), and the others wait."
    assert drawn.duration == pytest.approx(0.6)
    told = {(s.track, s.name): s.duration for s in drawn.spans}
    assert told["rank 1/compute", "lost in forward (a)"] == pytest.approx(0.2)
    assert told["rank 0/compute", "waiting"] == pytest.approx(0.2)


def test_a_rank_that_makes_up_for_its_loss_elsewhere_is_not_slow() -> None:
    even, uneven = (iteration({"a": 0.2}, input=0.2),) * 5, (iteration({"a": 0.3}, input=0.1),) * 5
    assert ranks_with(even, uneven).slow == ()


def test_a_few_disturbed_iterations_do_not_make_a_slow_rank() -> None:
    usual, disturbed = iteration({"a": 0.2}), iteration({"a": 0.9})
    assert ranks_with((usual,) * 10, (usual,) * 7 + (disturbed,) * 3).slow == ()


def test_a_slow_link_costs_what_is_not_hidden_and_is_named_with_its_rank() -> None:
    found = ranks_with(*((iteration({"a": 0.2}, waiting=0.1),) * 5,) * 3)
    (slow,) = stragglers.slow_links(found, [1e-3, 4e-3, 1e-3], probe=1000, gradients=15_000)
    assert (slow.rank, slow.phase, slow.layer) == (1, "network", stragglers.LINK)
    assert slow.seconds == pytest.approx(3e-6 * 2 * 2 / 3 * 15_000)
    (slow,) = stragglers.slow_links(found, [1e-3, 4e-3, 1e-3], probe=1000, gradients=10**9)
    assert slow.seconds == pytest.approx(0.1)
    assert str(slow) == "rank 1 is slow: 100 ms a step, in network (its link)"
    assert stragglers.slow_links(found, [1e-3, 1.2e-3, 1e-3], probe=1000, gradients=10**9) == ()
    assert stragglers.slow_links(found, [], probe=1000, gradients=10**9) == ()


def test_too_few_iterations_or_ranks_tell_nothing() -> None:
    fast, slow = iteration({"a": 0.1}), iteration({"a": 0.9})
    assert ranks_with((fast,) * 3, (slow,) * 3).lines() == []
    assert ranks_with((slow,) * 9).lines() == []


def test_columns_that_only_some_iterations_have_are_compared_all_the_same() -> None:
    fast = (iteration({"a": 0.1}), *(iteration({"a": 0.1, "b": 0.1}),) * 5)
    slow = (iteration({"a": 0.1}), *(iteration({"a": 0.1, "b": 0.3}),) * 5)
    (found,) = ranks_with(fast, slow).slow
    assert (found.rank, found.layer) == (1, "b")


@given(st.lists(st.floats(0, 1), min_size=3, max_size=12), st.floats(0, 5))
def test_times_of_forward_add_up(spent: list[float], start: float) -> None:
    """One layer inside another inside the root, for as long as the drawn times say."""
    at = [start + sum(spent[:n]) for n in range(len(spent) + 1)]
    visits: list[LayerVisit] = [("", True, at[0]), ("block", True, at[1])]
    for n in range(2, len(at) - 1):
        visits += [("block.layer", True, at[n - 1]), ("block.layer", False, at[n])]
    visits += [("block", False, at[-2]), ("", False, at[-1])]
    found = rank_times.forward_by_layer(visits)
    assert sum(found.values()) == pytest.approx(at[-1] - at[0])
    assert found[""] == pytest.approx(spent[0] + spent[-1])
    waited = rank_times.forward_by_layer(visits, [(at[1], at[2])])
    assert sum(waited.values()) == pytest.approx(at[-1] - at[0] - spent[1])


@given(st.lists(st.tuples(st.sampled_from(["output", "ready", "handed"]), st.sampled_from("abc"), st.floats(0, 9))))
def test_times_of_backward_add_up(drawn: list[GradientMark]) -> None:
    spent, handing, last = rank_times.backward_by_layer(1.0, drawn)
    assert sum(spent.values()) + handing == pytest.approx(last - 1.0)
    assert last == max([1.0, *(at for *_, at in drawn)])


def test_a_layer_has_the_time_from_its_outputs_gradient_to_the_next_layers() -> None:
    marks: list[GradientMark] = [
        ("output", "head", 1.5),
        ("ready", "head", 1.7),
        ("handed", "head", 1.8),
        ("output", "body", 2.0),
        ("ready", "body", 2.5),
    ]
    spent, handing, last = rank_times.backward_by_layer(1.0, marks)
    assert spent == pytest.approx({LOSS: 0.5, "head": 0.4, "body": 0.5})
    assert (handing, last) == pytest.approx((0.1, 2.5))


def test_waiting_is_what_a_rank_did_not_spend_itself() -> None:
    found = rank_times.rank_iteration(
        [("", True, 0.4), ("", False, 0.9)],
        [("ready", "a", 1.5)],
        previous=0.1,
        began=0.3,
        forwarded=1.0,
        computed=1.6,
        ended=2.1,
    )
    assert (found.input, found.network) == pytest.approx((0.2, 0.1))
    assert (dict(found.forward), dict(found.backward)) == (pytest.approx({"": 0.5}), pytest.approx({"a": 0.5}))
    assert found.waiting == pytest.approx(2.0 - 0.2 - 0.5 - 0.5 - 0.1)


def test_a_compiled_model_has_its_forward_as_a_whole() -> None:
    found = rank_times.rank_iteration([], [("ready", "a", 2.0)], previous=0.0, began=0.5, forwarded=1.0, ended=3.0)
    assert dict(found.forward) == {"": 0.5}

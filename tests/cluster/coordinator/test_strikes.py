"""Strikes: a job without progress ends after three of them; a job that makes progress does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.cluster.coordinator import strikes
from dovetail.cluster.coordinator.strikes import CLEAN, LIMIT, LONGEST_PAUSE, MOST_TRIES, Strike, StrikeRecord

iterations = st.integers(0, 1000)
weights = st.sampled_from((0.5, 1.0))


def play(events: list[Strike]) -> tuple[StrikeRecord, int]:
    """The record with all strikes up to the verdict, and how many there were."""
    record = CLEAN
    for count, strike in enumerate(events, 1):
        record = strikes.with_strike(record, strike)
        if strikes.verdict(record):
            return record, count
    return record, len(events)


@given(iterations)
def test_three_strikes_at_the_same_iteration_end_a_job_with_the_last_reason(at: int) -> None:
    record, count = play([Strike(at, f"reason {i}") for i in range(5)])
    assert count == 3
    assert strikes.verdict(record) == "reason 2 (3 times without a new checkpoint)"


@given(st.lists(iterations, min_size=1, max_size=MOST_TRIES - 1, unique=True).map(sorted))
def test_a_job_that_gets_further_each_time_continues(places: list[int]) -> None:
    record, _ = play([Strike(at, "killed") for at in places])
    assert not strikes.verdict(record)
    assert len(record.strikes) == 1


@given(st.lists(st.tuples(iterations, weights), min_size=100, max_size=100))
def test_without_a_checkpoint_every_failing_job_is_given_up_in_the_end(events: list[tuple[int, float]]) -> None:
    record, count = play([Strike(at, "x", weight) for at, weight in events])
    assert count <= MOST_TRIES
    assert strikes.verdict(record)


@given(st.lists(st.tuples(iterations, weights), max_size=50))
def test_a_verdict_needs_the_full_weight_and_nothing_counts_twice(events: list[tuple[int, float]]) -> None:
    record = CLEAN
    for tries, (at, weight) in enumerate(events, 1):
        before = record
        record = strikes.with_strike(record, Strike(at, "x", weight))
        assert record.tries == tries
        assert record.weight <= before.weight + weight
        assert bool(strikes.verdict(record)) == (record.weight >= LIMIT or tries >= MOST_TRIES)
        assert 0.0 < strikes.pause(record) <= LONGEST_PAUSE
        assert strikes.decode(strikes.encode(record)) == record


@given(st.lists(iterations, min_size=2, max_size=8))
def test_pauses_grow_while_a_job_makes_no_progress(places: list[int]) -> None:
    record, last = CLEAN, 0.0
    for at in sorted(places, reverse=True):
        record = strikes.with_strike(record, Strike(at, "x"))
        assert strikes.pause(record) >= last
        last = strikes.pause(record)


def test_a_kill_from_outside_is_half_a_strike_and_every_exit_code_has_a_reason() -> None:
    assert strikes.death("executor 3", -9) == ("executor 3 was killed (out of memory, or from outside)", 0.5)
    assert strikes.death("executor 3", -11) == ("executor 3 died of SIGSEGV", 1.0)
    assert strikes.death("rank 0", 7) == ("rank 0 ended with code 7", 1.0)
    assert strikes.death("rank 0", -200) == ("rank 0 died of signal 200", 1.0)
    assert strikes.decode(strikes.encode(CLEAN)) == CLEAN

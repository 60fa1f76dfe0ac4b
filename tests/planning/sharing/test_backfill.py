"""Reservations: who may pass the first in the queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.planning.sharing.backfill import may_pass, reserve

RUNNING = st.lists(st.tuples(st.integers(1, 9).map(float), st.integers(1, 4)), min_size=1, max_size=5)


def free_at(time: float, free: int, running: list[tuple[float, int]]) -> int:
    return free + sum(devices for end, devices in running if end <= time)


@given(running=RUNNING, free=st.integers(0, 3), data=st.data())
def test_a_reservation_is_the_first_moment_with_enough_devices(
    running: list[tuple[float, int]], free: int, data: st.DataObject
) -> None:
    width = data.draw(st.integers(free + 1, free + sum(d for _, d in running)))
    found = reserve(width, free, running)
    moments = sorted({end for end, _ in running})
    assert found.time == next(t for t in moments if free_at(t, free, running) >= width)
    assert found.spare == free_at(found.time, free, running) - width


@given(running=RUNNING, free=st.integers(1, 4), data=st.data())
def test_whoever_may_pass_leaves_the_first_its_moment_and_nobody_else_does(
    running: list[tuple[float, int]], free: int, data: st.DataObject
) -> None:
    width = data.draw(st.integers(free + 1, free + sum(d for _, d in running)))
    held = reserve(width, free, running)
    mine, end = data.draw(st.integers(1, free)), float(data.draw(st.integers(1, 12)))
    after = reserve(width, free - mine, [*running, (end, mine)])
    assert may_pass(held, mine, end) == (after.time == held.time)

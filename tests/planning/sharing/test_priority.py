"""The orders: which job comes before which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.priority import Standing, chosen, classes, precedence

from .made_shapes import shape


def test_each_order_puts_the_job_it_prefers_first() -> None:
    old = Standing(serial=0, arrival=0.0, total=10, shape=shape(2))
    new = Standing(serial=1, arrival=5.0, total=2, shape=shape(2))
    old.attained, old.turn = 100.0, 9.0
    assert precedence("fifo", old) < precedence("fifo", new)
    for order in ("srpt", "las", "turns"):
        assert precedence(order, new) < precedence(order, old)
    assert precedence("cp", old) < precedence("cp", new)
    assert precedence("queues", new, thresholds=(50.0,)) < precedence("queues", old, thresholds=(50.0,))
    assert precedence("queues", old, thresholds=(500.0,)) < precedence("queues", new, thresholds=(500.0,))
    old.slice_end = 12.0
    assert precedence("turns", old, now=11.0) < precedence("turns", new, now=11.0)
    background = Standing(serial=2, arrival=0.0, total=1, shape=shape(), background=True)
    assert all(precedence(o, background) > precedence(o, old) for o in ("fifo", "srpt", "las"))


def test_a_gang_is_charged_for_the_time_that_it_holds_its_devices() -> None:
    busy = Standing(serial=0, arrival=0.0, total=10, shape=shape(device=1.0))
    waits = Standing(serial=1, arrival=0.0, total=20, shape=shape(device=0.1))  # for input, most of each second
    assert precedence("srpt", waits) < precedence("srpt", busy)
    assert precedence("srsf", busy) < precedence("srsf", waits)


def test_remaining_work_does_not_depend_on_the_present_width() -> None:
    job = Job(name="j", phases=(JobPhase(iterations=10, workers=4, min_workers=1),), forward=1.0)
    full, narrow = (Standing(serial=0, arrival=0.0, total=10, shape=job.shape(0, w)) for w in (4, 1))
    assert precedence("srpt", full) == precedence("srpt", narrow) and precedence("srsf", full) == precedence(
        "srsf", narrow
    )
    assert precedence("cp", narrow) < precedence("cp", full)


def test_a_time_slice_that_is_over_gives_way_to_a_waiting_job() -> None:
    first = Standing(serial=0, arrival=0.0, total=10, shape=shape())
    second = Standing(serial=1, arrival=5.0, total=10, shape=shape())
    first.slice_end = 60.0
    assert precedence("turns", first, now=59.0) < precedence("turns", second, now=59.0)
    assert precedence("turns", second, now=60.0) < precedence("turns", first, now=60.0)
    first.turn, first.slice_end = 60.0, float("-inf")
    assert precedence("turns", second, now=70.0) < precedence("turns", first, now=70.0), (
        "its turn is over until the other's is"
    )


def test_classes_of_attained_service_are_quantiles_of_the_jobs() -> None:
    assert classes(float(i) for i in range(101)) == (50.0, 90.0)
    assert classes([7.0]) == (7.0, 7.0)


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(1, 10))
def test_chosen_gangs_are_the_first_in_the_order_that_fit_side_by_side(widths: list[int], devices: int) -> None:
    took = chosen(list(enumerate(widths)), devices)
    free = devices
    for i, w in enumerate(widths):
        assert (i in took) == (w <= free)
        if w <= free:
            free -= w

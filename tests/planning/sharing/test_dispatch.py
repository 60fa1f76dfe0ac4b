"""Dispatch: which task an idle device takes, and which it leaves to wait."""

from __future__ import annotations

import pytest

from dovetail.core.job import Job, JobPhase, Stage
from dovetail.planning.sharing.dispatch import Resident, pick

from .made_shapes import shape

BASE: tuple[bool, float, float, int] = (False, 0.0, 0.0, 0)


def test_an_idle_device_takes_the_longest_ready_task_of_the_first_job() -> None:
    tasks = Job(
        name="j", phases=(JobPhase(iterations=1, workers=3, depths=(0.2, 0.6, 1.0)),), forward=1.0, backward=1.0
    ).shape()
    first, second = Resident(0, tasks, range(3), BASE), Resident(1, tasks, range(3), (False, 1.0, 0.0, 1))
    residents = [first, second]
    assert pick(residents, 0, 0.0, "off") is None
    second.release()
    assert pick(residents, 0, 0.0, "off") is second
    first.release()
    assert pick(residents, 0, 0.0, "off") is first
    assert [first.take(d) for d in (0, 1, 2)] == [2, 1, 0]
    assert [first.ended() for _ in range(3)] == [False, False, True]


def test_a_guarded_task_starts_only_if_it_ends_before_the_device_is_wanted() -> None:
    burst = Job(
        name="b", phases=(JobPhase(iterations=1, workers=2),),
        stages=(Stage(seconds=1.0, workers=2), Stage(seconds=2.0, workers=1)), off_device=0.5,
    ).shape()  # fmt: skip
    foreground = Resident(0, burst, (0, 1), BASE)
    foreground.release()
    for d in (0, 1):
        foreground.take(d)
    foreground.eta = 1.0
    assert not foreground.ended() and not foreground.ended()  # the second stage, on device 0 only, is ready
    assert foreground.take(0) == 0
    foreground.eta = 3.0
    assert foreground.wanted(1) == pytest.approx(3.5)
    for seconds, fits in ((2.5, True), (2.6, False)):
        background = Resident(1, shape(device=1.0), (1,), (True, 0.0, 0.0, 1))
        background.place(Job(name="f", phases=(JobPhase(iterations=1, workers=1),), forward=seconds).shape(), (1,))
        background.release()
        assert (pick([foreground, background], 1, 1.0, "background") is background) == fits
        assert pick([foreground, background], 1, 1.0, "off") is background


def test_the_guard_learns_how_long_tasks_of_each_depth_take() -> None:
    """A background job whose tasks outlast its profile is passed over; its other depth is judged by itself."""
    foreground = Resident(0, shape(device=0.5), (0,), BASE)
    foreground.next_release = 1.0
    depths = JobPhase(iterations=1, workers=2, depths=(0.5, 1.0))
    tasks = Job(name="f", phases=(depths,), forward=0.2, backward=0.6).shape()
    background = Resident(1, tasks, (0, 1), (True, 0.0, 0.0, 1))
    background.release()
    assert pick([foreground, background], 0, 0.0, "background") is background
    for _ in range(20):
        background.observe(background.offers(0), 1.2)
    assert background.predicted(background.offers(0)) == pytest.approx(1.2, rel=0.01)
    assert pick([foreground, background], 0, 0.0, "background") is None
    background.take(1)
    assert background.predicted(background.offers(0)) == pytest.approx(0.5), "nothing was seen of this depth"
    assert pick([foreground, background], 0, 0.0, "background") is background

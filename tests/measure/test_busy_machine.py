"""Measuring while other processes keep the processors busy: the estimate holds, and what was lost is said."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dovetail.core.profile import Profile
from dovetail.measure import profile
from dovetail.measure.pass_rounds import CLEAN_PASSES, Moment, Rounds, lost_between, now
from dovetail.measure.passes import Pass


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This thread, and the processes that it starts, share one core: as many others as wanted, however many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other processes that compute without end, each of which has begun to."""
    code = "print('on', flush=True)\nwhile True: pass"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"on\n"
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def measured() -> Profile:
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return profile(nn.Sequential(*layers), torch.randn(32, 256), steps=20, budget=5)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to a core here")
def test_busy_processes_change_the_profile_by_little_and_are_reported() -> None:
    with one_core():
        quiet = measured()
        with busy(2):
            disturbed = measured()
    for batch in (8, 16, 32):
        before = quiet.forward_time(batch) + quiet.backward_time(batch)
        after = disturbed.forward_time(batch) + disturbed.backward_time(batch)
        # With two others on its core a pass takes three times as long. Whoever else is there disturbs both.
        assert before / 2.5 < after < before * 2.5
    for found in (quiet, disturbed):
        totals = [found.forward_time(b) + found.backward_time(b) for b in (8, 16, 32)]
        assert totals == sorted(totals)
        assert 0 < found.noise <= 1 and 0 <= found.lost < 1
    assert disturbed.lost > 0.1


def one_pass(seconds: float) -> Pass:
    return Pass(forward={"a": seconds}, backward={"a": 2 * seconds}, ready={"p": seconds}, outputs={})


def moments(wall: float, processor: float, queued: float | None) -> tuple[Moment, Moment]:
    return Moment(0.0, 0.0, None if queued is None else 0.0), Moment(wall, processor, queued)


@pytest.mark.parametrize(
    ("wall", "processor", "queued", "lost"),
    [
        (3.0, 3.0, 0.0, 0.0),  # ran all the time
        (3.0, 1.0, 2.0, 2.0),  # stood in line
        (3.0, 1.0, 0.0, 0.0),  # slept of its own will
        (3.0, 2.0, 9.0, 1.0),  # many threads stood in line at the same time
        (3.0, 1.0, None, 2.0),  # a kernel that does not say
        (3.0, 4.0, None, 0.0),  # clocks that differ by a tick
    ],
)
def test_lost_is_what_a_thread_could_not_run(wall: float, processor: float, queued: float | None, lost: float) -> None:
    assert lost_between(*moments(wall, processor, queued)) == lost


def test_a_thread_that_sleeps_has_lost_nothing_to_others() -> None:
    begin = now()
    if begin.queued is None:
        pytest.skip("this kernel does not say how long threads stand in line")
    time.sleep(0.2)
    # Waking up may take a while on a loaded machine, but the sleep itself is not lost.
    end = now()
    assert lost_between(begin, end) <= max(0.0, end.wall - begin.wall - 0.2) + 0.02


def test_clean_passes_count_alone_where_there_are_enough() -> None:
    rounds = Rounds(["a"], watched=True)
    for _ in range(CLEAN_PASSES):
        rounds.add(8, one_pass(1.0), *moments(3.0, 3.0, 0.0))
    for _ in range(50):
        rounds.add(8, one_pass(1.3), *moments(3.9, 3.0, 0.9))
    (found,) = rounds.times("a")
    assert (found.forward.median, found.forward.samples) == (1.0, CLEAN_PASSES)
    assert rounds.noise() == pytest.approx(0.0, abs=1e-12)
    assert rounds.lost() == pytest.approx(50 * 0.9 / (50 * 3.9 + CLEAN_PASSES * 3.0))


def test_where_every_pass_was_disturbed_the_noise_says_so() -> None:
    """Repeats that agree are no proof: all read 114 ms where 3.4 would be right."""
    rounds = Rounds(["a"], watched=True)
    for _ in range(20):
        rounds.add(8, one_pass(38e-3), *moments(114e-3, 3.4e-3, 110.6e-3))
    assert rounds.noise() == pytest.approx(1 - 3.4 / 114)
    unwatched = Rounds(["a"], watched=False)
    for _ in range(20):
        unwatched.add(8, one_pass(38e-3), *moments(114e-3, 3.4e-3, 110.6e-3))
    assert unwatched.noise() == pytest.approx(0.0, abs=1e-12) and unwatched.lost() == 0.0


def test_few_rounds_are_doubtful_but_not_called_worthless() -> None:
    rounds = Rounds(["a"], watched=True)
    rounds.add(8, one_pass(38e-3), *moments(114e-3, 3.4e-3, 110.6e-3))
    assert rounds.noise() == 0.5


def test_larger_batches_never_take_less() -> None:
    rounds = Rounds(["a"], watched=False)
    for batch, seconds in ((8, 0.202), (16, 0.237), (32, 0.114)):
        rounds.add(batch, one_pass(seconds), *moments(1.0, 1.0, None))
    assert [t.forward.median for t in rounds.times("a")] == [0.114] * 3

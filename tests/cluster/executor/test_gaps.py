"""Foreground and background jobs on one device: the promise with a clock of the test's own, and real executors."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.cluster.executor import recorder
from dovetail.cluster.executor.gaps import (
    HALF_LIFE,
    LEAST_MARGIN,
    MOST_MARGIN,
    SHRINK,
    TOLERANCE,
    WINDOW,
    LastBackgroundTask,
    Promise,
)
from dovetail.cluster.executor.tenant import Tenant
from dovetail.cluster.transport import messages as m
from dovetail.core.job import Job, JobPhase
from dovetail.planning.sharing.dispatch import Resident, pick
from tests.cluster.executor.fakes import Behaviour
from tests.cluster.executor.harness import NODE, harness, wait

seconds = st.floats(0.0, 2.0, allow_nan=False)


# -- the promise --


@given(st.lists(st.one_of(st.none(), seconds), max_size=60))
def test_a_delay_doubles_the_margin_and_a_clean_gap_shrinks_it_within_limits(events: list[float | None]) -> None:
    promise, now = Promise(0.05, 0.0), 0.0
    for delay in events:
        now += 1.0
        before, paused = promise.margin(now), promise.paused_until
        if delay is None:
            promise.clean(now)
            assert promise.margin(now) == pytest.approx(max(LEAST_MARGIN, before * SHRINK))
        else:
            promise.delayed(now, delay)
            if delay <= TOLERANCE:
                assert promise.margin(now) == before
            elif before * 2 <= MOST_MARGIN:
                assert promise.margin(now) == pytest.approx(before * 2)
            else:
                assert promise.margin(now) == pytest.approx(MOST_MARGIN)
                assert promise.paused_until > max(now, paused - 1e-9)
                assert not promise.allows(now, 1e-9, float("inf")), "no background task for a while"
        assert LEAST_MARGIN <= promise.margin(now) <= MOST_MARGIN + 1e-9


def test_a_margin_that_stops_background_tasks_decays_so_that_they_are_tried_again() -> None:
    """Two delays leave a margin under which no task fits into the gaps: without decay nothing would be learnt again."""
    promise = Promise(0.05, 0.0)
    for now in (1.0, 1.1):
        promise.delayed(now, 0.002)
    assert not promise.allows(1.2, 0.01, 0.04)
    assert promise.allows(1.2 + 2 * HALF_LIFE, 0.01, 0.04)
    assert promise.margin(1e6) == pytest.approx(LEAST_MARGIN)


@settings(max_examples=60)
@given(
    bound=st.sampled_from([0.0, 0.02, 0.05, 0.2]),
    period=st.floats(0.02, 1.0),
    background=st.floats(0.001, 1.0),
    errors=st.lists(st.floats(0.2, 5.0), min_size=20, max_size=60),
)
def test_however_wrong_predictions_are_the_delay_stays_within_the_bound_plus_one_background_task(
    bound: float, period: float, background: float, errors: list[float]
) -> None:
    """A foreground job computes for half its period; background tasks take their predicted seconds times an error."""
    promise, now, delays = Promise(bound, 0.0), 0.0, []
    for error in errors:
        now += period / 2
        wanted = now + period / 2
        while promise.allows(now, background, wanted - now):
            now += background * error
            if now >= wanted:
                break
        if now > wanted:
            promise.delayed(now, now - wanted)
            delays.append((wanted, now))
        elif now > wanted - period / 2:
            promise.clean(now)
        now = max(now, wanted)
    assert promise.delay == pytest.approx(sum(stop - start for start, stop in delays))
    longest = max((stop - start for start, stop in delays), default=0.0)
    for i, (start, _) in enumerate(delays):
        for j in range(i, len(delays)):
            spent = sum(stop - begin for begin, stop in delays[i : j + 1])
            assert spent <= bound * (delays[j][1] - start + WINDOW) + longest + 1e-6
    assert promise.delay <= bound * (now + WINDOW) + longest + 1e-6


@given(period=st.floats(0.1, 1.0), share=st.floats(0.05, 0.9), background=st.floats(0.001, 0.05))
def test_where_predictions_hold_every_gap_is_filled_as_far_as_background_tasks_fit(
    period: float, share: float, background: float
) -> None:
    promise, now, filled, gap = Promise(0.05, 0.0), 0.0, 0.0, period * share
    for _ in range(50):
        now += period - gap
        wanted = now + gap
        while promise.allows(now, background, wanted - now):
            now, filled = now + background, filled + background
        assert now <= wanted
        now = wanted
    assert promise.delay == 0 and promise.margin(now) == LEAST_MARGIN
    assert filled >= 50 * (gap - background * LEAST_MARGIN) - 1e-6


def test_a_delay_is_the_part_of_a_background_task_during_which_the_job_had_ready_tasks() -> None:
    last = LastBackgroundTask(start=10.0, stop=12.0, count=1)
    assert last.overlap(11.0, 15.0) == 1.0 and last.overlap(12.5, 13.0) == 0.0 and last.overlap(9.0, 9.5) == 0.0


# -- the same decisions as in the simulator --


def released(iteration: int, seconds: tuple[float, ...], *, at: float) -> list[m.Message]:
    """An iteration of tasks of depth 1, 2, …"""
    tasks = [m.Task(iteration=iteration, worker=w, depth=w + 1, seconds=s) for w, s in enumerate(seconds)]
    return [m.Offered(iteration=iteration, tasks=tuple(tasks)), m.Released(iteration=iteration, at=at)]


def lease(job: int, *, background: bool = False, foreground: bool = False) -> m.GrantLease:
    return m.GrantLease(
        job=str(job),
        attempt=1,
        aggregator=("", 0),
        node=NODE,
        folder="",
        priority=(background, float(job), 0.0, job),
        foreground=foreground,
    )


@settings(max_examples=100)
@given(
    jobs=st.lists(
        st.tuples(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=4), st.floats(0.0, 2.0), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    moves=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["release", "take", "end"])), max_size=40),
)
def test_a_tenant_is_picked_just_as_the_simulators_resident_is(
    jobs: list[tuple[list[float], float, bool]], moves: list[tuple[int, str]]
) -> None:
    """The same events, as calls to Resident and as an aggregator's messages to Tenant, give the same picks."""
    pairs = []
    for i, (tasks, off_device, background) in enumerate(sorted(jobs, key=lambda j: j[2])):
        longest = max(tasks)
        phase = JobPhase(iterations=9, workers=len(tasks), depths=tuple(sorted(t / longest for t in tasks)))
        shape = Job(name="j", phases=(phase,), backward=longest, off_device=off_device).shape()
        plain = Resident(i, shape, (0,), (background, float(i), 0.0, i))
        tenant = Tenant(lease(i, background=background), 0, LastBackgroundTask(), node=NODE)
        tenant.hear(m.Welcome(memory="x"), 0.0)
        tenant._off_device = off_device
        plain.next_release = float("inf")
        pairs.append((plain, tenant))
    now, iteration, running = 100.0, [0] * len(pairs), [list[float]() for _ in pairs]
    for which, move in moves:
        which %= len(pairs)
        plain, tenant = pairs[which]
        seconds = plain.shape.tasks[0]
        now += 0.25
        if move == "release" and not plain.left:
            plain.release()
            for message in released(iteration[which], seconds, at=now):
                tenant.hear(message, now)
        elif move == "take" and plain.ready:
            worker = plain.take(0)
            plain.eta = max(plain.eta, now + seconds[worker])
            running[which].append(now + seconds[worker])
            until = max(running[which])
            tenant.hear(m.Taken(iteration=iteration[which], workers=(worker,), until=until, at=now), now)
        elif move == "end" and running[which]:
            running[which].pop()
            if plain.ended():
                plain.next_release = now + plain.shape.off_device
                tenant.hear(m.Barrier(iteration=iteration[which], until=plain.next_release, at=now), now)
                iteration[which] += 1
            elif running[which]:
                plain.eta = max(running[which])
        ready = [plain.ready == tenant.ready for plain, tenant in pairs]
        assert all(ready)
        late = [p.wanted(0) <= now and not p.ready for p, _ in pairs]
        if any(late):  # the simulator's jobs are never late; a tenant may be, and then background tasks may start
            continue
        for guard in ("off", "background", "all"):
            theirs = pick([p for p, _ in pairs], 0, now, guard)
            ours = pick([r for _, r in pairs], 0, now, guard)
            assert (theirs and theirs.key) == (ours and pairs[[r for _, r in pairs].index(ours)][0].key)


def test_predictions_are_learnt_by_depth_and_unknown_ones_run_once() -> None:
    tenant = Tenant(lease(1), 0, LastBackgroundTask(), node=NODE)
    tenant.hear(m.Welcome(memory="x"), 0.0)
    for message in released(0, (0.0, 0.0), at=1.0):
        tenant.hear(message, 1.0)
    assert tenant.predicted(tenant.offers(0)) < 1e-6
    for i, (depth, took) in enumerate([(2, 0.4), (1, 0.1)] * 20):
        tenant.assigned = m.Task(iteration=0, worker=depth - 1, depth=depth, seconds=0.3 * i)
        _, profiled = tenant.begin(1.0)
        tenant.observe(profiled, took)
    for message in released(1, (7.0, 9.0), at=2.0):
        tenant.hear(message, 2.0)
    assert tenant.predicted(tenant.offers(0)) == pytest.approx(0.4, rel=0.05)
    tenant.hear(m.Taken(iteration=1, workers=(1,), until=3.0, at=2.0), 2.0)
    assert tenant.predicted(tenant.offers(0)) == pytest.approx(0.1, rel=0.05)
    assert len(tenant.learnt) == 2, "what is learnt grows with depths, not with tasks"


def test_a_job_on_another_machine_has_another_clock() -> None:
    tenant = Tenant(lease(1), 0, LastBackgroundTask(), node="elsewhere")
    tenant.hear(m.Welcome(memory=""), 50.0)
    for message in released(0, (1.0,), at=1000.0):
        tenant.hear(message, 50.2)
    tenant.hear(m.Taken(iteration=0, workers=(0,), until=1001.5, at=1000.5), 50.6)  # this one was quicker
    assert tenant.eta == pytest.approx(51.6)
    tenant.hear(m.Barrier(iteration=0, until=1003.0, at=1002.0), 54.0)  # read late, after a task
    assert tenant.next_release == pytest.approx(53.1)


# -- real executors --


def test_background_tasks_fill_a_foreground_jobs_gaps_and_their_delay_is_reported(tmp_path: Path) -> None:
    """A foreground job of 20 ms in every 220, background tasks of 10 ms. Then its gaps shrink without notice."""
    with harness(tmp_path) as at:
        at.executor()
        promised = at.aggregator("1", Behaviour(iterations=10_000, seconds=(0.02,), off_device=0.2))
        background = at.aggregator("2", Behaviour(iterations=10_000, seconds=(0.01,)))
        at.grant(promised, foreground=True)
        at.grant(background, order=1.0, background=True)
        wait(lambda: promised.iteration > 5, "the foreground job's progress")
        wait(lambda: sum(map(len, background.done.values())) > 20, "full gaps")
        promised.behaviour.off_device, promised.behaviour.believed_off_device = (
            0.013,
            0.04,
        )  # one background task fits, two do not
        at_change = promised.iteration
        wait(lambda: promised.iteration > at_change + 100, "progress with wrong predictions")
        wait(lambda: [b for b in at.coordinator.all(m.Heartbeat) if b.slowdown.get("1", 0) > 0], "a measured slow-down")
        found = recorder.recorded_tasks(at.home)
        assert {t.job for t in found} == {"1", "2"}
        assert all(a.stop <= b.start for a, b in pairwise(found))


def test_a_background_job_has_the_whole_device_while_the_foreground_job_is_lost(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        promised = at.aggregator("1", Behaviour(iterations=10_000, seconds=(0.005,), off_device=0.001))
        background = at.aggregator("2", Behaviour(iterations=10_000, seconds=(0.05,)))
        at.grant(promised, foreground=True)
        wait(lambda: promised.iteration > 5, "the foreground job's progress")
        at.grant(background, order=1.0, background=True)
        wait(lambda: background.joined, "the background job")
        promised.end()
        wait(lambda: len(background.done) > 5, "the background job's progress")

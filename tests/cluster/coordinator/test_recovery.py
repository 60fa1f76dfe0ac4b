"""The coordinator when a process dies: itself, executors, aggregators, machines; and strikes for who caused it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from dovetail.cluster.coordinator import executor_state, strikes
from dovetail.cluster.engines.base import Exit
from dovetail.cluster.job.submission import Options
from dovetail.cluster.transport import messages as m

from .stage import HANG, Stage, play


def test_a_killed_coordinator_continues_where_it_was_and_disturbs_no_job(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        jobs = [s.submit(workers=2, name=f"job-{i}") for i in range(3)]
        for job in jobs[:2]:
            await s.running(job)
        await s.until(lambda: s.live(jobs[2]).connected)
        paused = s.submit()
        s.c.pause(paused)
        before = dict(s.engine.actors)
        leases = {j: s.live(j).devices for j in jobs}
        started = list(s.engine.started)
        for turn in range(2):
            for job in jobs:
                s.aggregator(job).pause = 0.2 * turn + 0.01  # in the second turn, executors connect first
            await s.kill()
            for d in (0, 1):
                s.executor(d).heard.clear()
            await s.open()
            await s.until(lambda: all(s.live(j).connected for j in jobs))
            await asyncio.sleep(0.03)
            assert s.engine.actors == before and s.engine.started == started, f"turn {turn}"
            assert {j: s.live(j).devices for j in jobs} == leases
            assert [x for d in (0, 1) for x in s.executor(d).received(m.RevokeLease)] == []
            assert s.state(paused) == "paused"
        s.aggregator(jobs[0]).finish()
        await s.until(lambda: s.state(jobs[0]) == "finished" and s.state(jobs[2]) == "running")

    play(tmp_path, scene)


def test_what_died_while_the_coordinator_was_dead_is_started_again(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(workers=2)
        await s.running(job)
        await s.kill()
        s.engine.actors[f"aggregator {job}.1"].end()
        s.executor(1).end()
        await s.open()
        await s.running(job)
        assert s.live(job).attempt == 2
        assert s.engine.started.count("executor 1") == 2 and s.engine.started.count("executor 0") == 1
        assert [(x.job, x.attempt) for x in s.executor(0).received(m.RevokeLease)] == [(str(job), 1)]

    play(tmp_path, scene)


def test_after_everything_was_killed_jobs_continue_on_their_devices(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        running = s.submit(workers=2)
        await s.running(running)
        waiting = s.submit(share="foreground", workers=2)
        await s.until(lambda: s.live(waiting).connected)
        lease = s.live(running).devices
        await s.kill()
        for actor in list(s.engine.actors.values()):
            actor.end()
        await s.open()
        await s.running(running)
        assert (s.live(running).devices, s.live(running).attempt) == (lease, 2)
        await s.until(lambda: s.state(waiting) == "preparing" and s.live(waiting).connected)

    play(tmp_path, scene)


def test_an_aggregator_that_dies_is_started_from_its_checkpoint_three_times_at_most(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job, other = s.submit(workers=2), s.submit(workers=2)
        for attempt in (1, 2):
            await s.running(job)
            assert s.live(job).attempt == attempt
            lease = s.live(job).devices
            s.aggregator(job).die(-11)
            await s.until(lambda e=attempt: s.live(job).attempt == e + 1)  # type: ignore[misc]
            assert s.live(job).devices == lease  # kept meanwhile
        await s.running(job)
        s.aggregator(job).progress(5, checkpoint=5)
        await s.until(lambda: s.live(job).record == strikes.CLEAN)  # a checkpoint clears strikes
        for _ in range(3):
            await s.running(job)
            s.aggregator(job).die(-11)
            await s.until(lambda: job not in s.c.jobs or not s.live(job).process)
        row = s.store.job(job)
        assert row.state == "failed"
        assert row.reason == "its aggregator died of SIGSEGV (3 times without a new checkpoint)"
        assert row.reason in (s.home.job(job) / "log.txt").read_text()
        assert s.state(other) == "running" and s.live(other).attempt == 1  # no other job was disturbed

    play(tmp_path, scene)


def test_a_failed_job_has_the_reason_that_its_aggregator_sent(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        wrong, raising = s.submit(), s.submit()
        await s.running(wrong)
        s.aggregator(wrong).fail("loss is nan at iteration 7", fatal=True)
        await s.until(lambda: s.state(wrong) == "failed")
        assert s.store.job(wrong).reason == "loss is nan at iteration 7"
        for _ in range(3):
            await s.running(raising)
            s.aggregator(raising).fail("ValueError: no")
            attempt = s.live(raising).attempt
            await s.until(lambda e=attempt: raising not in s.c.jobs or s.live(raising).attempt > e)  # type: ignore[misc]
        assert s.store.job(raising).reason == "ValueError: no (3 times without a new checkpoint)"
        await s.until(lambda: not [k for k in s.engine.actors if k.startswith("aggregator")])

    play(tmp_path, scene)


def test_an_executor_that_dies_is_started_again_and_its_running_job_gets_a_strike(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        culprit, other = s.submit(workers=2), s.submit(workers=2)
        await s.running(culprit)
        await s.running(other)
        for turn in range(3):
            s.home.running_file(1).write_bytes(str(culprit).encode().ljust(128, b"\0"))
            s.executor(1).die(-11)
            await s.until(lambda t=turn: s.engine.started.count("executor 1") == t + 2)  # type: ignore[misc]
            await s.running(other)
            if turn < 2:
                await s.running(culprit)
        assert s.store.job(culprit).reason == "executor 1 died of SIGSEGV (3 times without a new checkpoint)"
        assert s.live(other).record == strikes.CLEAN and s.live(other).attempt == 1
        assert s.engine.started.count("executor 0") == 1

    play(tmp_path, scene)


def test_an_endless_task_ends_its_executor_and_gives_its_job_a_strike(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(options=Options(task_timeout=HANG))
        await s.running(job)
        [d] = s.live(job).devices
        s.executor(d).say(m.Heartbeat(running=str(job), since=1.0))
        await asyncio.sleep(0.4)
        assert s.engine.started.count(f"executor {d}") == 1
        s.executor(d).say(m.Heartbeat(running=str(job), since=HANG + 0.1))
        await s.until(lambda: s.engine.started.count(f"executor {d}") == 2)
        assert [x.reason for x in s.live(job).record.strikes] == [f"a task ran for more than {HANG:g} s"]
        await s.running(job)

    play(tmp_path, scene)


def test_a_task_that_goes_on_long_after_its_job_was_cancelled_ends_its_executor(
    tmp_path: Path,
) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(options=Options(task_timeout=HANG))
        await s.running(job)
        [d] = s.live(job).devices
        s.c.cancel(job)
        await s.until(lambda: s.state(job) == "cancelled")
        s.executor(d).say(m.Heartbeat(running=str(job), since=1.0))
        await asyncio.sleep(0.4)
        assert s.engine.started.count(f"executor {d}") == 1, "it may be just about to end"
        s.executor(d).say(m.Heartbeat(running=str(job), since=HANG + 0.1))
        await s.until(lambda: s.engine.started.count(f"executor {d}") == 2)

    play(tmp_path, scene)


def test_two_endless_tasks_at_a_jobs_last_strike_end_the_job_and_nothing_else(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(workers=2, options=Options(task_timeout=HANG))
        await s.running(job)
        for _ in range(2):
            s.live(job).record = strikes.with_strike(s.live(job).record, strikes.Strike(0, "before", 1.0))
        for d in s.live(job).devices:  # both are found in one check
            s.executor(d).say(m.Heartbeat(running=str(job), since=HANG + 0.1))
        await s.until(lambda: s.state(job) == "failed")
        other = s.submit()
        await s.running(other)

    play(tmp_path, scene)


def test_a_gang_survives_the_coordinator_and_is_repeated_after_an_executor(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(kind="gang", gang=2)
        await s.until(lambda: str(job) in s.executor(0).ranks and str(job) in s.executor(1).ranks)
        await s.kill()
        with contextlib.suppress(KeyError):
            s.executor(0).rank_ends(job, 0)  # while no coordinator runs; it is sent to the next one
        await s.open()
        await s.until(lambda: s.live(job).exit_codes == {s.live(job).devices.index(0): 0})
        assert s.live(job).attempt == 1 and s.executor(0).received(m.StartRank)[1:] == []
        s.executor(1).die(-9)
        await s.until(lambda: len(s.executor(0).ranks) == 1 and s.executor(0).ranks[str(job)].attempt == 2)
        await s.until(lambda: str(job) in s.executor(1).ranks)
        for d in (0, 1):
            s.executor(d).rank_ends(job, 0)
        await s.until(lambda: s.state(job) == "finished")

    play(tmp_path, scene)


def test_jobs_of_a_lost_device_are_placed_elsewhere(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(workers=2)
        await s.running(job)
        node = set(s.live(job).devices)
        assert node in ({0, 1}, {2, 3})  # one node
        lost = min(node)
        s.engine.broken.add(f"executor {lost}")
        s.engine.actors[f"executor {lost}"].end()
        s.engine.ended.put_nowait(Exit(key=f"executor {lost}", code=-9, node_lost=True))
        await s.until(lambda: not set(s.live(job).devices) & {lost})
        await s.running(job)
        assert s.live(job).attempt == 1 and len(s.live(job).devices) == 2
        assert s.store.leases(open_only=True)[0].devices == s.live(job).devices

    play(tmp_path, scene, devices=4, nodes=2, lost_limit=0.2)


def test_a_process_that_the_engine_could_not_start_is_started_again(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        s.engine.broken.add("aggregator 1")
        job = s.submit()
        await s.until(lambda: bool(s.live(job).record.strikes))
        s.engine.broken.clear()
        await s.running(job)

    play(tmp_path, scene)


def test_an_executor_that_falls_silent_is_ended_and_its_job_gets_a_strike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit()
        await s.running(job)
        [d] = s.live(job).devices
        s.home.running_file(d).write_bytes(str(job).encode().ljust(128, b"\0"))
        monkeypatch.setattr(executor_state, "HEARTBEAT_LIMIT", 0.5)
        await s.until(lambda: s.engine.started.count(f"executor {d}") >= 2)
        monkeypatch.setattr(executor_state, "HEARTBEAT_LIMIT", HANG)
        assert [x.reason for x in s.live(job).record.strikes] == [f"executor {d} fell silent in its task"]
        await s.running(job)

    play(tmp_path, scene, devices=1)

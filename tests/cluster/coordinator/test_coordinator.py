"""The coordinator: a job from its submission to its end, with a real store and real connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dovetail.cluster.coordinator import strikes
from dovetail.cluster.engines.base import ClusterDevice
from dovetail.cluster.transport import messages as m
from dovetail.core.errors import Error

from .stage import HANG, Stage, play


def test_a_job_is_prepared_placed_served_and_ends(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(workers=2, name="first")
        await s.running(job)
        assert s.state(job) == "running"
        assert (s.home.job(job) / "job.py").read_text() == "job"
        assert sorted(s.live(job).devices) == [0, 1]
        lease = s.executor(0).leases[str(job)]
        assert (lease.attempt, lease.aggregator, lease.foreground, lease.exclusive) == (
            1,
            ("127.0.0.1", 9),
            False,
            False,
        )
        assert lease.folder == str(s.home.job(job))
        s.aggregator(job).progress(3, task_seconds=(0.1, 0.1), off_device=0.3, iteration_seconds=0.5)
        await s.until(lambda: s.live(job).iteration == 3)
        assert s.live(job).slowdown == pytest.approx(0.25)
        assert s.live(job).shape.duty == pytest.approx(0.25)  # its lease has the measured shape
        s.aggregator(job).finish()
        await s.until(lambda: job not in s.c.jobs and not s.executor(0).leases and not s.executor(1).leases)
        row = s.store.job(job)
        assert (row.state, row.iteration, row.loss, row.checkpoint) == ("finished", 10, 0.5, 10)
        assert s.store.leases(open_only=True) == []
        assert not s.c.placement or not s.c.placement.books.residencies

    play(tmp_path, scene)


def test_many_waiting_jobs_cost_sixteen_aggregators(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        jobs = [s.submit() for _ in range(60)]
        await s.until(lambda: sum(s.state(j) == "running" for j in jobs) == 2)
        await s.until(lambda: sum(s.state(j) == "preparing" for j in jobs) == 16)
        await asyncio.sleep(0.05)
        assert len([k for k in s.engine.actors if k.startswith("aggregator")]) == 18
        # A device takes two jobs of full duty: those that came first.
        assert [s.state(j) for j in jobs[:2]] == ["running", "running"]

    play(tmp_path, scene, devices=1)


def test_pause_lets_a_job_leave_with_a_checkpoint_and_resume_brings_it_back(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(workers=2)
        await s.running(job)
        aggregator = s.aggregator(job)
        s.c.pause(job)
        assert s.state(job) == "paused"  # on disk before the aggregator is asked to stop
        await s.until(lambda: not s.live(job).process and not s.executor(0).leases)
        assert aggregator.received(m.StopJob)[0].discard is False
        with pytest.raises(Error, match="is paused already"):
            s.c.pause(job)
        await asyncio.sleep(0.03)
        assert s.live(job).attempt == 1 and s.live(job).record == strikes.CLEAN
        s.c.resume(job)
        await s.running(job)
        assert s.live(job).attempt == 2
        with pytest.raises(Error, match="is running, only a paused job can be resumed"):
            s.c.resume(job)
        s.c.pause(job)
        s.c.resume(job)  # before it has left
        await s.until(lambda: s.live(job).attempt == 3)
        await s.running(job)

    play(tmp_path, scene)


def test_a_job_can_be_cancelled_in_every_state_and_only_once(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        running, waiting = [s.submit(workers=2) for _ in range(2)], s.submit(workers=2)
        for job in running:
            await s.running(job)
        await s.until(lambda: s.live(waiting).connected)
        paused, gang = s.submit(), s.submit(kind="gang", gang=9)
        s.c.pause(paused)
        for job in (running[0], waiting, paused, gang):
            s.c.cancel(job)
            assert s.state(job) == "cancelled"
            with pytest.raises(Error, match="has been cancelled already"):
                s.c.cancel(job)
        await s.until(lambda: [k for k in s.engine.actors if k[0] == "a"] == [f"aggregator {running[1]}.1"])
        await s.until(lambda: list(s.executor(0).leases) == [str(running[1])])
        with pytest.raises(Error, match="there is none of that number"):
            s.c.cancel(999)

    play(tmp_path, scene)


def test_a_gang_runs_its_ranks_all_at_once_and_again_if_one_fails(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit(kind="gang", gang=2, arguments=("--lr", "1"))
        await s.until(lambda: str(job) in s.executor(0).ranks and str(job) in s.executor(1).ranks)
        ranks = sorted((s.executor(d).ranks[str(job)] for d in (0, 1)), key=lambda r: r.worker)
        assert [r.environment["RANK"] for r in ranks] == ["0", "1"]
        assert {r.environment["WORLD_SIZE"] for r in ranks} == {"2"}
        assert len({(r.environment["MASTER_ADDR"], r.environment["MASTER_PORT"]) for r in ranks}) == 1
        assert ranks[0].argv[1:] == (str(s.home.job(job) / "job.py"), "--lr", "1")
        assert "DOVETAIL_HOME" not in ranks[0].environment and "PATH" in ranks[0].environment
        s.executor(0).rank_ends(job, 0)
        s.executor(1).rank_ends(job, 3, "Traceback\nValueError: no")
        await s.until(lambda: all(s.executor(d).ranks[str(job)].attempt == 2 for d in (0, 1) if s.executor(d).ranks))
        await s.until(lambda: len(s.executor(0).ranks) == len(s.executor(1).ranks) == 1)
        assert s.live(job).record.strikes[0].reason == "rank 1 ended with code 3: ValueError: no"
        other = s.submit(workers=1)  # a gang shares its devices with background jobs only
        await s.until(lambda: s.live(other).connected)
        assert not s.live(other).devices
        s.executor(0).rank_ends(job, 0)
        s.executor(1).rank_ends(job, 0)
        await s.until(lambda: s.state(job) == "finished" and s.state(other) == "running")

    play(tmp_path, scene)


def test_down_lets_running_jobs_write_checkpoints_and_keeps_their_state(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        running = s.submit(workers=2)
        await s.running(running)
        aggregator = s.aggregator(running)
        await s.c.down(HANG)
        assert aggregator.received(m.StopJob)[0].discard is False and aggregator.key not in s.engine.actors
        assert s.engine.stopped
        assert s.state(running) == "running" and s.live(running).record == strikes.CLEAN
        assert not s.store.leases(open_only=True), "no job has a lease of a cluster that is down"

    play(tmp_path, scene)


def test_down_waits_for_executors_to_end_and_gives_no_strike_to_a_gang_that_it_ends(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        gang = s.submit(kind="gang", gang=2)
        await s.until(lambda: s.executor(0).ranks and s.executor(1).ranks)
        executors = [s.executor(0), s.executor(1)]
        await s.c.down(HANG)
        assert all(e.received(m.Shutdown) and not e.ranks for e in executors)
        assert s.engine.stopped
        assert s.state(gang) == "running" and s.live(gang).record == strikes.CLEAN

    play(tmp_path, scene)


def test_processes_with_a_wrong_key_job_or_attempt_are_refused(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        job = s.submit()
        await s.running(job)
        aggregator = s.aggregator(job)
        for settings, key in (({"attempt": 7}, ""), ({"job": "99"}, ""), ({"job": "../x"}, ""), ({}, "guessed")):
            s.engine.key = key
            ghost = type(aggregator)(s.engine, "ghost", aggregator.settings | settings)
            ghost.obey = lambda message: None  # type: ignore[method-assign]
            await s.until(lambda g=ghost: g.received(m.Refusal))  # type: ignore[misc]
            ghost.end()
        s.engine.key = ""
        stranger = type(s.executor(0))(s.engine, "stranger", s.executor(0).settings | {"device": 77})
        await s.until(lambda: stranger.received(m.Refusal))
        stranger.end()
        assert s.aggregator(job) is aggregator and s.live(job).connected

    play(tmp_path, scene)


def test_the_baseline_runs_on_the_same_executors_with_devices_of_their_own(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        jobs = [s.submit(workers=2), s.submit(workers=1), s.submit(workers=1)]
        await s.running(jobs[0])
        await s.until(lambda: all(s.live(j).connected for j in jobs))
        assert s.executor(0).leases[str(jobs[0])].exclusive
        assert [bool(s.live(j).devices) for j in jobs] == [True, False, False]
        s.aggregator(jobs[0]).finish()
        for job in jobs[1:]:
            await s.running(job)
        assert set(s.live(jobs[1]).devices) != set(s.live(jobs[2]).devices)

    play(tmp_path, scene, policy="gang-fifo-backfill")


def test_devices_of_machines_that_join_are_used(tmp_path: Path) -> None:
    async def scene(s: Stage) -> None:
        jobs = [s.submit() for _ in range(4)]
        for job in jobs[:2]:
            await s.running(job)
        await s.until(lambda: all(s.live(j).connected for j in jobs))
        assert not s.live(jobs[2]).devices  # the one device takes two jobs of full duty
        s.engine._devices.append(ClusterDevice(1, "another", "emulated", 2**34))
        s.c.grow(await s.engine.devices())
        s.c.grow(await s.engine.devices())
        for job in jobs[2:]:
            await s.running(job)
            assert s.live(job).devices == (1,)
        assert [s.live(j).devices for j in jobs[:2]] == [(0,), (0,)]
        assert s.engine.started.count("executor 0") == s.engine.started.count("executor 1") == 1

    play(tmp_path, scene, devices=1)

"""A simulated run, recorded in the cluster's own format, is predicted as it was."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cli.cluster import replay as run
from dovetail.cluster.coordinator.job_store import Store
from dovetail.cluster.executor.recorder import ClockLine, LeaseLine, TaskLine, lines
from dovetail.cluster.home import Home, Settings
from dovetail.cluster.job.submission import Submission
from dovetail.cluster.replay import folded, play, read, replay
from dovetail.cluster.transport.messages import Described
from dovetail.core.errors import Error
from dovetail.core.job import Job, JobPhase, TaskRun, ladder
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import policy
from dovetail.simulate.cluster import EXACT, simulate

ARRIVAL = 1_700_000_000.0
"""time.time() when the first job arrives."""
SHIFT = 5000.0
"""time.monotonic() of the machine at that time."""
DEVICES = 4


def jobs() -> list[Job]:
    shapes = [(4, 12, 0.05, 0.1, 0.02), (2, 30, 0.03, 0.06, 0.01), (1, 40, 0.02, 0.03, 0.05), (3, 15, 0.06, 0.1, 0.0)]
    return [
        Job(
            name=f"job {i}",
            arrival=0.1 * i,
            phases=(JobPhase(iterations=n, workers=k, depths=ladder(k) if i % 2 else ()),),
            forward=f,
            backward=b,
            off_device=s,
            persistent_bytes=2**30,
            ephemeral_bytes=2**30,
        )
        for i, (k, n, f, b, s) in enumerate([*shapes, *shapes])
    ]


def recorded(folder: Path, made: list[Job], name: str) -> float:
    """Writes store, settings and spans of a run that went exactly as simulated. Returns its makespan."""
    outcome = simulate(made, ClusterSize(devices=DEVICES), policy(name), level="task", overheads=EXACT, record=True)
    home = Home(folder)
    home.create()
    home.write_settings(Settings(devices=DEVICES, emulated=True, policy=name))
    store = Store(home.database)
    finish = {job.name: float(end) for job, end in zip(outcome.jobs, outcome.finish, strict=True)}
    numbers: dict[str, int] = {}
    for job in made:
        row = store.submit(Submission(text="x", share="background" if job.background else "normal"))
        numbers[job.name] = row.id
        store.lease(row.id, [0])
        store.move(row.id, "finished")
        described = Described(
            job=str(row.id),
            attempt=1,
            workers=job.workers,
            iterations=job.iterations,
            off_device=job.off_device,
            persistent_bytes=job.persistent_bytes,
            ephemeral_bytes=job.ephemeral_bytes,
        )
        times = {"submitted": ARRIVAL + job.arrival, "ended": ARRIVAL + finish[job.name]}
        store.note({row.id: {**times, "described": msgspec.json.encode(described).decode()}})
    store.close()
    written: list[ClockLine | TaskLine | LeaseLine] = [
        ClockLine(device=0, node="a", boot="1", offset=ARRIVAL - SHIFT, emulated=True)
    ]
    released = {(j.name, 0): j.arrival for j in made}
    last: dict[tuple[str, int], float] = {}
    for t in outcome.tasks:
        last[t.job, t.iteration] = max(t.stop, last.get((t.job, t.iteration), 0.0))
    off = {j.name: j.off_device for j in made}
    released |= {(name, i + 1): stop + off[name] for (name, i), stop in last.items()}
    free = dict.fromkeys(range(DEVICES), 0.0)
    for t in sorted(outcome.tasks, key=lambda t: t.start):
        written.append(ran(t, numbers[t.job], released[t.job, t.iteration], free[t.device]))
        free[t.device] = t.stop
    (home.spans / "device-0.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(written) + b'{"type":"task","jo')
    return outcome.makespan


def ran(task: TaskRun, number: int, released: float, free: float) -> TaskLine:
    ready = max(released, free)
    return TaskLine(
        job=str(number),
        iteration=task.iteration,
        worker=task.worker,
        device=task.device,
        start=SHIFT + task.start,
        stop=SHIFT + task.stop,
        overhead=task.start - ready if task.start - ready < 1e-6 else -1.0,
        waited=max(0.0, task.start - released),
    )


@pytest.mark.parametrize("name", ["jigsaw", "gang-fifo-backfill"])
def test_a_run_is_predicted_as_it_was(tmp_path: Path, name: str) -> None:
    makespan = recorded(tmp_path, jobs(), name)
    found = replay(tmp_path)
    assert found.policy == name and found.run.emulated
    assert found.comparison.measured == pytest.approx(makespan, abs=1e-3)
    assert found.comparison.predicted == pytest.approx(makespan, rel=0.01)
    assert found.comparison.error == pytest.approx(0.0, abs=0.01)
    predicted, measured = found.comparison.by_kind["task"]
    assert predicted == pytest.approx(measured, rel=1e-3)
    for r, job in zip(found.run.jobs, jobs(), strict=True):
        assert (r.job.workers, r.job.iterations) == (job.workers, job.iterations)
        assert r.job.shape().work == pytest.approx(job.shape().work, rel=1e-3)
        assert r.job.off_device == pytest.approx(job.off_device, abs=1e-3)


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=20), st.integers(1, 8))
def test_workers_beyond_the_number_of_devices_are_merged_without_losing_time(seconds: list[float], most: int) -> None:
    found = folded(seconds, most)
    assert len(found) == min(len(seconds), most) and sum(found) == pytest.approx(sum(seconds), abs=1e-4)
    assert max(found) <= sum(seconds) / most + max(seconds) + 1e-4


def test_a_job_of_more_workers_than_devices_is_replayed(tmp_path: Path) -> None:
    recorded(tmp_path, jobs(), "jigsaw")
    settings = Home(tmp_path).settings()
    Home(tmp_path).write_settings(msgspec.structs.replace(settings, devices=2))
    run = read(tmp_path)
    assert max(r.job.workers for r in run.jobs) == 2
    assert play(run).comparison.predicted > 0


def test_a_background_job_stays_one(tmp_path: Path) -> None:
    made = [msgspec.structs.replace(j, background=not i) for i, j in enumerate(jobs()[:2])]
    recorded(tmp_path, made, "jigsaw")
    assert [r.job.background for r in replay(tmp_path).run.jobs] == [True, False]


def test_another_policy_is_predicted_on_the_same_run_and_a_later_start_leaves_jobs_out(tmp_path: Path) -> None:
    recorded(tmp_path, jobs(), "gang-fifo-backfill")
    run = read(tmp_path)
    assert play(run, policy="jigsaw").comparison.predicted < 0.95 * play(run).comparison.predicted
    late = read(tmp_path, since=ARRIVAL + 0.35)
    assert [r.id for r in late.jobs] == [5, 6, 7, 8]
    assert min(r.job.arrival for r in late.jobs) == 0.0


def test_a_gang_is_one_long_task_that_shares_its_devices_with_no_job(tmp_path: Path) -> None:
    recorded(tmp_path, jobs()[:1], "jigsaw")
    store = Store(Home(tmp_path).database)
    row = store.submit(Submission(text="x", kind="gang", gang=2))
    store.lease(row.id, [0, 1])
    store.move(row.id, "finished")
    store.note({row.id: {"submitted": ARRIVAL, "ended": ARRIVAL + 9.0}})
    store.close()
    held = [LeaseLine(job=str(row.id), device=d, start=SHIFT + 1.0, stop=SHIFT + 9.0) for d in (0, 1)]
    with (tmp_path / "spans" / "device-1.jsonl").open("wb") as file:
        clock = ClockLine(device=1, node="a", boot="1", offset=ARRIVAL - SHIFT, emulated=True)
        file.write(msgspec.json.Encoder().encode_lines([clock, *held]))
    gang = read(tmp_path).jobs[-1].job
    assert gang.workers == 2 and gang.alone() == pytest.approx(8.0, abs=1e-3)
    assert gang.persistent_bytes == read(tmp_path).cluster.device_bytes


def test_waiting_for_another_jobs_loading_is_not_time_off_the_device(tmp_path: Path) -> None:
    """Loading is not recorded as a task, so a task that waited for it looks as if it had been released at its start."""
    (job,) = made = jobs()[2:3]
    recorded(tmp_path, made, "jigsaw")
    spans = tmp_path / "spans" / "device-0.jsonl"
    clock, *tasks = [line for line in lines(tmp_path) if not isinstance(line, LeaseLine)]
    late = [
        msgspec.structs.replace(t, start=t.start + 3.0 * i, stop=t.stop + 3.0 * i, overhead=0.0, waited=3.0)
        for i, t in enumerate(tasks, 1)
        if isinstance(t, TaskLine)
    ]
    spans.write_bytes(msgspec.json.Encoder().encode_lines([clock, *late]))
    assert read(tmp_path).jobs[0].job.off_device == pytest.approx(job.off_device, abs=1e-3)
    unknown = [msgspec.structs.replace(t, waited=-1.0) for t in late]
    spans.write_bytes(msgspec.json.Encoder().encode_lines([clock, *unknown]))
    assert read(tmp_path).jobs[0].job.off_device == job.off_device  # as the job declared


def test_a_home_without_a_run_gives_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"expected a cluster's home, with cluster.db in it"):
        replay(tmp_path)
    home = Home(tmp_path)
    home.create()
    home.write_settings(Settings(devices=1))
    Store(home.database).close()
    with pytest.raises(Error, match="expected jobs that have ended and recorded tasks"):
        replay(tmp_path)


def test_the_command_prints_measured_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    makespan = recorded(tmp_path, jobs(), "jigsaw")
    run(policy="gang-fifo-backfill", since=0.0, home=tmp_path, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] == pytest.approx(makespan, abs=1e-3) and found["emulated"]
    assert list(found["predicted"]) == ["jigsaw", "gang-fifo-backfill"]
    run(policy="", since=0.0, home=tmp_path, json=False)
    assert "8 jobs on 4 emulated devices under jigsaw" in capsys.readouterr().out

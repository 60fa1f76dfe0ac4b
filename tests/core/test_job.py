"""Jobs and schedules: stored strictly, and what they say of themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core import files
from dovetail.core.errors import InputError
from dovetail.core.job import Job, JobPhase, Lease, Schedule, Stage, TaskRun, ladder

JOB = Job(
    name="language",
    phases=(JobPhase(iterations=10, workers=4), JobPhase(iterations=6, workers=4, depths=ladder(4))),
    forward=1.0,
    backward=2.0,
    off_device=0.5,
    persistent_bytes=7,
)


def test_a_job_and_a_schedule_come_back_as_they_were_stored(tmp_path: Path) -> None:
    lease = Lease(job="language", devices=(0, 2), start=0.0, stop=3.0)
    task = TaskRun(job="language", iteration=0, worker=1, device=2, start=0.0, stop=1.0)
    schedule = Schedule(policy="jigsaw", source="predicted", devices=4, leases=(lease,), tasks=(task,))
    for noun in (JOB, schedule):
        files.write(tmp_path / "noun.json", noun)
        assert files.read(tmp_path / "noun.json", type(noun)) == noun


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"phases": (JobPhase(iterations=1, workers=3, depths=(0.5, 1.0)),)}, "phases[0].depths"),
        ({"phases": (JobPhase(iterations=1, workers=2, min_workers=3),)}, "phases[0].min_workers"),
        ({"forward": 0.0, "backward": 0.0}, "forward"),
        ({"stages": (Stage(seconds=1.0, workers=2),)}, "phases[0].workers"),
    ],
)
def test_an_impossible_job_is_refused_with_the_name_of_the_field(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    files.write(tmp_path / "job.json", msgspec.structs.replace(JOB, **change))
    with pytest.raises(InputError) as e:
        files.read(tmp_path / "job.json", Job)
    assert e.value.field == field


def test_a_schedule_with_two_tasks_at_once_on_a_device_is_refused(tmp_path: Path) -> None:
    tasks = tuple(TaskRun(job="a", iteration=0, worker=i, device=0, start=i * 0.5, stop=i * 0.5 + 1) for i in (0, 1))
    schedule = Schedule(policy="jigsaw", source="predicted", devices=1, leases=(), tasks=tasks)
    files.write(tmp_path / "schedule.json", schedule)
    with pytest.raises(InputError, match="one at a time"):
        files.read(tmp_path / "schedule.json", Schedule)


@given(k=st.integers(1, 64), f=st.floats(0.01, 10), b=st.floats(0.01, 10), s=st.floats(0, 10))
def test_a_ladder_saves_the_share_of_backward_that_the_closed_form_says(k: int, f: float, b: float, s: float) -> None:
    job = Job(name="j", phases=(JobPhase(iterations=3, workers=k),), forward=f, backward=b, off_device=s)
    shape = job.with_depths("ladder").shape()
    assert shape.work == pytest.approx(k * (f + b) - k * b * (k - 1) / (2 * k))
    assert shape.period == pytest.approx(job.gang_period)
    assert job.alone() == pytest.approx(3 * (f + b + s))
    assert job.with_depths("ladder").with_depths("full") == job


def test_late_partial_depth_keeps_the_iterations_and_makes_the_second_half_cheaper() -> None:
    job = Job(name="j", phases=(JobPhase(iterations=11, workers=4),), forward=1.0, backward=2.0)
    late = job.with_depths("late")
    assert [p.iterations for p in late.phases] == [6, 5] and late.iterations == 11
    assert not late.phases[0].depths and late.phases[1].depths == ladder(4)
    assert job.with_depths("ladder").work() < late.work() < job.work()


def test_a_narrower_iteration_keeps_the_deepest_workers_and_counts_for_less() -> None:
    job = Job(
        name="j",
        phases=(JobPhase(iterations=5, workers=4, min_workers=2, depths=ladder(4)),),
        forward=1.0,
        backward=4.0,
    )
    shape = job.shape(0, 2)
    assert shape.tasks == ((4.0, 5.0),) and shape.progress == 0.5


def test_a_schedule_draws_tasks_where_it_has_them_and_leases_otherwise() -> None:
    lease = Lease(job="a", devices=(0, 1), start=1.0, stop=3.0)
    schedule = Schedule(policy="jigsaw", source="predicted", devices=2, leases=(lease,))
    assert [(s.track, s.kind) for s in schedule.timeline().spans] == [
        ("device 0/leases", "lease"),
        ("device 1/leases", "lease"),
    ]
    task = TaskRun(job="a", iteration=3, worker=1, device=1, start=1.0, stop=2.0)
    spans = msgspec.structs.replace(schedule, tasks=(task,)).timeline().spans
    assert [(s.track, s.name, s.kind) for s in spans] == [("device 1/tasks", "a iteration 3 worker 1", "task")]

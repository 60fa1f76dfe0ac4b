"""Whose parameters an executor brings to its device while a task computes there: those of the job that is next."""

from __future__ import annotations

from pathlib import Path

from dovetail.cluster.executor.gaps import LastBackgroundTask
from dovetail.cluster.executor.main import Executor
from dovetail.cluster.executor.tenant import Tenant
from dovetail.cluster.transport.messages import Done, GrantLease, Offered, Released, Task, Welcome


class Loaded:
    """A job that records what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def claim(self, task: Task) -> bool:
        return True

    def forget(self, number: int) -> None: ...

    def run(self, task: Task) -> Done | None: ...

    def prefetch(self, iteration: int) -> None:
        self.asked.append(iteration)

    def close(self) -> None: ...


def tenant(job: int, *, iteration: int) -> tuple[Tenant, Loaded]:
    """A job that offers one task of an iteration."""
    lease = GrantLease(
        job=str(job), attempt=1, aggregator=("", 0), node="n", folder="", priority=(False, 0.0, 0.0, job)
    )
    made, runner = Tenant(lease, 0, LastBackgroundTask(), node="n"), Loaded()
    made.runner = runner
    for message in (
        Welcome(memory="x"),
        Offered(iteration=iteration, tasks=(Task(iteration=iteration, worker=0, claim=1),)),
        Released(iteration=iteration, at=1.0),
    ):
        made.hear(message, 1.0)
    return made, runner


def test_the_first_job_in_line_that_has_a_task_is_brought_and_no_other(tmp_path: Path) -> None:
    executor = Executor(
        home=tmp_path,
        device=0,
        node="n",
        kind="accelerator",
        coordinator=("127.0.0.1", 1),
        key="",
        opener=lambda lease, welcome, emulated, local: Loaded(),
    )
    made = [tenant(job, iteration=10 * job) for job in (1, 2, 3)]
    executor._tenants.jobs = [one for one, _ in made]
    made[0][0].lock(2.0)
    made[0][0].begin(2.0)  # its only task runs
    executor.prefetch()
    assert [runner.asked for _, runner in made] == [[], [20], []]
    made[1][0].runner = None  # not loaded yet: its code runs between tasks only
    executor.prefetch()
    assert [runner.asked for _, runner in made] == [[], [20], [30]]
    for one, _ in made:
        one.hear(Released(iteration=one.iteration, at=3.0, taken=(0,)), 3.0)
    executor.prefetch()
    assert [runner.asked for _, runner in made] == [[], [20], [30]]
    executor._tenants.jobs = []
    executor._tenants.close()

"""How an executor takes tasks, and when it says so: real processes and sockets, fake aggregators."""

from __future__ import annotations

import selectors
import socket
from pathlib import Path

import pytest

from dovetail.cluster.executor.recorder import DeviceRecorder
from dovetail.cluster.executor.statistics import TaskStatistics
from dovetail.cluster.executor.tenants import Tenants
from dovetail.cluster.output import LIMIT_BYTES
from dovetail.cluster.transport import messages as m
from dovetail.cluster.transport.wire import Connection
from tests.cluster.executor.fakes import LIMIT, Behaviour
from tests.cluster.executor.harness import harness, task_lines, wait, wait_for_tasks


def test_a_task_of_a_job_alone_on_a_device_is_taken_before_its_release_and_started_after_it(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        behaviour = Behaviour(iterations=5, seconds=(0.005, 0.01), shares=True, release_when_taken=True)
        alone = at.aggregator("1", behaviour)
        at.grant(alone)
        assert alone.finished.wait(LIMIT)
        found = wait_for_tasks(at, 10)
        assert [(t.iteration, t.worker) for t in found] == [(i, w) for i in range(5) for w in (1, 0)]
        assert not alone.all(m.Claim), "no Claim for a task that can be locked"
        assert all(line.waited >= 0 for line in found)
        took = {(t.iteration, t.worker): at for at, t in alone.log if isinstance(t, m.Took)}
        assert len(took) == 10
        for i in range(5):
            assert took[i, 1] < alone.released_at[i] < took[i, 0]
        assert all(line.start >= alone.released_at[line.iteration] for line in task_lines(at))
        wait((at.home / "jobs" / "1" / "forgotten").exists, "unlocking old tasks")


def test_no_task_is_taken_before_its_release_where_several_jobs_are_served(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        both = [at.aggregator(str(i), Behaviour(iterations=5, off_device=0.02, hold=True, shares=True)) for i in (2, 3)]
        at.send(*(at.lease(aggregator, order=order) for order, aggregator in enumerate(both)))
        wait(lambda: all(aggregator.joined for aggregator in both), "both joined")
        for aggregator in both:
            aggregator.hold = False
        assert all(aggregator.finished.wait(LIMIT) for aggregator in both)
        for aggregator in both:
            times = {t.iteration: when for when, t in aggregator.log if isinstance(t, m.Took)}
            assert all(times[i] >= aggregator.released_at[i] for i in range(5))


def test_tasks_that_another_executor_has_are_skipped_without_a_message_and_the_next_job_has_its_turn(
    tmp_path: Path,
) -> None:
    with harness(tmp_path) as at:
        at.executor()
        code = "import time\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
        busy = at.aggregator("1", Behaviour(iterations=1, seconds=(0.01,), hold=True, shares=True), code=code)
        half = at.aggregator("2", Behaviour(iterations=1, seconds=(0.001, 0.002, 0.003), hold=True, shares=True))
        other = at.aggregator("3", Behaviour(iterations=1, hold=True, shares=True))
        for order, aggregator in enumerate((busy, half, other)):
            at.grant(aggregator, order=order)
        wait(lambda: busy.joined and half.joined and other.joined, "all joined")
        busy.hold = False
        wait(lambda: busy.out, "the first task")
        half.hold = other.hold = False
        wait(lambda: half.releases and other.releases, "both ready while the device is busy")
        for taken in (half.offered[2], half.offered[0]):
            (at.home / "jobs" / "2" / f"taken {taken.claim}").touch()
        (at.home / "jobs" / "1" / "go").touch()
        assert other.finished.wait(LIMIT)
        assert [(t.job, t.worker) for t in wait_for_tasks(at, 3)] == [("1", 0), ("2", 1), ("3", 0)]
        assert [t.worker for t in half.all(m.Took)] == [1]


def test_a_task_that_has_ended_counts_when_the_lease_is_revoked_at_that_moment(tmp_path: Path) -> None:
    """Done is sent before Leave."""
    with harness(tmp_path) as at:
        at.executor()
        code = "import time\nwhile not (folder / 'go').exists(): time.sleep(0.01)"
        code += f"\nprint('x' * {LIMIT_BYTES})"  # more than its log may hold
        job = at.aggregator("1", Behaviour(iterations=1, seconds=(0.01,), shares=True), code=code)
        at.grant(job)
        wait(lambda: job.out, "the task")
        at.coordinator.say(m.RevokeLease(job="1", attempt=1))  # read when the task has ended, before Done is sent
        (at.home / "jobs" / "1" / "go").touch()
        wait(lambda: job.all(m.Leave), "the end of the connection")
        wait((at.home / "jobs" / "1" / "closed").exists, "the job's unloading")
        wait(lambda: (at.home / "jobs" / "1" / "log.txt").stat().st_size < LIMIT_BYTES, "a log of bounded length")
        assert [type(message) for _, message in job.log[-2:]] == [m.Done, m.Leave]


def test_messages_that_arrive_with_an_answer_are_handled_without_a_further_one(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        job = at.aggregator("1", Behaviour(iterations=1, seconds=(0.01, 0.01)))
        answer = job._answer

        def at_once(connection: Connection, claim: m.Claim) -> None:
            """The first task, and with it an offer of the second: the executor that had it is lost."""
            job._answer = answer  # type: ignore[method-assign]
            job.out[job.queue.pop()] = connection
            connection.send(job._offer(1), job._offered(), job._released())

        job._answer = at_once  # type: ignore[method-assign]
        offered = job._offered
        job._offered = lambda: m.Offered(iteration=0, tasks=offered().tasks[-1:])  # type: ignore[method-assign]
        at.grant(job)
        assert job.finished.wait(LIMIT), "the second task was never asked for"


def test_a_reserved_task_is_given_up_when_another_job_goes_first(tmp_path: Path) -> None:
    with harness(tmp_path) as at:
        at.executor()
        later = at.aggregator("1", Behaviour(iterations=1, seconds=(0.01,), hold=True, shares=True))
        first = at.aggregator("2", Behaviour(iterations=10_000, seconds=(0.005,), shares=True))
        at.grant(later, order=1.0)
        wait(lambda: later.out, "the reservation")
        at.grant(first, order=0.0)
        wait(lambda: not later.out and later.queue == [0], "giving it up")
        assert [t.worker for t in later.all(m.Took)] == [0, -1]


def test_messages_are_sent_before_anything_that_may_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsent: list[int] = []

    def connect(address: object, *, timeout: float) -> Connection:
        unsent.append(len(first.unsent))
        raise OSError("no aggregator")

    monkeypatch.setattr("dovetail.cluster.executor.tenants.Connection.to", connect)
    tenants = Tenants(
        home=tmp_path,
        device=0,
        node="n",
        key="k",
        coordinator=("", 0),
        hello=lambda leases: m.Hello(key="", role="executor", pid=1),
        heartbeat=m.Heartbeat,
        recorder=DeviceRecorder(tmp_path, 0, node="n", emulated=True),
        statistics=TaskStatistics(),
    )
    leases = [
        m.GrantLease(
            job=str(i), attempt=1, aggregator=("", 0), node="n", folder=str(tmp_path), priority=(False, i, 0.0, i)
        )
        for i in range(2)
    ]
    for lease in leases:
        tenants._lease_granted(lease)
    first = tenants.jobs[0]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first.connection = Connection(ours)
        tenants._selector.register(first.connection, selectors.EVENT_READ, first)
        first.unsent.append(m.Done(iteration=0, worker=0, loss=0.0, samples=1, start=0.0, stop=0.0))
        tenants.listen(0.0)
        assert unsent == [0] and isinstance(Connection(theirs).receive(timeout=LIMIT), m.Done)
        tenants.close()

"""How an executor takes tasks, and when it says so: real processes and sockets, acted aggregators."""

from __future__ import annotations

import selectors
import socket
from pathlib import Path

import pytest

from dovetail.cluster.executor import recorder
from dovetail.cluster.executor.recorder import Recorder
from dovetail.cluster.executor.statistics import Tally
from dovetail.cluster.executor.tenants import Tenants
from dovetail.cluster.output import LIMIT_BYTES
from dovetail.cluster.transport import messages as m
from dovetail.cluster.transport.wire import Connection
from tests.cluster.executor.acting import Acted, ran, stage, wait


def test_a_job_alone_on_a_device_is_taken_before_its_release_and_started_after_it(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        alone = at.aggregator("1", Acted(iterations=5, seconds=(0.005, 0.01), off_device=0.05, shares=True))
        at.grant(alone)
        assert alone.finished.wait(20)
        found = ran(at, 10)
        assert [(t.iteration, t.worker) for t in found] == [(i, w) for i in range(5) for w in (1, 0)]
        assert not alone.all(m.Claim), "nobody asks for what can be taken"
        assert all(line.waited >= 0 for line in found)
        took = {(t.iteration, t.worker): at for at, t in alone.log if isinstance(t, m.Took)}
        assert len(took) == 10
        for i in range(1, 5):  # the first may be heard of with its release
            assert took[i, 1] < alone.released_at[i] < took[i, 0]
        lines = [line for line in recorder.lines(at.home) if isinstance(line, recorder.Ran)]  # on the machine's clock
        assert all(line.start >= alone.released_at[line.iteration] for line in lines)
        wait((at.home / "jobs" / "1" / "forgotten").exists, "letting go of old tasks")


def test_among_others_nothing_is_taken_before_its_time(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        both = [at.aggregator(str(i), Acted(iterations=5, off_device=0.02, hold=True, shares=True)) for i in (2, 3)]
        for order, aggregator in enumerate(both):
            at.grant(aggregator, order=order)
        wait(lambda: all(aggregator.joined for aggregator in both), "both joined")
        for aggregator in both:
            aggregator.hold = False
        assert all(aggregator.finished.wait(20) for aggregator in both)
        for aggregator in both:
            times = {t.iteration: when for when, t in aggregator.log if isinstance(t, m.Took)}
            assert all(times[i] >= aggregator.released_at[i] for i in range(5))


def test_what_somebody_else_has_is_passed_over_without_a_word_and_the_next_job_has_its_turn(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        code = "import time\nwhile not (player.folder / 'go').exists(): time.sleep(0.01)"
        busy = at.aggregator("1", Acted(iterations=1, seconds=(0.01,), hold=True, shares=True), code=code)
        half = at.aggregator("2", Acted(iterations=1, seconds=(0.001, 0.002, 0.003), hold=True, shares=True))
        other = at.aggregator("3", Acted(iterations=1, hold=True, shares=True))
        for order, aggregator in enumerate((busy, half, other)):
            at.grant(aggregator, order=order)
        wait(lambda: busy.joined and half.joined and other.joined, "all joined")
        busy.hold = False
        wait(lambda: busy.out, "the first task")
        half.hold = other.hold = False
        wait(lambda: half.releases and other.releases, "both ready while the device is busy")
        for gone in (half.offered[2], half.offered[0]):
            (at.home / "jobs" / "2" / f"gone {gone.claim}").touch()
        (at.home / "jobs" / "1" / "go").touch()
        assert other.finished.wait(20)
        assert [(t.job, t.worker) for t in ran(at, 3)] == [("1", 0), ("2", 1), ("3", 0)]
        assert [t.worker for t in half.all(m.Took)] == [1]


def test_a_task_that_has_ended_counts_when_its_device_is_taken_back_at_that_moment(tmp_path: Path) -> None:
    """What was not said yet is said before Leave."""
    with stage(tmp_path) as at:
        at.executor()
        code = "import time\nwhile not (player.folder / 'go').exists(): time.sleep(0.01)"
        code += f"\nprint('x' * {LIMIT_BYTES})"  # the last words of the job here
        job = at.aggregator("1", Acted(iterations=1, seconds=(0.01,), shares=True), code=code)
        at.grant(job)
        wait(lambda: job.out, "the task")
        at.head.say(m.Revoke(job="1", epoch=1))  # heard when the task has ended, before anything is said
        (at.home / "jobs" / "1" / "go").touch()
        wait(lambda: job.all(m.Leave), "leaving")
        wait((at.home / "jobs" / "1" / "closed").exists, "the end of the job's things")
        wait(lambda: (at.home / "jobs" / "1" / "log.txt").stat().st_size < LIMIT_BYTES, "a log of bounded length")
        assert [type(message) for _, message in job.log[-2:]] == [m.Done, m.Leave]


def test_what_comes_right_behind_an_answer_is_heard_before_anybody_speaks_again(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        job = at.aggregator("1", Acted(iterations=1, seconds=(0.01, 0.01)))
        answer = job._answer

        def at_once(connection: Connection, claim: m.Claim) -> None:
            """The first task, and with it that the second is there: somebody who had it is lost."""
            job._answer = answer  # type: ignore[method-assign]
            job.out[job.queue.pop()] = connection
            connection.send(job._offer(1), job._offered(), job._released())

        job._answer = at_once  # type: ignore[method-assign]
        offered = job._offered
        job._offered = lambda: m.Offered(iteration=0, tasks=offered().tasks[-1:])  # type: ignore[method-assign]
        at.grant(job)
        assert job.finished.wait(20), "the second task was never asked for"


def test_a_task_that_was_reserved_is_given_up_when_others_go_first(tmp_path: Path) -> None:
    with stage(tmp_path) as at:
        at.executor()
        later = at.aggregator("1", Acted(iterations=1, seconds=(0.01,), hold=True, shares=True))
        first = at.aggregator("2", Acted(iterations=10_000, seconds=(0.005,), shares=True))
        at.grant(later, order=1.0)
        wait(lambda: later.out, "the reservation")
        at.grant(first, order=0.0)
        wait(lambda: [t for t in later.all(m.Took) if t.worker < 0], "giving it up")
        assert not later.out and later.queue == [0], "others may have it"


def test_nothing_that_takes_long_comes_before_what_others_wait_to_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard: list[int] = []

    def connect(address: object, *, timeout: float) -> Connection:
        unheard.append(len(said.unsaid))
        raise OSError("nobody there")

    monkeypatch.setattr("dovetail.cluster.executor.tenants.Connection.to", connect)
    tenants = Tenants(
        home=tmp_path, device=0, node="n", key="k", coordinator=("", 0), beat=m.Beat, tally=Tally(),
        hello=lambda residents: m.Hello(key="", role="executor", pid=1),
        recorder=Recorder(tmp_path, 0, node="n", emulated=True),
    )  # fmt: skip
    grants = [
        m.Grant(job=str(i), epoch=1, aggregator=("", 0), node="n", folder=str(tmp_path), rank=(False, i, 0.0, i))
        for i in range(2)
    ]
    for grant in grants:
        tenants._granted(grant)
    said = tenants.residents[0]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        said.connection = Connection(ours)
        tenants._selector.register(said.connection, selectors.EVENT_READ, said)
        said.unsaid.append(m.Done(iteration=0, worker=0, loss=0.0, samples=1, start=0.0, stop=0.0))
        tenants.listen(0.0)
        assert unheard == [0] and isinstance(Connection(theirs).receive(timeout=1.0), m.Done)
        tenants.close()

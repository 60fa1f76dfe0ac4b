"""What executors and aggregators make of offers: reserved, taken, given up, offered again, said in the right order."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dovetail.cluster.aggregator.crew import Crew, Member
from dovetail.cluster.aggregator.iteration_tasks import Iteration
from dovetail.cluster.aggregator.offers import Offers
from dovetail.cluster.executor.gaps import Filled
from dovetail.cluster.executor.residents import Live
from dovetail.cluster.job.division import Division
from dovetail.cluster.transport.messages import (
    Barrier,
    Claim,
    Done,
    Grant,
    Join,
    Offered,
    Released,
    Task,
    Took,
    Welcome,
)
from dovetail.cluster.transport.wire import Connection
from tests.cluster.aggregator.test_claims import arenas


class Runner:
    """Of a loaded job: remembers what was asked of it."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.locked: list[int] = []
        self.forgotten = 0

    def claim(self, task: Task) -> bool:
        if task.claim in self.gone:
            return False
        self.locked.append(task.claim)
        return True

    def forget(self, number: int) -> None:
        self.forgotten = number

    def run(self, task: Task) -> Done:
        raise NotImplementedError

    def close(self) -> None: ...


def live(*, memory: str = "x", foreground: bool = False) -> tuple[Live, Runner]:
    grant = Grant(
        job="1", epoch=1, aggregator=("", 0), node="n", folder="", rank=(False, 0.0, 0.0, 1), foreground=foreground
    )  # fmt: skip
    made, runner = Live(grant, 2, Filled(), node="n"), Runner()
    made.hear(Welcome(memory=memory), 0.0)
    made.runner = runner
    return made, runner


def offered(iteration: int, numbers: dict[int, int]) -> Offered:
    tasks = tuple(Task(iteration=iteration, worker=w, seconds=1.0, claim=c) for w, c in numbers.items())
    return Offered(iteration=iteration, tasks=tasks, width=4)


def test_of_equal_tasks_each_device_takes_its_own_first_and_news_may_come_in_pieces() -> None:
    job, runner = live()
    for message in (offered(0, {0: 1, 1: 2, 2: 3, 3: 4}), Released(iteration=0, at=1.0)):
        job.hear(message, 1.0)
    job.hear(offered(0, {1: 9}), 1.1)  # somebody was lost; that it may be taken comes in another packet
    assert job.open
    runner.gone = {1, 2, 3, 4}
    job.lock(1.2)
    assert job.assigned is None and not job.ready and not runner.locked
    job.hear(Released(iteration=0, at=1.0), 1.3)
    job.lock(1.4)
    assert job.assigned is not None and runner.locked == [9]
    other, runner = live()
    for message in (offered(0, {0: 1, 1: 2, 2: 3, 3: 4}), Released(iteration=0, at=1.0, gone=(3,))):
        other.hear(message, 1.0)
    for _ in range(3):
        other.lock(1.1)
        other.begin(1.1)
    assert runner.locked == [3, 1, 2], "the device's own, then the next"
    assert [took.claim for took in other.unsaid if isinstance(took, Took)] == [3, 1, 2]


def test_one_task_is_reserved_kept_and_started_with_the_release() -> None:
    job, runner = live()
    job.hear(offered(0, {0: 1, 1: 2, 2: 3, 3: 4}), 0.0)
    job.reserve()
    job.hear(offered(0, {0: 5, 1: 6, 3: 7}), 0.1)  # somebody was lost meanwhile; ours is not among them
    job.reserve()
    assert runner.locked == [3] and job.assigned is None and not job.ready
    job.hear(Released(iteration=0, at=1.0, gone=(2,)), 1.0)
    assert job.assigned is not None and job.assigned.worker == 2 and job.ready == [2]
    job.begin(1.0)
    job.hear(Barrier(iteration=0, until=3.0, at=2.0), 2.0)
    job.hear(offered(1, {0: 8, 1: 9, 2: 10, 3: 11}), 2.1)
    assert runner.forgotten == 8, "what it had is let go when it is history"
    runner.gone = {8, 9, 10, 11}
    job.reserve()
    job.reserve()
    job.hear(Released(iteration=1, at=3.0, gone=(0, 1, 2, 3)), 3.0)
    assert job.assigned is None and not job.ready


def test_a_reservation_that_others_were_offered_meanwhile_is_given_up_and_the_new_one_is_taken() -> None:
    job, runner = live()
    job.hear(offered(0, {2: 1}), 0.0)
    job.reserve()
    job.hear(offered(0, {2: 5}), 0.1)  # somebody was lost before it was heard that 1 is ours
    assert job.reserved is None
    job.reserve()
    job.hear(Released(iteration=0, at=1.0, gone=(2,)), 1.0)
    assert job.assigned is not None and job.assigned.claim == 5 and runner.locked == [1, 5]
    job.hear(offered(1, {2: 6}), 2.0)
    assert job.assigned is None and not job.ready, "what has not begun before the barrier was done by others"


def test_nothing_of_an_iteration_that_is_over_is_reserved() -> None:
    job, runner = live()
    for message in (offered(0, {0: 1}), Released(iteration=0, at=1.0), Barrier(iteration=0, until=3.0, at=2.0)):
        job.hear(message, 2.0)
    job.reserve()
    assert not runner.locked


def test_a_filler_that_makes_a_reserved_task_wait_is_counted() -> None:
    job, _ = live(foreground=True)
    job.hear(offered(0, {0: 1}), 0.0)
    job.reserve()
    job.hear(Released(iteration=0, at=10.0, gone=(0,)), 10.0)
    job.filled.start, job.filled.stop, job.filled.count = 9.0, 13.0, 1
    job.begin(13.0)
    assert job.promise is not None and job.promise.delay == pytest.approx(3.0)


def test_what_waits_behind_others_is_given_up_once() -> None:
    job, _ = live()
    job.hear(offered(0, {0: 1, 1: 2}), 0.0)
    job.reserve()
    job.hear(Released(iteration=0, at=1.0), 1.0)
    job.give_up()
    job.give_up()
    assert job.assigned is None and len(job.ready) == 1, "the other one is still there"
    assert [took.worker for took in job.unsaid if isinstance(took, Took)][1:] == [-1]
    remote, _ = live(memory="")
    remote.assigned = Task(iteration=0, worker=0, claim=3)
    remote.give_up()
    assert remote.assigned is not None, "its gradients are awaited on a channel"


@contextmanager
def crew_of(count: int, *, workers: int) -> Iterator[tuple[Crew, list[Connection], list[Member]]]:
    """A real crew with so many executors that have joined; what it lost."""
    lost: list[Member] = []
    with selectors.DefaultSelector() as selector, arenas(0, workers=workers) as (arena,):
        crew = Crew(
            selector, "127.0.0.1", key="k", job="1", epoch=1, node="n",
            joined=lambda member: None, heard=lambda member, message: None, lost=lost.append,
        )  # fmt: skip
        crew.open(arena)
        clients = [Connection.to(crew.address) for _ in range(count)]
        for device, client in enumerate(clients):
            client.send(Join(key="k", job="1", epoch=1, device=device, node="n"))
        while len(crew.joined) < count:
            for key, _ in selector.select(5.0):
                key.data()
        for client in clients:
            assert isinstance(client.receive(timeout=5.0), Welcome)
        try:
            yield crew, clients, lost
        finally:
            crew.close("the end")
            for client in clients:
                client.close()


def test_what_follows_from_a_loss_is_said_after_what_showed_the_loss() -> None:
    """Old news behind new ones would make executors look for numbers that count no more."""
    with crew_of(3, workers=2) as (crew, (first, second, third), lost):
        arena = crew.arena
        assert arena is not None
        books = Iteration(Division(batches=(1, 1)))
        offers = Offers(books, arena, crew)
        crew._lost = lambda member: (lost.append(member), offers.lost(member))[0]
        # A reset, as by a process that dies with unread messages: the next send fails.
        first.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        first.close()
        offers.prepare(0, (1, 1))
        offers.release(1.0)
        assert [member.device for member in lost] == [0]
        for client in (second, third):
            heard = []
            while not heard or not isinstance(heard[-1], Released):
                message = client.receive(timeout=5.0)
                assert message is not None
                heard.append(message)
            numbers = [[task.claim for task in said.tasks] for said in heard if isinstance(said, Offered)]
            assert numbers == [[1, 2], [3, 4]], "the newest last"
            assert [arena.current(task.worker, task.claim) for task in books.ready] == [True, True]


def test_what_is_taken_before_its_release_is_not_overdue_and_what_is_given_up_is_offered_again() -> None:
    with crew_of(2, workers=1) as (crew, (first, second), lost):
        assert crew.arena is not None
        books = Iteration(Division(batches=(1,)))
        offers, member = Offers(books, crew.arena, crew), crew.joined[0]
        offers.prepare(0, (1,))
        offers.heard(member, Took(iteration=0, worker=0, claim=1, at=1.0))
        offers.look(1e6, 10.0)
        assert not lost and member in books.held
        offers.release(1e6)
        offers.look(1e6 + 9.0, 10.0)
        assert not lost and member in books.held
        assert books.until(0.0) == 1e6, "it began with the release, not when it was heard of"
        offers.heard(member, Took(iteration=0))
        assert not books.held and [task.claim for task in books.ready] == [2] and crew.arena.current(0, 2)
        offers.heard(crew.joined[1], Claim(iteration=0))
        assert books.held.keys() == {crew.joined[1]}
        heard = [second.receive(timeout=5.0) for _ in range(5)]
        assert [type(message) for message in heard] == [Offered, Released, Offered, Released, Task]
        offers.look(1e6 + 1e3, 10.0)
        assert [lost_one.device for lost_one in lost] == [1], "who is overdue is hung up on"
        assert isinstance(first.receive(timeout=5.0), Offered)


def test_who_shares_no_memory_takes_nothing_by_itself() -> None:
    job, runner = live(memory="")
    job.hear(offered(0, {0: 1}), 0.0)
    job.reserve()
    job.hear(Released(iteration=0, at=1.0), 1.0)
    assert not job.open and job.ready == [0] and not runner.locked

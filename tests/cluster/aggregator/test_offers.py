"""Offers, on both sides: tasks are reserved, taken, given up and offered again, and messages keep their order."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dovetail.cluster.aggregator.members import Member, Members
from dovetail.cluster.aggregator.offers import IterationTasks, Offers
from dovetail.cluster.executor.gaps import LastBackgroundTask
from dovetail.cluster.executor.tenant import Tenant
from dovetail.cluster.job.division import Division
from dovetail.cluster.transport.messages import (
    Barrier,
    Claim,
    Done,
    GrantLease,
    Join,
    Message,
    Offered,
    Released,
    Task,
    Took,
    Welcome,
)
from dovetail.cluster.transport.wire import Connection
from tests.cluster.aggregator.test_offers_claims import arenas
from tests.cluster.executor.fakes import LIMIT


class FakeRunner:
    """A loaded job that records the calls."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.locked: list[int] = []
        self.forgotten = 0

    def claim(self, task: Task) -> bool:
        if task.claim in self.taken:
            return False
        self.locked.append(task.claim)
        return True

    def forget(self, number: int) -> None:
        self.forgotten = number

    def run(self, task: Task) -> Done:
        raise NotImplementedError

    def prefetch(self, iteration: int) -> None: ...

    def close(self) -> None: ...


def tenant(*, memory: str = "x", foreground: bool = False) -> tuple[Tenant, FakeRunner]:
    lease = GrantLease(
        job="1",
        attempt=1,
        aggregator=("", 0),
        node="n",
        folder="",
        priority=(False, 0.0, 0.0, 1),
        foreground=foreground,
    )
    made, runner = Tenant(lease, 2, LastBackgroundTask(), node="n"), FakeRunner()
    made.hear(Welcome(memory=memory), 0.0)
    made.runner = runner
    return made, runner


def offered(iteration: int, numbers: dict[int, int]) -> Offered:
    tasks = tuple(Task(iteration=iteration, worker=w, seconds=1.0, claim=c) for w, c in numbers.items())
    return Offered(iteration=iteration, tasks=tasks, width=4)


def test_of_equal_tasks_each_device_takes_its_own_first_and_messages_may_come_apart() -> None:
    job, runner = tenant()
    for message in (offered(0, {0: 1, 1: 2, 2: 3, 3: 4}), Released(iteration=0, at=1.0)):
        job.hear(message, 1.0)
    job.hear(offered(0, {1: 9}), 1.1)  # an executor was lost; its Released comes later
    assert job.lockable
    runner.taken = {1, 2, 3, 4}
    job.lock(1.2)
    assert job.assigned is None and not job.ready and not runner.locked
    job.hear(Released(iteration=0, at=1.0), 1.3)
    job.lock(1.4)
    assert job.assigned is not None and runner.locked == [9]
    other, runner = tenant()
    for message in (offered(0, {0: 1, 1: 2, 2: 3, 3: 4}), Released(iteration=0, at=1.0, taken=(3,))):
        other.hear(message, 1.0)
    for _ in range(3):
        other.lock(1.1)
        other.begin(1.1)
    assert runner.locked == [3, 1, 2], "the device's own worker, then the next ones"
    assert [took.claim for took in other.unsent if isinstance(took, Took)] == [3, 1, 2]


def test_one_task_is_reserved_kept_and_started_with_the_release() -> None:
    job, runner = tenant()
    job.hear(offered(0, {0: 1, 1: 2, 2: 3, 3: 4}), 0.0)
    job.reserve()
    job.hear(offered(0, {0: 5, 1: 6, 3: 7}), 0.1)  # an executor was lost; our task is not offered again
    job.reserve()
    assert runner.locked == [3] and job.assigned is None and not job.ready
    job.hear(Released(iteration=0, at=1.0, taken=(2,)), 1.0)
    assert job.assigned is not None and job.assigned.worker == 2 and job.ready == [2]
    job.begin(1.0)
    job.hear(Barrier(iteration=0, until=3.0, at=2.0), 2.0)
    job.hear(offered(1, {0: 8, 1: 9, 2: 10, 3: 11}), 2.1)
    assert runner.forgotten == 8, "locks are released when their iteration is over"
    runner.taken = {8, 9, 10, 11}
    job.reserve()
    job.reserve()
    job.hear(Released(iteration=1, at=3.0, taken=(0, 1, 2, 3)), 3.0)
    assert job.assigned is None and not job.ready


def test_a_reserved_task_that_was_offered_again_is_given_up_and_taken_under_its_new_number() -> None:
    job, runner = tenant()
    job.hear(offered(0, {2: 1}), 0.0)
    job.reserve()
    job.hear(offered(0, {2: 5}), 0.1)  # an executor was lost before our Took arrived
    assert job.reserved is None
    job.reserve()
    job.hear(Released(iteration=0, at=1.0, taken=(2,)), 1.0)
    assert job.assigned is not None and job.assigned.claim == 5 and runner.locked == [1, 5]
    job.hear(offered(1, {2: 6}), 2.0)
    assert job.assigned is None and not job.ready, "what had not started before the barrier was done by others"


def test_no_task_of_an_iteration_that_is_over_is_reserved() -> None:
    job, runner = tenant()
    for message in (offered(0, {0: 1}), Released(iteration=0, at=1.0), Barrier(iteration=0, until=3.0, at=2.0)):
        job.hear(message, 2.0)
    job.reserve()
    assert not runner.locked


def test_a_background_task_that_makes_a_reserved_task_wait_is_charged() -> None:
    job, _ = tenant(foreground=True)
    job.hear(offered(0, {0: 1}), 0.0)
    job.reserve()
    job.hear(Released(iteration=0, at=10.0, taken=(0,)), 10.0)
    job.last_background.start, job.last_background.stop, job.last_background.count = 9.0, 13.0, 1
    job.begin(13.0)
    assert job.promise is not None and job.promise.delay == pytest.approx(3.0)


def test_a_task_that_waits_for_another_job_is_given_up_once() -> None:
    job, _ = tenant()
    job.hear(offered(0, {0: 1, 1: 2}), 0.0)
    job.reserve()
    job.hear(Released(iteration=0, at=1.0), 1.0)
    job.give_up()
    job.give_up()
    assert job.assigned is None and len(job.ready) == 1, "the other task is still ready"
    assert [took.worker for took in job.unsent if isinstance(took, Took)][1:] == [-1]
    remote, _ = tenant(memory="")
    remote.assigned = Task(iteration=0, worker=0, claim=3)
    remote.give_up()
    assert remote.assigned is not None, "its gradients are expected on a channel"


@contextmanager
def members_of(count: int, *, workers: int) -> Iterator[tuple[Members, list[Connection], list[Member]]]:
    """Real members, `count` executors that have joined, and a list of those that are lost."""
    lost: list[Member] = []
    with selectors.DefaultSelector() as selector, arenas(0, workers=workers) as (arena,):
        members = Members(
            selector, "127.0.0.1", key="k", job="1", attempt=1, node="n",
            joined=lambda member: None, heard=lambda member, message: None, lost=lost.append,
        )  # fmt: skip
        members.open(arena)
        clients = [Connection.to(members.address) for _ in range(count)]
        for device, client in enumerate(clients):
            client.send(Join(key="k", job="1", attempt=1, device=device, node="n"))
        while len(members.joined) < count:
            for key, _ in selector.select(5.0):
                key.data()
        for client in clients:
            assert isinstance(client.receive(timeout=LIMIT), Welcome)
        try:
            yield members, clients, lost
        finally:
            members.close("the end")
            for client in clients:
                client.close()


def test_news_of_a_loss_do_not_overtake_the_messages_whose_sending_showed_it() -> None:
    """If old offers came after new ones, executors would try numbers that no longer count."""
    with members_of(3, workers=2) as (members, (first, second, third), lost):
        arena = members.arena
        assert arena is not None
        tasks = IterationTasks(Division(batches=(1, 1)))
        offers = Offers(tasks, arena, members)

        def drop(member: Member) -> None:
            lost.append(member)
            offers.lost(member)

        members._lost = drop
        # A reset, as by a process that dies with unread messages: the next send fails.
        first.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        first.close()
        offers.prepare(0, (1, 1))
        offers.release(1.0)
        assert [member.device for member in lost] == [0]
        for client in (second, third):
            heard: list[Message] = []
            while not heard or not isinstance(heard[-1], Released):
                message = client.receive(timeout=LIMIT)
                assert message is not None
                heard.append(message)
            numbers = [[task.claim for task in said.tasks] for said in heard if isinstance(said, Offered)]
            assert numbers == [[1, 2], [3, 4]], "the newest last"
            assert [arena.current(task.worker, task.claim) for task in tasks.ready] == [True, True]


def test_a_task_taken_before_its_release_is_not_overdue_and_one_given_up_is_offered_again() -> None:
    with members_of(2, workers=1) as (members, (first, second), lost):
        assert members.arena is not None
        tasks = IterationTasks(Division(batches=(1,)))
        offers, member = Offers(tasks, members.arena, members), members.joined[0]
        offers.prepare(0, (1,))
        offers.heard(member, Took(iteration=0, worker=0, claim=1, at=1.0))
        offers.check_overdue(1e6, 10.0)
        assert not lost and member in tasks.assigned
        offers.release(1e6)
        offers.check_overdue(1e6 + 9.0, 10.0)
        assert not lost and member in tasks.assigned
        assert tasks.until(0.0) == 1e6, "it starts with the release, not when it was taken"
        offers.heard(member, Took(iteration=0))
        assert not tasks.assigned and [task.claim for task in tasks.ready] == [2] and members.arena.current(0, 2)
        offers.heard(members.joined[1], Claim(iteration=0))
        assert tasks.assigned.keys() == {members.joined[1]}
        heard = [second.receive(timeout=LIMIT) for _ in range(5)]
        assert [type(message) for message in heard] == [Offered, Released, Offered, Released, Task]
        offers.check_overdue(1e6 + 1e3, 10.0)
        assert [lost_one.device for lost_one in lost] == [1], "an executor whose task is overdue is dropped"
        assert isinstance(first.receive(timeout=LIMIT), Offered)


def test_an_executor_without_shared_memory_locks_nothing() -> None:
    job, runner = tenant(memory="")
    job.hear(offered(0, {0: 1}), 0.0)
    job.reserve()
    job.hear(Released(iteration=0, at=1.0), 1.0)
    assert not job.lockable and job.ready == [0] and not runner.locked

"""Claims: whatever executors believe and whichever die, each task has one executor and none is forgotten."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

from dovetail.cluster.aggregator.offers import IterationTasks
from dovetail.cluster.job.arena import Arena
from dovetail.cluster.job.division import Division
from dovetail.cluster.transport.messages import Done, Offered, Task, Took

WORKERS, EXECUTORS = 4, 3
names = count()


def model() -> nn.Module:
    return nn.Linear(2, 2)


@contextmanager
def arenas(executors: int = EXECUTORS, *, workers: int = WORKERS) -> Iterator[list[Arena]]:
    """The aggregator's, and one for every executor."""
    made = Arena.create(f"dovetail-test-claims-{os.getpid()}-{next(names)}", model(), workers)
    try:
        yield [made, *(Arena.attach(made.name, model()) for _ in range(executors))]
    finally:
        made.unlink()


def test_only_one_executor_can_lock_a_number_and_only_while_it_is_offered() -> None:
    with arenas() as (aggregator, first, second, third):
        aggregator.offer([Task(iteration=0, worker=1, claim=7)])
        assert first.claim(1, 7) and not second.claim(1, 7) and not aggregator.claim(1, 7)
        aggregator.withdraw([1])
        first.forget(8)
        assert not second.claim(1, 7), "a task that is done stays done, though its lock is released"
        aggregator.offer([Task(iteration=0, worker=1, claim=9)])
        assert not first.claim(1, 7) and not first.current(1, 7) and third.claim(1, 9) and third.current(1, 9)


def test_a_number_that_is_not_offered_is_unlocked_at_once() -> None:
    with arenas() as (aggregator, first, second, _):
        assert not first.claim(0, 5)
        aggregator.offer([Task(iteration=0, worker=0, claim=5)])
        assert second.claim(0, 5)


def test_the_locks_of_a_process_end_with_it_and_no_other_ones(tmp_path: Path) -> None:
    with arenas(1) as (aggregator, mine):
        aggregator.offer([Task(iteration=0, worker=w, claim=10 + w) for w in range(2)])
        assert mine.claim(0, 10)
        (tmp_path / "pipe").touch()
        pid = os.fork()
        if not pid:
            other = Arena.attach(aggregator.name, model())
            code = 0 if other.claim(1, 11) and not other.claim(0, 10) else 3
            (tmp_path / "pipe").write_text(str(code))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert (tmp_path / "pipe").read_text() == "0"
        assert mine.claim(1, 11), "a dead process has no locks"
        reopened = Arena.attach(aggregator.name, model())
        reopened.close()
        assert not aggregator.claim(0, 10), "opening and closing the file releases no lock of others"


class ClaimsMachine(RuleBasedStateMachine):
    """An aggregator's tasks and several executors that get messages late, die between any two events, and return.

    Messages wait in queues; `hear` and `deliver` take them one by one, in any order between queues.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = arenas()
        self.arena, *self.executors = self.kept.__enter__()
        self.tasks = IterationTasks(Division(batches=(1,) * WORKERS))
        self.number = -1
        self.believes: list[list[Task]] = [[] for _ in self.executors]
        self.to_executor: list[list[Offered]] = [[] for _ in self.executors]
        self.to_aggregator: list[list[Took | Done]] = [[] for _ in self.executors]
        self.runs: list[Task | None] = [None] * EXECUTORS
        self.life = [0] * EXECUTORS
        self.accepted: dict[tuple[int, int], int] = {}
        self._next()

    def teardown(self) -> None:
        self.kept.__exit__(None, None, None)

    def _offer(self) -> None:
        if self.tasks.ready:
            self.arena.offer(self.tasks.ready)
            for line in self.to_executor:
                line.append(self.tasks.offered())

    def _next(self) -> None:
        self.number += 1
        self.tasks.prepare(self.number, (1,) * WORKERS)
        self.tasks.release(0.0)
        self._offer()
        self.arena.forget(self.tasks.first)

    def _holder(self, e: int) -> tuple[int, int]:
        return e, self.life[e]

    @rule(e=st.integers(0, EXECUTORS - 1))
    def hear(self, e: int) -> None:
        if self.to_executor[e]:
            message = self.to_executor[e].pop(0)
            self.believes[e] = list(message.tasks)
            if message.tasks and self.runs[e] is None:
                self.executors[e].forget(min(task.claim for task in message.tasks))

    @rule(e=st.integers(0, EXECUTORS - 1))
    def take(self, e: int) -> None:
        while self.runs[e] is None and self.believes[e]:
            task = self.believes[e].pop()
            if self.executors[e].claim(task.worker, task.claim):
                others = [r for r in self.runs if r is not None]
                assert task.claim not in [r.claim for r in others], "two executors run the same offer"
                self.runs[e] = task
                self.to_aggregator[e].append(Took(iteration=task.iteration, worker=task.worker, claim=task.claim))

    @rule(e=st.integers(0, EXECUTORS - 1))
    def end(self, e: int) -> None:
        task = self.runs[e]
        if task is None:
            return
        self.runs[e] = None
        if self.executors[e].current(task.worker, task.claim):  # otherwise its gradients are refused
            done = Done(iteration=task.iteration, worker=task.worker, loss=0.0, samples=1, start=0.0, stop=1.0)
            self.to_aggregator[e].append(done)

    @rule(e=st.integers(0, EXECUTORS - 1))
    def deliver(self, e: int) -> None:
        if not self.to_aggregator[e]:
            return
        message = self.to_aggregator[e].pop(0)
        holder = self._holder(e)
        if isinstance(message, Took):
            if holder in self.tasks.assigned:
                self.tasks.lose(holder)
                self._offer()
            self.tasks.took(holder, message)
        elif self.tasks.has(holder, message):
            self.arena.withdraw([message.worker])
            assert self.tasks.end(holder, message)
            key = message.iteration, message.worker
            self.accepted[key] = self.accepted.get(key, 0) + 1
        if self.tasks.complete:
            self._next()

    @rule(e=st.integers(0, EXECUTORS - 1))
    def die(self, e: int) -> None:
        """By SIGKILL: its locks and unsent messages are lost; a new executor joins."""
        self.executors[e].close()
        self.executors[e] = Arena.attach(self.arena.name, model())
        self.runs[e], self.to_aggregator[e], self.to_executor[e], self.believes[e] = None, [], [], []
        self.tasks.lose(self._holder(e))
        self.life[e] += 1
        self.to_executor[e].append(self.tasks.offered())
        self._offer()

    @invariant()
    def every_task_counts_once(self) -> None:
        assert all(n == 1 for n in self.accepted.values())
        assert set(self.accepted) >= {(i, w) for i in range(self.number) for w in range(WORKERS)}

    @invariant()
    def only_one_executor_can_end_a_task(self) -> None:
        current = [r.worker for r, arena in zip(self.runs, self.executors, strict=True)
                   if r is not None and arena.current(r.worker, r.claim)]  # fmt: skip
        assert len(current) == len(set(current)), "two executors would hand over the same gradients"

    @invariant()
    def every_task_can_still_end(self) -> None:
        """Each task is assigned, offered or done, so the iteration ends once all messages are delivered."""
        assigned = {task.worker for task in self.tasks.assigned.values()}
        ready = {task.worker for task in self.tasks.ready}
        assert assigned | ready | set(self.tasks.done) == set(range(WORKERS))
        assert all(self.arena.current(task.worker, task.claim) for task in self.tasks.ready)


def test_in_any_order_of_events_each_task_counts_once_and_none_is_forgotten() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(ClaimsMachine, settings=settings(max_examples=80, stateful_step_count=60, deadline=None))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_after_any_deaths_the_remaining_executors_end_the_iteration(steps: list[int]) -> None:
    machine = ClaimsMachine()
    try:
        moves = (machine.hear, machine.take, machine.deliver, machine.end, machine.die, machine.take)
        for i, step in enumerate(steps):
            moves[step](i % EXECUTORS)
        before = machine.number
        for _ in range(20 * WORKERS):
            for e in range(EXECUTORS):
                while machine.to_executor[e]:
                    machine.hear(e)
                machine.take(e)
                machine.end(e)
                while machine.to_aggregator[e]:
                    machine.deliver(e)
            machine.every_task_counts_once()
        assert machine.number > before + 1
    finally:
        machine.teardown()


def test_a_release_says_which_tasks_are_taken_and_until_when() -> None:
    tasks = IterationTasks(Division(batches=(1, 1), forward=(1.0, 2.0), backward=(0.0, 0.0)))
    tasks.prepare(0, (1, 1))
    assert [task.worker for task in tasks.ready] == [0, 1], "the longest last"
    task = tasks.claim("remote", 5.0, lambda task: task.worker == 0)
    assert task is not None and task.worker == 0, "a task that cannot be locked is skipped"
    tasks.release(10.0)
    assert tasks.release_message().taken == (0,) and tasks.release_message().until == pytest.approx(11.0), (
        "a task that was taken before starts with the release"
    )
    assert tasks.took("local", Took(iteration=0, worker=1, claim=tasks.ready[0].claim, at=10.5))
    assert tasks.until(0.0) == pytest.approx(12.5) and tasks.overdue(12.6, 2.0) == ["remote", "local"]
    assert not tasks.took("another", Took(iteration=0, worker=1, claim=2, at=10.6))

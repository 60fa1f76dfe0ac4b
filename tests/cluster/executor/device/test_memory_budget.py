"""Who has to leave a device whose memory does not suffice: the least recently used, and nobody without need."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given

from dovetail.cluster.executor.device.memory_budget import MemoryBudget


@dataclass(eq=False)
class Weights:
    """A job that takes `bytes` while it is on the device."""

    name: str
    bytes: int
    there: bool = False

    def evict(self) -> None:
        assert self.there
        self.there = False


def device(limit: int, *jobs: Weights) -> MemoryBudget:
    return MemoryBudget(limit, lambda: sum(job.bytes for job in jobs if job.there))


def run(budget: MemoryBudget, job: Weights, working: int = 0) -> bool:
    fits = budget.make_room(job, working + (0 if job.there else job.bytes))
    job.there = True
    budget.used(job)
    return fits


def test_the_least_recently_used_job_leaves_first_and_only_as_many_as_needed() -> None:
    a, b, c = Weights("a", 4), Weights("b", 4), Weights("c", 4)
    budget = device(10, a, b, c)
    assert run(budget, a) and run(budget, b) and run(budget, a) and budget.evictions == 0
    assert run(budget, c)
    assert (a.there, b.there, c.there) == (True, False, True)
    assert run(budget, c, working=3)
    assert (a.there, b.there, c.there) == (False, False, True)


def test_a_job_that_does_not_fit_alone_is_told_so_after_all_others_have_left() -> None:
    a, b = Weights("a", 4), Weights("b", 8)
    budget = device(10, a, b)
    assert run(budget, a)
    assert not run(budget, b, working=3)
    assert not a.there and budget.free == 2


def test_a_job_that_has_left_by_itself_is_not_evicted() -> None:
    a, b = Weights("a", 6), Weights("b", 6)
    budget = device(10, a, b)
    run(budget, a)
    a.there = False
    budget.left(a)
    budget.left(a)
    assert run(budget, b) and budget.evictions == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_whatever_the_order_of_tasks_the_limit_is_kept_and_nobody_leaves_without_need(
    tasks: list[tuple[int, int]],
) -> None:
    jobs = [Weights(str(size), size) for size in (2, 3, 4, 5)]
    budget = device(9, *jobs)
    order: list[Weights] = []
    for index, working in tasks:
        job = jobs[index]
        before = [j for j in order if j.there and j is not job]
        assert run(budget, job, working)
        assert budget.free >= working
        gone = [j for j in before if not j.there]
        assert gone == before[: len(gone)], "the least recently used first"
        if gone:
            assert budget.free - gone[-1].bytes < working, "the last to leave had to"
        order = [j for j in order if j is not job] + [job]

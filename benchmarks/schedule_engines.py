"""Which engine for the task level? The same jobs on five of them, in tasks per second: run by benchmarks/schedule.py.

Groups of 8 devices, each with three resident ladder jobs of 8 workers that differ in their times; first come first
served, longest task first, a barrier and some time off the devices after each iteration; no jitter, so that all
engines must find the same makespan. The engine in use is the only one that also models memory, orders that change,
guards, stages, jitter, switches, interruptions and records; the others are minimal engines that can run these jobs.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from dovetail.core.job import Job, JobPhase, ladder
from dovetail.planning.sharing.policies import policy
from dovetail.planning.sharing.priority import Standing
from dovetail.simulate.cluster import EXACT
from dovetail.simulate.cluster.tasks import TaskEngine

WIDTH, JOBS = 8, 3
TIMES = ((0.0731, 0.1519, 0.0173), (0.0617, 0.1871, 0.0291), (0.0973, 0.1213, 0.0137))
"""Forward, backward and off-device seconds of the three jobs of a group; no two sums of them are equal."""
NEVER = float("inf")
RELEASE = -1


def group_jobs(iterations: int) -> list[Job]:
    phase = JobPhase(iterations=iterations, workers=WIDTH, depths=ladder(WIDTH))
    return [Job(name=str(i), phases=(phase,), forward=f, backward=b, off_device=s) for i, (f, b, s) in enumerate(TIMES)]


def in_use(groups: int, iterations: int) -> float:
    engine = TaskEngine(groups * WIDTH, policy("jigsaw"), EXACT)
    for g in range(groups):
        for i, job in enumerate(group_jobs(iterations)):
            standing = Standing(serial=g * JOBS + i, arrival=0.0, total=iterations, shape=job.shape())
            engine.start(standing, job.shape(), range(g * WIDTH, (g + 1) * WIDTH), until=iterations)
    while engine.active:
        for key in engine.run(NEVER):
            engine.remove(key)
    return engine.now


def tuples(groups: int, iterations: int) -> float:
    """A heap of tuples and lists of numbers."""
    tasks = [j.shape().tasks[0] for j in group_jobs(iterations)]
    off = [s for _, _, s in TIMES]
    ready = [[WIDTH] * JOBS for _ in range(groups)]  # tasks that no device has taken: the longest is the last
    left = [[WIDTH] * JOBS for _ in range(groups)]
    rounds = [[0] * JOBS for _ in range(groups)]
    idle = [list(range(WIDTH)) for _ in range(groups)]
    queue: list[tuple[float, int, int, int, int]] = []
    now, serial = 0.0, 0
    finish = 0.0

    def dispatch(g: int) -> None:
        nonlocal serial
        waiting = ready[g]
        for j in range(JOBS):
            while waiting[j] and idle[g]:
                waiting[j] -= 1
                serial += 1
                heapq.heappush(queue, (now + tasks[j][waiting[j]], serial, g, idle[g].pop(), j))

    for g in range(groups):
        dispatch(g)
    while queue:
        now, _, g, device, j = heapq.heappop(queue)
        if device == RELEASE:
            ready[g][j] = left[g][j] = WIDTH
        else:
            idle[g].append(device)
            left[g][j] -= 1
            if not left[g][j]:
                rounds[g][j] += 1
                if rounds[g][j] < iterations:
                    serial += 1
                    heapq.heappush(queue, (now + off[j], serial, g, RELEASE, j))
                else:
                    finish = max(finish, now + off[j])
        dispatch(g)
    return finish


def generators(groups: int, iterations: int) -> float:
    """Devices and jobs as processes that yield the seconds until they go on, or None until they are woken."""
    tasks = [j.shape().tasks[0] for j in group_jobs(iterations)]
    off = [s for _, _, s in TIMES]
    Process = Generator[float | None, None, None]
    queue: list[tuple[float, int, Process]] = []
    soon: deque[Process] = deque()
    ready = [[0] * JOBS for _ in range(groups)]
    left = [[0] * JOBS for _ in range(groups)]
    asleep: list[list[Process]] = [[] for _ in range(groups)]
    barrier: dict[tuple[int, int], Process] = {}
    devices: list[Process] = []
    owners: dict[tuple[int, int], Process] = {}

    def device(g: int, me: int) -> Process:
        while True:
            for j in range(JOBS):
                if ready[g][j]:
                    ready[g][j] -= 1
                    yield tasks[j][ready[g][j]]
                    left[g][j] -= 1
                    if not left[g][j]:
                        soon.append(barrier.pop((g, j)))
                    break
            else:
                asleep[g].append(devices[me])
                yield None

    def owner(g: int, j: int) -> Process:
        for _ in range(iterations):
            ready[g][j] = left[g][j] = WIDTH
            barrier[g, j] = owners[g, j]
            soon.extend(asleep[g])
            asleep[g].clear()
            yield None
            yield off[j]

    for g in range(groups):
        for j in range(JOBS):
            owners[g, j] = owner(g, j)
            soon.append(owners[g, j])
    for me in range(groups * WIDTH):
        devices.append(device(me // WIDTH, me))
        soon.append(devices[me])
    now, serial = 0.0, 0
    while soon or queue:
        if soon:
            process = soon.popleft()
        else:
            now, _, process = heapq.heappop(queue)
        delay = next(process, None)
        if delay is not None:
            serial += 1
            heapq.heappush(queue, (now + delay, serial, process))
    return now


def lockstep(groups: int, iterations: int) -> float:
    """All groups at once in numpy, each at its own next event: for many groups of one size that share nothing."""
    tasks = np.array([j.shape().tasks[0] for j in group_jobs(iterations)])
    off = np.array([s for _, _, s in TIMES])
    now = np.zeros(groups)
    end = np.full((groups, WIDTH), NEVER)
    holder = np.zeros((groups, WIDTH), dtype=np.int64)
    release = np.full((groups, JOBS), NEVER)
    ready, left = np.full((groups, JOBS), WIDTH), np.full((groups, JOBS), WIDTH)
    rounds = np.zeros((groups, JOBS), dtype=np.int64)
    finish = 0.0
    while True:
        while True:  # each group's first idle device takes a task, until none can
            rows = np.flatnonzero(np.isinf(end).any(axis=1) & (ready > 0).any(axis=1))
            if not len(rows):
                break
            d, j = np.isinf(end[rows]).argmax(axis=1), (ready[rows] > 0).argmax(axis=1)
            ready[rows, j] -= 1
            end[rows, d] = now[rows] + tasks[j, ready[rows, j]]
            holder[rows, d] = j
        following = np.minimum(end.min(axis=1), release.min(axis=1))
        active = np.isfinite(following)
        if not active.any():
            return finish
        now[active] = following[active]
        g, d = np.nonzero(end <= now[:, None])
        end[g, d] = NEVER
        np.subtract.at(left, (g, holder[g, d]), 1)
        g, j = np.nonzero(release <= now[:, None])
        release[g, j], ready[g, j], left[g, j] = NEVER, WIDTH, WIDTH
        g, j = np.nonzero(left == 0)
        left[g, j] = -1  # between iterations
        rounds[g, j] += 1
        more = rounds[g, j] < iterations
        release[g[more], j[more]] = now[g[more]] + off[j[more]]
        if not more.all():
            finish = max(finish, float((now[g] + off[j])[~more].max()))


def engines() -> list[dict[str, Any]]:
    """Tasks per second and the makespan of every engine, the fastest of three runs."""
    few, many, rounds = 16, 2048, 40
    contest: tuple[tuple[str, Callable[[int, int], float], int], ...] = (
        ("in use: heap, all of the model", in_use, few),
        ("heap of tuples, these jobs only", tuples, few),
        ("generators on a heap (like simpy)", generators, few),
        (f"numpy in lockstep, {few} groups", lockstep, few),
        (f"numpy in lockstep, {many:,} groups", lockstep, many),
    )
    cells = []
    for name, engine, groups in contest:
        seconds, makespan = [], 0.0
        for _ in range(3 if groups == few else 1):
            began = time.perf_counter()
            makespan = engine(groups, rounds)
            seconds.append(time.perf_counter() - began)
        cells.append({"engine": name, "rate": groups * WIDTH * JOBS * rounds / min(seconds), "makespan": makespan})
    return cells

"""The measurements behind benchmarks/cluster.py: real executors, real aggregators, emulated devices."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cluster_trial as trial
from cluster_jobs import Wanted, profiles, wanted
from dovetail.cluster.coordinator.job_store import Store
from dovetail.cluster.executor import recorder
from dovetail.cluster.executor.recorder import TaskLine
from dovetail.cluster.home import Home
from dovetail.cluster.replay import play, read
from dovetail.core.job import Job

DEVICES = 8


def backlog(policy: str, spb: str, jobs: Sequence[Wanted], *, limit: float) -> dict[str, Any]:
    """All jobs submitted at once under a policy: throughput, overhead, and what the simulator predicts."""
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        home = Home(Path(folder))
        options = {"devices": DEVICES, "emulated": True, "policy": policy, "prepare": len(jobs)}
        with trial.cluster(home.path, grace=5.0, **options) as client:
            numbers = [trial.submit(client, w.text, name=w.name, spb=spb) for w in jobs]
            ended = trial.wait(client, numbers, limit=limit, pause=1.0)
        trial.finished(ended, policy)
        tasks = recorder.recorded_tasks(home.path)
        expected = sum(p.workers * p.iterations for w in jobs for p in w.job.phases)
        recorded = len({(t.job, t.iteration, t.worker) for t in tasks})
        assert recorded == expected, f"{recorded} of {expected} tasks were recorded"
        run = read(home.path)
        comparison = play(run).comparison
        overheads = [t.overhead for t in tasks if t.overhead >= 0]
        makespan, drained, done = throughput(home, tasks, {n: w.job for n, w in zip(numbers, jobs, strict=True)})
        return {
            "policy": policy,
            "spb": spb,
            "jobs": len(jobs),
            "tasks": len(tasks),
            "makespan": makespan,
            "drained": drained,
            "throughput": done / (DEVICES * drained),
            "busy": sum(t.stop - t.start for t in tasks) / (DEVICES * makespan),
            "predicted": comparison.predicted,
            "error": comparison.error,
            "jitter": run.jitter,
            "overhead": float(np.median(overheads)),
            "overhead_p90": float(np.quantile(overheads, 0.9)),
        }


def throughput(home: Home, tasks: Sequence[TaskLine], jobs: dict[int, Job]) -> tuple[float, float, float]:
    """Makespan and the time at which the queue was empty for good, in seconds; the device-seconds of work by then.

    The same figures as in `simulate.cluster.report`. The clock starts with the first task: processes take the same time
    to start under every policy.
    """
    store = Store(home.database)
    rows = {n: store.job(n) for n in jobs}
    store.close()
    begin = tasks[0].start
    end = max(t.stop for t in tasks)
    drained = max(row.started or 0.0 for row in rows.values())
    if drained <= begin:
        drained = end  # all jobs started at once
    last: dict[tuple[int, int], float] = {}
    for t in tasks:
        key = int(t.job), t.iteration
        last[key] = max(t.stop, last.get(key, 0.0))
    done = sum(jobs[n].workers * jobs[n].gang_period for (n, _), stop in last.items() if stop <= drained)
    return end - begin, drained - begin, done


def promise(*, steps: int, limit: float) -> dict[str, Any]:
    """A network-bound foreground job on all devices, alone and with background jobs in its gaps."""
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        paths = profiles(Path(folder))
        home = Home(Path(folder) / "home")
        foreground = wanted("foreground", "vgg16", paths["vgg16"], workers=DEVICES, steps=steps)
        # Tasks of 30 ms, nothing off the device, checkpoints by the clock: as many as the gaps take.
        background = trial.CHAOS_JOB
        for old, new in ((", off_device=0.005", ""), ("checkpoint_every=3", "checkpoint_every=1000000")):
            assert old in background
            background = background.replace(old, new)
        with trial.cluster(home.path, grace=5.0, devices=DEVICES, emulated=True) as client:
            alone = trial.submit(client, foreground.text, name="alone", share="foreground")
            trial.finished(trial.wait(client, [alone], limit=limit, pause=1.0), "alone")
            others = [
                trial.submit(
                    client, background, name=f"background {i}", share="background", workers=1, steps=10**6, seed=i
                )
                for i in range(2 * DEVICES)
            ]
            both = trial.submit(client, foreground.text, name="beside", share="foreground")
            ended = trial.wait(client, [both], limit=limit, pause=1.0)
            trial.finished(ended, "beside background jobs")
            shown = float(ended[both].get("slowdown") or 0.0)
            for job in others:
                trial.ask(client, "cancel", job)
        curves = [trial.curve(home, job) for job in (alone, both)]
        tasks = recorder.recorded_tasks(home.path)
    before, after = (iterations(tasks, job) for job in (alone, both))
    mine = [t for t in tasks if t.job == str(both)]
    low, high = min(t.start for t in mine), max(t.stop for t in mine)
    beside = {str(job) for job in others}
    filled = sum(max(0.0, min(t.stop, high) - max(t.start, low)) for t in tasks if t.job in beside)
    idle = DEVICES * (high - low) - sum(t.stop - t.start for t in mine)
    return {
        "iterations": steps,
        "alone": float(np.mean(before)),
        "beside": float(np.mean(after)),
        "slowdown": float(np.mean(after) / np.mean(before) - 1),
        "shown": shown,
        "filled": filled / idle,
        "idle": idle,
        "same_curve": curves[0] == curves[1],
    }


def iterations(tasks: Sequence[TaskLine], job: int) -> list[float]:
    """Seconds from the end of an iteration to that of the next, without the first few, in which times are learned."""
    last: dict[int, float] = defaultdict(float)
    for t in tasks:
        if t.job == str(job):
            last[t.iteration] = max(last[t.iteration], t.stop)
    return list(np.diff([last[i] for i in sorted(last)])[5:])


def channel(mebibytes: int, rounds: int) -> dict[str, Any]:
    """Seconds to give a job's parameters to an executor: by shared memory, and by the tensor channel on loopback."""
    import threading
    import time

    import torch

    from dovetail.cluster.job.tensor_channel import ChannelHost, join

    host = ChannelHost("127.0.0.1")
    peer = host.invite(0)
    mine, there = torch.rand(mebibytes * 2**18), torch.empty(mebibytes * 2**18)
    took: list[float] = []

    def other() -> None:
        far = join(host.address, peer.name, local="127.0.0.1")
        for _ in range(rounds):
            far.receive([there])
            far.send([there])
        far.close()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(rounds):
        began = time.perf_counter()
        peer.give([mine])
        peer.fetch(peer.take([mine]), [mine])
        took.append((time.perf_counter() - began) / 2)
    thread.join()
    peer.close()
    copies = []
    for _ in range(rounds):
        began = time.perf_counter()
        there.copy_(mine)
        copies.append(time.perf_counter() - began)
    return {
        "MiB": mebibytes,
        "shared memory": 0.0,
        "one copy": float(np.median(copies)),
        "channel": float(np.median(took)),
    }

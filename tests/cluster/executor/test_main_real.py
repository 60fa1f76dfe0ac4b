"""Executors with real aggregators and real jobs, and that a job's memory is freed when it is unloaded."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path

import msgspec
import torch

from dovetail.cluster.executor import recorder
from dovetail.cluster.home import arena_name
from dovetail.cluster.transport import messages as m
from tests.cluster.executor.harness import NODE, harness, wait

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob

ballast = torch.ones({ballast})


def data():
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(256, 8, generator=made), torch.randint(0, 2, (256,), generator=made))


def loss(model, batch):
    print("a task of", __name__)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


job = TrainingJob(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)),
    data=data,
    loss=loss,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    steps={steps},
    batch=32,
    workers={workers},
    task_seconds=({seconds}, {seconds}),
    off_device=0.02,
)
"""


def write(home: Path, job: str, *, steps: int = 100, workers: int = 2, ballast: int = 1, seconds: float = 0.01) -> Path:
    folder = home / "jobs" / job
    folder.mkdir(parents=True)
    (folder / "job.py").write_text(JOB.format(steps=steps, workers=workers, ballast=ballast, seconds=seconds))
    return folder


def lease(aggregator: m.Hello, folder: Path) -> m.GrantLease:
    """Job 1 is promised its speed, job 2 runs in the background."""
    return m.GrantLease(
        job=aggregator.job,
        attempt=aggregator.attempt,
        aggregator=aggregator.address,
        node=NODE,
        folder=str(folder),
        priority=(aggregator.job == "2", 0.0, 0.0, int(aggregator.job)),
        foreground=aggregator.job == "1",
    )


def losses(folder: Path) -> list[bytes]:
    path = folder / "losses.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def await_progress(folder: Path, iterations: int) -> None:
    before = len(losses(folder))
    wait(lambda: len(losses(folder)) > before + iterations, f"progress of job {folder.name}")


def await_log(folder: Path, text: str) -> None:
    wait(lambda: text in (folder / "log.txt").read_text(), f"{text!r} in the log of job {folder.name}")


def test_real_jobs_share_devices_give_the_same_losses_and_outlive_an_executor(tmp_path: Path) -> None:
    """A foreground and a background job with the same file on two devices, one of which is killed on the way.

    Each runs until it has passed what the test waits for, however slow the machine is, and is stopped then.
    """
    with harness(tmp_path) as at:
        folders = {"1": write(at.home, "1", steps=10**6), "2": write(at.home, "2", steps=10**6, seconds=0.002)}
        pids = at.fork_roles(
            {"role": "executor", "device": 0},
            {"role": "executor", "device": 1},
            {"role": "aggregator", "job": "1", "attempt": 1, "node": NODE},
            {"role": "aggregator", "job": "2", "attempt": 1, "node": NODE},
        )
        aggregators = [hello for hello in at.coordinator.all(m.Hello) if hello.role == "aggregator"]
        at.send(*(lease(hello, folders[hello.job]) for hello in aggregators))  # aggregators ignore it
        four = {("1", 0), ("1", 1), ("2", 0), ("2", 1)}
        wait(lambda: {(t.job, t.device) for t in recorder.recorded_tasks(at.home)} == four, "both jobs on both devices")
        os.kill(pids[0], signal.SIGKILL)
        for job, pid in (("1", pids[2]), ("2", pids[3])):
            await_progress(folders[job], 50)
            os.kill(pid, signal.SIGTERM)
            await_log(folders[job], "stopped after")
        assert not at.coordinator.all(m.Failed)
        first, second = (losses(folder) for folder in folders.values())
        common = min(len(first), len(second))
        assert common > 50 and first[:common] == second[:common]
        recorder.read(at.home).check()
        for job, folder in folders.items():
            lines = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("a task")]
            assert set(lines) == {f"a task of dovetail_job_{job}"} and len(lines) >= 2 * len(losses(folder))


def test_closing_a_job_frees_its_model_and_its_data(tmp_path: Path) -> None:
    from dovetail.cluster.aggregator.training import Training
    from dovetail.cluster.executor import loader
    from dovetail.cluster.job import spec

    floats = 16 * 2**20
    folder = write(tmp_path, "7", workers=1, ballast=floats)
    memory = arena_name(tmp_path, "7", 1)
    training = Training(spec.load(folder / "job.py"), memory)
    try:
        granted = m.GrantLease(
            job="7", attempt=1, aggregator=("", 0), node=NODE, folder=str(folder), priority=(False, 0.0, 0.0, 7)
        )
        before, precision = _resident_bytes(), torch.get_float32_matmul_precision()
        opened = loader.open_job(granted, m.Welcome(memory=memory), False, "127.0.0.1")
        done = opened.run(m.Task(iteration=0, worker=0, samples=(0, 32)))
        assert done is not None and done.samples == 32
        assert torch.get_float32_matmul_precision() == precision, "one job's setting must not reach another"
        assert _resident_bytes() > before + 3 * floats
        assert opened._runner is not None
        model = weakref.ref(opened._runner.model)
        opened.close()
        gc.collect()
        assert model() is None
        assert _resident_bytes() < before + floats
    finally:
        training.arena.unlink()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_messages_without_optional_fields_are_read() -> None:
    """Width and time of an offer are optional."""
    plain = {"type": "Offered", "iteration": 1, "tasks": [{"type": "Task", "iteration": 1, "worker": 0}]}
    assert msgspec.convert(plain, m.Offered) == m.Offered(iteration=1, tasks=(m.Task(iteration=1, worker=0),))

"""A cluster whose devices are accelerators: their names, and jobs that share two emulated ones of little memory."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from dovetail.cluster import accelerators, up_down
from dovetail.cluster.aggregator import checkpoint
from dovetail.cluster.aggregator.training import Training
from dovetail.cluster.executor import recorder
from dovetail.cluster.executor.loader import open_runner
from dovetail.cluster.home import Home
from dovetail.cluster.job import spec
from dovetail.cluster.job.submission import Options
from dovetail.cluster.transport.messages import Alive, Task
from dovetail.cluster.transport.wire import Connection
from dovetail.core.errors import Error

from .trial import trial

STEPS = 80
WEIGHTS = 4 * (4 * 9 + 4 + 2 * 4 + 256 * 512 + 512 + 512 * 4 + 4)
"""Bytes of the job's parameters: it needs as many again for gradients."""
JOB = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob
from dovetail.emulate import accelerator

if accelerator.is_loaded():
    accelerator.set_durations(jitter=0.0003)


def model():
    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(first, nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4))


def data():
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 1, 8, 8, generator=made), torch.randint(0, 4, (64,), generator=made))


job = TrainingJob(
    model=model, data=data, loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.003), steps={STEPS}, batch=16, workers=2,
    checkpoint_every=5,
)
"""
GANG = """
import os

print("on", os.environ["DOVETAIL_ACCELERATOR"])
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gpu", "expected names like cuda:0,cuda:1 or emu:0, got 'gpu'"),
        ("cuda:0,", "got ''"),
        ("cuda:00", "got 'cuda:00'"),
        ("CUDA:0", "got 'CUDA:0'"),
        ("cuda:1,cuda:0,cuda:1", "expected each device once, got cuda:1 2 times"),
        ("cuda:0,emu:0", "expected devices of one type, got cuda and emu"),
        ("cpu:0", "a CPU's cores are the devices that --devices counts"),
    ],
)
def test_names_that_are_wrong_are_refused_in_one_line(text: str, line: str) -> None:
    with pytest.raises(Error, match=r"^--accelerators: ") as caught:
        accelerators.parse(text)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_names_are_read_with_spaces_and_an_emulated_accelerator_is_known_by_its_name() -> None:
    assert accelerators.parse("cuda:0, cuda:10") == ("cuda:0", "cuda:10")
    assert accelerators.is_emulated("emu:3") and not accelerators.is_emulated("cuda:0")
    assert not accelerators.is_emulated("")


def test_accelerators_are_not_combined_with_other_devices_and_those_that_are_not_there_are_named(
    tmp_path: Path,
) -> None:
    for other in ({"devices": 2}, {"emulated": True}, {"engine": "ray"}):
        with pytest.raises(Error, match=r"^--accelerators: the devices are those that it names"):
            up_down.up(tmp_path, accelerators="emu:0", **other)
    with pytest.raises(Error, match=r"^accelerator xpu:0: expected one of this type, torch finds no accelerator here$"):
        up_down.up(tmp_path, accelerators="xpu:0")
    assert not Home(tmp_path).settings_file.exists(), "nothing was started"


@pytest.mark.usefixtures("one_thread")
def test_three_jobs_on_two_accelerators_with_room_for_one_each_outlive_an_executor_with_the_cpus_losses(
    tmp_path: Path,
) -> None:
    room = 2 * WEIGHTS + WEIGHTS // 2
    with trial.cluster(tmp_path, accelerators="emu:0,emu:1", device_bytes=room) as client:
        shown = client.status()
        assert [d["accelerator"] for d in shown["devices"]] == ["emu:0", "emu:1"]
        assert shown["emulated"], "whoever looks on is told that these devices imitate others"
        jobs = [trial.submit(client, JOB, name=f"job {seed}", seed=seed) for seed in range(3)]
        home = trial.home_of(client)
        while not all(len(checkpoint.losses(home.job(job))) > 5 for job in jobs):
            assert not any(ended["reason"] for ended in client.status()["ended"])
            time.sleep(0.02)
        kill(home, "executor 1")
        assert min(len(checkpoint.losses(home.job(job))) for job in jobs) < STEPS, "in the middle"
        ended = trial.wait(client, jobs, limit=trial.HANG)
        trial.finished(ended, "on accelerators")
        gang = int(client.submit({"text": GANG, "kind": "gang", "gang": 2})["job"])
        trial.finished(trial.wait(client, [gang], limit=trial.HANG), "a gang")
        said = (home.job(gang) / "log.txt").read_text()
        assert "rank 0: on emu:0" in said and "rank 1: on emu:1" in said
        order = [task.job for task in recorder.recorded_tasks(tmp_path) if task.device == 0]
    for number, job in enumerate(jobs):
        assert checkpoint.losses(home.job(job)) == on_cpu(home.job(job) / "job.py", seed=number)
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes >= STEPS // 2, "jobs take turns on a device that has room for one: they leave it and come back"
    assert trial.left(home) == []


def kill(home: Home, process: str) -> None:
    connection = Connection(home.connect())
    alive = connection.receive(timeout=trial.HANG)
    connection.close()
    assert isinstance(alive, Alive)
    os.kill(alive.processes[process], signal.SIGKILL)


def on_cpu(file: Path, *, seed: int) -> list[float]:
    """The losses of the same job without a cluster."""
    job = spec.load(file, Options(seed=seed))
    training = Training(job, f"dovetail-test-{os.getpid()}-{seed}")
    try:
        runner = open_runner(job, training.arena.name, emulated=False)
        found = []
        for iteration in range(job.steps):
            tasks = [Task(iteration=iteration, worker=w, samples=training.division.samples(w)) for w in range(2)]
            found.append(training.update({t.worker: runner.run(t) for t in tasks}, training.depths()))
        return found
    finally:
        training.arena.unlink()

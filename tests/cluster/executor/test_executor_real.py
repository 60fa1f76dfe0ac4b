"""Executors with real aggregators and real jobs; and that a job which leaves takes its memory with it."""

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
from tests.cluster.executor.acting import NODE, stage, wait

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
    print("a step of", __name__)
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


def grants(aggregators: list[m.Hello], folders: dict[str, Path]) -> list[m.Grant]:
    return [
        m.Grant(
            job=hello.job,
            epoch=hello.epoch,
            aggregator=hello.address,
            node=NODE,
            folder=str(folders[hello.job]),
            rank=(hello.job == "2", 0.0, 0.0, int(hello.job)),
            foreground=hello.job == "1",
        )
        for hello in aggregators
    ]


def test_real_jobs_share_devices_give_the_same_losses_and_outlive_an_executor(tmp_path: Path) -> None:
    """A foreground job and a filler with the same file on two devices, one of which is killed on the way."""
    with stage(tmp_path) as at:
        # Long enough for both executors to get to both jobs, also where one of them is slow to open a job.
        folders = {"1": write(at.home, "1", steps=300), "2": write(at.home, "2", steps=300, seconds=0.002)}
        pids = at.cast(
            {"role": "executor", "device": 0},
            {"role": "executor", "device": 1},
            {"role": "aggregator", "job": "1", "epoch": 1, "node": NODE},
            {"role": "aggregator", "job": "2", "epoch": 1, "node": NODE},
        )
        hellos = at.head.all(m.Hello)
        for grant in grants([h for h in hellos if h.role == "aggregator"], folders):
            for connection in at.head.connections:
                connection.send(grant)  # aggregators do not listen to it
        four = {("1", 0), ("1", 1), ("2", 0), ("2", 1)}
        wait(lambda: {(t.job, t.device) for t in recorder.ran(at.home)} == four, "both jobs on both", timeout=60)
        os.kill(pids[0], signal.SIGKILL)
        wait(lambda: len({f.job for f in at.head.all(m.Finished)}) == 2, "both jobs' ends", timeout=60)
        assert not at.head.all(m.Failed)
        losses = [(folder / "losses.jsonl").read_bytes() for folder in folders.values()]
        assert losses[0] == losses[1] and len(losses[0].splitlines()) == 300
        recorder.read(at.home).check()
        for job, folder in folders.items():
            words = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("a step")]
            assert set(words) == {f"a step of dovetail_job_{job}"} and len(words) >= 600


def test_a_job_that_leaves_takes_its_model_and_its_data_with_it(tmp_path: Path) -> None:
    from dovetail.cluster.aggregator.training import Training
    from dovetail.cluster.executor import loader
    from dovetail.cluster.job import spec

    floats = 16 * 2**20
    folder = write(tmp_path, "7", workers=1, ballast=floats)
    memory = arena_name(tmp_path, "7", 1)
    training = Training(spec.load(folder / "job.py"), memory)
    try:
        grant = m.Grant(
            job="7", epoch=1, aggregator=("", 0), node=NODE, folder=str(folder), rank=(False, 0.0, 0.0, 7)
        )  # fmt: skip
        before, precision = _resident_bytes(), torch.get_float32_matmul_precision()
        opened = loader.open_job(grant, m.Welcome(memory=memory), False, "127.0.0.1")
        done = opened.run(m.Task(iteration=0, worker=0, samples=(0, 32)))
        assert done is not None and done.samples == 32
        assert torch.get_float32_matmul_precision() == precision, "what one job sets, others compute with"
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


def test_messages_with_new_fields_are_read_without_them() -> None:
    """An aggregator that says neither how many nor when is understood."""
    plain = {"type": "Offered", "iteration": 1, "tasks": [{"type": "Task", "iteration": 1, "worker": 0}]}
    assert msgspec.convert(plain, m.Offered) == m.Offered(iteration=1, tasks=(m.Task(iteration=1, worker=0),))

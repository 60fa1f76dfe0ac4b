"""Runs an executor under test against fake peers (`fakes`), on real sockets.

The executor is a process of its own (`python -m tests.cluster.executor.harness SETTINGS`) whose jobs are fakes too: a
job's folder holds `fake.json`, which says how long its tasks take and what its code does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.cluster.executor import recorder
from dovetail.cluster.transport import messages as m
from dovetail.emulate.launch import held_port
from tests.cluster.executor.fakes import KEY, LIMIT, Behaviour, FakeAggregator, FakeCoordinator, FakeServer
from tests.paths import ROOT

NODE = "here"


@dataclass
class Harness:
    """A home, a coordinator, and executors that end with the test."""

    home: Path
    coordinator: FakeCoordinator
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    servers: list[FakeServer] = field(default_factory=list)

    def executor(self, device: int = 0, **more: Any) -> subprocess.Popen[bytes]:
        settings = {"home": str(self.home), "device": device, "coordinator": self.coordinator.address, **more}
        before = len(self.coordinator.all(m.Hello))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.executor.harness", json.dumps(settings)],
            env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": os.environ["PATH"]},
            cwd=self.home,
        )
        self.processes.append(process)
        wait(lambda: len(self.coordinator.all(m.Hello)) > before, "an executor's Hello")
        return process

    def fork_roles(self, *roles: dict[str, Any]) -> list[int]:
        """Real executors and aggregators, forked from one process that has imported torch; their process ids."""
        common = {"home": str(self.home), "coordinator": self.coordinator.address}
        given = json.dumps([common | role for role in roles])
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.executor.harness", "fork", given],
            env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
            cwd=self.home,
            stdout=subprocess.PIPE,
        )
        self.processes.append(process)
        assert process.stdout is not None
        with process.stdout:
            pids = json.loads(process.stdout.readline())
        wait(lambda: len(self.coordinator.all(m.Hello)) >= len(roles), "everybody's Hello")
        return [int(pid) for pid in pids]

    def folder(self, job: str, **fake: Any) -> Path:
        """A job's folder; `fake` says what its tasks do (see `FakeJob`)."""
        folder = self.home / "jobs" / job
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fake.json").write_text(json.dumps(fake))
        return folder

    def aggregator(
        self, job: str, behaviour: Behaviour, *, attempt: int = 1, first: int = 0, **fake: Any
    ) -> FakeAggregator:
        self.folder(job, **fake)
        made = FakeAggregator(job, behaviour, attempt=attempt, first=first)
        made.start()
        self.servers.append(made)
        return made

    def lease(self, aggregator: FakeAggregator, *, order: float = 0.0, **more: Any) -> m.GrantLease:
        """The message that grants every executor a lease for the job."""
        background = more.pop("background", False)
        return m.GrantLease(
            job=aggregator.job,
            attempt=aggregator.attempt,
            aggregator=aggregator.address,
            node=NODE,
            folder=str(self.home / "jobs" / aggregator.job),
            priority=(background, order, 0.0, int(aggregator.job)),
            **more,
        )

    def grant(self, aggregator: FakeAggregator, *, order: float = 0.0, **more: Any) -> None:
        self.send(self.lease(aggregator, order=order, **more))

    def send(self, *messages: m.Message) -> None:
        """Sends the messages to all executors, which read them together."""
        for connection in self.coordinator.connections:
            connection.send(*messages)

    def restart_coordinator(self) -> None:
        """The next coordinator listens where the one before, which has ended, did."""
        self.coordinator = FakeCoordinator(self.coordinator.address[1])
        self.coordinator.start()


@contextlib.contextmanager
def harness(home: Path) -> Iterator[Harness]:
    (home / "key").write_text(KEY)
    with held_port() as port:
        coordinator = FakeCoordinator(port)
        coordinator.start()
        made = Harness(home, coordinator)
        try:
            yield made
        finally:
            for process in made.processes:
                process.kill()
                process.wait()
            for server in [made.coordinator, *made.servers]:
                server.end()
                assert server.error is None, server.error


def wait(condition: Callable[[], Any], what: str, *, timeout: float = LIMIT) -> None:
    """Waits for an event; `timeout` is for hangs."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.01)


def wait_for_tasks(at: Harness, count: int) -> list[recorder.TaskLine]:
    """The recorded tasks, once there are so many."""
    wait(lambda: len(recorder.recorded_tasks(at.home)) >= count, f"{count} recorded tasks")
    return recorder.recorded_tasks(at.home)


def task_lines(at: Harness) -> list[recorder.TaskLine]:
    """The recorded tasks as they were written, on the machine's own clock."""
    return [line for line in recorder.lines(at.home) if isinstance(line, recorder.TaskLine)]


def lease_lines(at: Harness) -> list[recorder.LeaseLine]:
    return [line for line in recorder.lines(at.home) if isinstance(line, recorder.LeaseLine)]


class FakeJob:
    """A fake job, loaded: its tasks sleep, print and raise as `fake.json` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fake: dict[str, Any] = json.loads((folder / "fake.json").read_text())
        self.ran = 0

    def claim(self, task: m.Task) -> bool:
        """Unless the test says that another executor has it."""
        return not (self.folder / f"taken {task.claim}").exists()

    def forget(self, number: int) -> None:
        (self.folder / "forgotten").write_text(str(number))

    def run(self, task: m.Task) -> m.Done:
        start = time.monotonic()
        self.ran += 1
        if "code" in self.fake:
            exec(self.fake["code"], {"task": task, "folder": self.folder})
        time.sleep(self.fake.get("seconds", task.seconds))
        return m.Done(
            iteration=task.iteration, worker=task.worker, loss=0.0, samples=1, start=start, stop=time.monotonic()
        )

    def prefetch(self, iteration: int) -> None:
        pass

    def close(self) -> None:
        (self.folder / "closed").write_text(str(self.ran))


def open_fake_job(lease: m.GrantLease, welcome: m.Welcome, emulated: bool, local: str) -> FakeJob:
    job = FakeJob(Path(lease.folder))
    exec(job.fake.get("load", ""), {})
    return job


def fork_roles(roles: list[dict[str, Any]]) -> None:
    """Forks every role and waits for all; they die with this process."""
    import torch

    from dovetail.cluster.engines.process import run
    from dovetail.core.processes import die_with_parent

    torch.set_num_threads(1)
    pids = []
    for settings in roles:
        role = settings.pop("role")
        settings["key_file"] = settings["home"] + "/key"
        if role == "executor":
            settings = {"node": NODE, "kind": "emulated", "core": -1} | settings
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os._exit(run(role, settings))
        pids.append(pid)
    os.write(1, json.dumps(pids).encode() + b"\n")
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        fork_roles(json.loads(sys.argv[2]))
        sys.exit()
    from dovetail.cluster.executor import main

    given = json.loads(sys.argv[1])
    given["coordinator"] = tuple(given["coordinator"])
    home = Path(given.pop("home"))
    main.ANSWER = given.pop("answer", main.ANSWER)
    settings = {"node": NODE, "kind": "emulated", "core": -1} | given
    main.main(**settings, home=home, key_file=home / "key", opener=open_fake_job)

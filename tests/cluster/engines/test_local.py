"""A real cluster on this machine, by its command line: it starts, trains, survives any kill -9, leaves nothing behind.

All tests of the file share one cluster and run in order; every test leaves it running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.cluster import up_down
from dovetail.cluster.client import Client, Unreachable
from dovetail.cluster.executor import recorder
from dovetail.cluster.home import SHARED_MEMORY, Address, Home, cluster_id
from dovetail.cluster.transport.messages import Shutdown
from dovetail.cluster.transport.wire import Connection
from tests.cli.command import run, shell

JOB = """
import os
import torch
from torch import nn
from dovetail import TrainingJob

def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

def loss(model, batch):
    BODY
    return ((model(batch[0]) - batch[1]) ** 2).mean()

job = TrainingJob(
    model=lambda: nn.Linear(8, 1), data=data, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    steps=STEPS, batch=8, workers=2, task_seconds=(0.005, 0.005), checkpoint_every=10,
)
"""
GANG = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1], sorted(os.environ), flush=True)
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
"""


HANG = 600.0
"""Seconds after which something that is waited for will not happen any more."""


def until(true: Callable[[], Any], timeout: float = HANG) -> None:
    limit = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)


def processes(home: Path) -> set[int]:
    """All processes of the cluster: the supervisor's and the coordinator's command lines name the home."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if str(home).encode() in words and b"dovetail.cluster" in b" ".join(words) and state != "Z":
                    found.add(int(entry.name))
    return found


def refused(address: Address) -> bool:
    """Whether nothing listens there any more; the kernel may take a moment to close the sockets of a killed process."""
    try:
        socket.create_connection((address.host, address.port), timeout=1.0).close()
    except OSError:
        return True
    return False


def answers(client: Client) -> bool:
    with contextlib.suppress(Unreachable):
        client.status()
        return True
    return False


def arenas(home: Path) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"dovetail-{cluster_id(home)}-*"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("cluster") / "home"
    os.environ["SECRET_OF_THE_OPERATOR"] = "12345"
    try:
        up_down.up(path, devices=2, emulated=True, timeout=HANG)
        yield path
    finally:
        del os.environ["SECRET_OF_THE_OPERATOR"]
        up_down.down(path, grace=0.0, timeout=HANG)
        assert not processes(path)


@pytest.fixture
def client(home: Path) -> Client:
    return Client(home, timeout=HANG)


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    def write(body: str = "pass", *, steps: int = 30, name: str = "job") -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(JOB.replace("BODY", body).replace("STEPS", str(steps)))
        return path

    return write


def submit(home: Path, path: Path, *options: str) -> int:
    done = run("cluster", "submit", path, "--json", "--home", home, *options)
    assert done.exit_code == 0, done.stderr
    number: int = json.loads(done.stdout)["job"]
    return number


def running(client: Client, job: int, *, iteration: int = 1) -> None:
    until(lambda: client.job(job)["iteration"] >= iteration or client.job(job)["state"] == "failed")
    assert client.job(job)["state"] == "running", client.job(job)


def test_up_twice_says_that_it_runs(home: Path) -> None:
    address, ran = up_down.up(home)
    assert ran and address.supervisor in processes(home)
    done = run("cluster", "up", "--home", home)
    assert done.exit_code == 0 and done.stdout.startswith("runs already: 2 emulated devices, policy jigsaw, http://127")
    assert "not as asked for" not in done.stdout
    other = run("cluster", "up", "--devices", "5", "--policy", "gang-fifo", "--home", home)
    assert other.exit_code == 0 and "--devices, --policy: not as asked for" in other.stdout


def test_a_job_runs_from_the_command_line_to_its_end(home: Path, job_file: Callable[..., Path]) -> None:
    path = job_file("print('sees', sorted(os.environ))", name="first job")
    done = shell("cluster", "submit", path, "--steps", "20", "--wait", "--home", home, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, "job 1 (first job): finished\n"), done.stderr
    logs = run("cluster", "logs", "1", "--home", home).stdout
    assert "finished: 20 iterations" in logs and "sees" in logs
    assert "SECRET_OF_THE_OPERATOR" not in logs  # jobs see a scrubbed environment
    assert run("cluster", "why", "1", "--home", home).stdout == "job 1 (first job): finished\n  finished\n"
    shown = run("cluster", "status", "--home", home).stdout
    assert "2 emulated devices" in shown and "20" in shown
    data = json.loads(run("cluster", "status", "--json", "--home", home).stdout)
    assert data["ended"][0]["loss"] > 0 and data["counts"] == {"finished": 1}
    until(lambda: len(Client(home).timeline()["spans"]) >= 20)  # written twice a second
    assert Client(home).timeline()["emulated"]
    assert not arenas(home)


def test_a_killed_coordinator_is_started_again_and_jobs_go_on_meanwhile(
    home: Path, client: Client, job_file: Callable[..., Path]
) -> None:
    job = submit(home, job_file(steps=100_000))
    running(client, job)
    before = processes(home)
    coordinator = Home(home).address().coordinator  # type: ignore[union-attr]
    os.kill(coordinator, signal.SIGKILL)
    # The command asks again for ten seconds; a loaded machine may need longer to start a coordinator.
    done = shell("cluster", "submit", job_file(), "--json", "--home", home, timeout=HANG)
    if done.returncode:
        assert "no cluster answers" in done.stderr, done.stderr
        until(lambda: Home(home).address().coordinator != coordinator)  # type: ignore[union-attr]
        until(lambda: answers(client))
        done = shell("cluster", "submit", job_file(), "--json", "--home", home, timeout=HANG)
    assert done.returncode == 0, done.stderr
    at = client.job(job)
    assert at["epoch"] == 1 and at["state"] == "running"
    running(client, job, iteration=at["iteration"] + 1)
    after = processes(home)
    assert before - {coordinator} <= after  # no other process was started again
    until(lambda: all(d["ready"] for d in client.status()["devices"]))
    second = json.loads(done.stdout)["job"]
    until(lambda: client.job(second)["state"] == "finished")
    assert run("cluster", "pause", str(job), "--home", home).stdout == f"job {job} (job): paused\n"
    until(lambda: client.job(job)["devices"] == [] and not arenas(home))
    kept = client.job(job)["checkpoint"]
    assert run("cluster", "resume", str(job), "--home", home).exit_code == 0
    running(client, job, iteration=kept + 1)
    assert client.job(job)["epoch"] == 2
    assert run("cluster", "cancel", str(job), "--home", home).stdout == f"job {job} (job): cancelled\n"
    until(lambda: not arenas(home))


def test_a_job_that_keeps_failing_ends_with_its_reason_and_disturbs_no_other(
    home: Path, client: Client, job_file: Callable[..., Path]
) -> None:
    victim = submit(home, job_file(steps=100_000, name="victim"))
    running(client, victim)
    crash = submit(home, job_file("os.kill(os.getpid(), 11)", name="crash"))
    raises = submit(home, job_file("raise ValueError('no such thing')", name="raises"))
    number = submit(home, job_file("return (model.weight * float('nan')).sum()", name="nan"))
    endless = submit(home, job_file("while True: pass", name="endless"), "--task-timeout", "0.5")
    for job, expected in ((crash, "SIGSEGV"), (raises, "no such thing"), (number, "nan"), (endless, "0.5 s")):
        until(lambda j=job: client.job(j)["state"] == "failed")  # type: ignore[misc]
        assert expected in client.job(job)["reason"].replace("NaN", "nan"), client.job(job)
    found = client.job(victim)
    assert found["state"] == "running" and found["epoch"] == 1 and found["strikes"] == 0
    running(client, victim, iteration=found["iteration"] + 1)
    client.cancel(victim)


def test_a_gang_runs_one_rank_per_device(home: Path, client: Client, tmp_path: Path) -> None:
    script = tmp_path / "gang.py"
    script.write_text(GANG)
    done = shell("cluster", "submit", "--gang", "2", script, "--wait", "--home", home, "--", "--lr", timeout=HANG)
    assert done.returncode == 0, done.stderr + done.stdout
    number = client.jobs(limit=1)[0]["job"]
    text = client.logs(number)["text"]
    assert "rank 0 of 2 --lr" in text and "rank 1 of 2 --lr" in text
    assert "SECRET_OF_THE_OPERATOR" not in text


def test_after_kill_9_of_the_supervisor_nothing_runs_and_the_next_up_continues(
    home: Path, client: Client, job_file: Callable[..., Path]
) -> None:
    job = submit(home, job_file(steps=300))
    running(client, job, iteration=12)
    queued = submit(home, job_file(), "--foreground", "--workers", "1")
    address = Home(home).address()
    assert address is not None
    os.kill(address.supervisor, signal.SIGKILL)
    until(lambda: not processes(home))
    until(lambda: not arenas(home))
    until(lambda: refused(address))
    with pytest.raises(Unreachable, match="no cluster runs in"):
        client.status()
    _, ran = up_down.up(home, devices=2, emulated=True, timeout=HANG)
    assert not ran
    for number in (job, queued):
        until(lambda n=number: client.job(n)["state"] in ("finished", "failed"))  # type: ignore[misc]
        assert client.job(number)["state"] == "finished", client.job(number)
    assert client.job(job)["epoch"] == 2  # from its checkpoint


def test_down_leaves_no_process_socket_port_or_memory(
    home: Path, client: Client, job_file: Callable[..., Path]
) -> None:
    job = submit(home, job_file(steps=100_000))
    running(client, job, iteration=3)
    address = Home(home).address()
    assert address is not None
    done = run("cluster", "down", "--grace", f"{HANG:g}", "--home", home)
    assert (done.exit_code, done.stdout) == (0, "down\n"), done.stderr
    assert not processes(home) and not arenas(home)
    assert not (home / "supervisor.sock").exists() and not (home / "address.json").exists()
    for port in (address.port, address.control[1]):
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            pass
    assert run("cluster", "down", "--home", home).stdout == "no cluster was running\n"
    recorded = {t.iteration for t in recorder.recorded_tasks(home)}
    up_down.up(home, devices=2, emulated=True, timeout=HANG)
    found = client.job(job)
    assert found["state"] in ("preparing", "running") and found["checkpoint"] >= 3  # `down` waited for it
    running(client, job, iteration=found["checkpoint"] + 1)
    assert recorded >= set(range(found["checkpoint"]))  # and for the executors' last spans
    client.cancel(job)


def test_a_shutdown_counts_although_its_sender_closed_the_connection_at_once(tmp_path: Path) -> None:
    """The supervisor sends the first message, and finds the connection closed."""
    home = tmp_path / "home"
    address, _ = up_down.up(home, devices=1, emulated=True, timeout=HANG)
    os.kill(address.supervisor, signal.SIGSTOP)
    try:
        connection = Connection(Home(home).connect())
        connection.send(Shutdown())
        connection.close()
    finally:
        os.kill(address.supervisor, signal.SIGCONT)
    try:
        until(lambda: Home(home).supervisor() is None)
    finally:
        up_down.down(home, timeout=HANG)
    assert not processes(home) and not arenas(home)

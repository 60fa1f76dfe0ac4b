"""A cluster for trials: started in a folder of its own, always ended, searched for leftovers; and random kills.

Used by benchmarks/cluster.py and by the tests.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.cluster import up_down
from dovetail.cluster.client import Client, RequestRefused, Unreachable
from dovetail.cluster.coordinator.job_store import Store
from dovetail.cluster.home import SHARED_MEMORY, Home, cluster_id
from dovetail.cluster.transport.messages import Alive
from dovetail.cluster.transport.wire import Connection, Lost


class Unfinished(Exception):
    """Jobs that should have finished have not."""


HANG = 300.0
"""Seconds after which a cluster that does not answer never will."""
ENDED = ("finished", "failed", "cancelled")
CHAOS_JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import TrainingJob


def model():
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def data():
    x = torch.randn(240, 16, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x[:, :4].argmax(1))


job = TrainingJob(
    name="chaos", model=model, data=data, steps=40, batch=24, workers=2, checkpoint_every=3,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7),
    task_seconds=(0.010, 0.020), off_device=0.005,
)
"""
"""A job with all that a checkpoint must restore: momenta, batch norm, dropout, a schedule; partial depth by option."""


@contextlib.contextmanager
def cluster(home: Path | None = None, *, grace: float = 0.0, **options: Any) -> Iterator[Client]:
    """A running cluster in `home`, or in a temporary folder. Without `grace` its processes are killed at the end."""
    with contextlib.ExitStack() as stack:
        if home is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-trial-")))
        stack.callback(up_down.down, home, grace=grace, timeout=HANG)
        up_down.up(home, timeout=HANG, **options)
        yield Client(home, timeout=HANG)


def home_of(client: Client) -> Home:
    assert client.home is not None, "by a folder, not by a URL"
    return client.home


def ask(client: Client, verb: str, *given: Any, limit: float = HANG, **named: Any) -> Any:
    """Calls a method of the client, again while the coordinator is being restarted."""
    end = time.monotonic() + limit
    while True:
        try:
            return getattr(client, verb)(*given, **named)
        except Unreachable:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def submit(client: Client, text: str, *, name: str, share: str = "normal", **options: Any) -> int:
    """The number of the new job."""
    request = f"{name}-{os.urandom(6).hex()}".replace(" ", "-")
    body = {"text": text, "name": name, "share": share, "options": options, "request": request}
    return int(ask(client, "submit", body)["job"])


def wait(client: Client, jobs: Sequence[int], *, limit: float, pause: float = 0.2) -> dict[int, dict[str, Any]]:
    """Waits until they have ended, for `limit` seconds at most: what the cluster says of each."""
    end = time.monotonic() + limit
    found: dict[int, dict[str, Any]] = {}
    while time.monotonic() < end:
        for job in jobs:
            if found.get(job, {}).get("state") not in ENDED:
                found[job] = ask(client, "job", job)
        if all(found[job]["state"] in ENDED for job in jobs):
            break
        time.sleep(pause)
    return found


def finished(ended: dict[int, dict[str, Any]], what: str) -> None:
    """Raises Unfinished if one has not finished, with what the cluster says of it."""
    rest = [f"{e['name']}: {e['state']} at {e['iteration']} {e['reason']}" for e in ended.values()
            if e["state"] != "finished"]  # fmt: skip
    if rest:
        raise Unfinished(f"{what}: {'; '.join(rest)}")


def curve(home: Home, job: int) -> bytes:
    """The file of its losses."""
    return (home.job(job) / "losses.jsonl").read_bytes()


# -- what is left --


def processes(home: Path) -> dict[int, str]:
    """Processes of a home's cluster: the home is in their command line, or is their working folder."""
    found = {}
    name = str(Path(home).resolve())
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if name in command or str((entry / "cwd").readlink()).startswith(name):
                found[int(entry.name)] = command
    return found


def memory(home: Path) -> list[str]:
    return sorted(p.name for p in SHARED_MEMORY.glob(f"dovetail-{cluster_id(home)}*"))


def leases(home: Home) -> list[int]:
    """Jobs that have a lease in the store."""
    store = Store(home.database)
    try:
        return [lease.job for lease in store.leases(open_only=True)]
    finally:
        store.close()


def left(home: Home, *, patience: float = HANG) -> list[str]:
    """What a cluster that has ended left behind. The kernel may need a moment to remove it."""
    end = time.monotonic() + patience
    while True:
        found = [f"process {pid}: {name}" for pid, name in processes(home.path).items()] + memory(home.path)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.05)


# -- chaos --


MOST_STRIKES = 3


@dataclass
class Killer:
    """kill -9 of processes that a seeded generator chooses among those that run."""

    home: Home
    seed: int = 0
    most: int = 10**9
    """Kills at most."""
    killed: dict[str, int] = field(default_factory=lambda: {"executor": 0, "aggregator": 0, "coordinator": 0})

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def kill(self) -> str:
        """Kills one process; its name, or "" if there was none of the chosen kind."""
        if sum(self.killed.values()) >= self.most:
            return ""
        kind = self._random.choice(("executor", "executor", "aggregator", "aggregator", "coordinator"))
        victims = self._victims(kind)
        if not victims:
            return ""
        name, pid = self._random.choice(victims)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        self.killed[kind] += 1
        return name

    def _victims(self, kind: str) -> list[tuple[str, int]]:
        if kind == "coordinator":
            address = self.home.address()
            return [("coordinator", address.coordinator)] if address and address.coordinator > 1 else []
        try:
            connection = Connection(self.home.connect())
        except OSError:
            return []
        try:
            first = connection.receive(timeout=5.0)
        except Lost:
            return []
        finally:
            connection.close()
        if not isinstance(first, Alive):
            return []  # the supervisor is busy
        return sorted((key, pid) for key, pid in first.processes.items() if key.startswith(kind))


def chaos_jobs(client: Client, count: int, *, steps: int) -> list[int]:
    """Jobs that differ in seed, width and depth."""
    return [
        submit(client, CHAOS_JOB, name=f"chaos {i}", seed=i, steps=steps, workers=1 + i % 3,
               spb=("off", "ladder", "off", "balanced")[i % 4])
        for i in range(count)
    ]  # fmt: skip


@dataclass(frozen=True)
class Survived:
    """The outcome of a run under kills."""

    killed: dict[str, int]
    states: dict[int, str]
    reasons: list[str]
    differ: list[int]
    """Jobs whose losses are not those of the undisturbed run."""
    leases: list[int]
    left: list[str]
    seconds: float
    undisturbed_seconds: float


def chaos(count: int, *, steps: int, devices: int, every: float, seed: int, limit: float, most: int) -> Survived:
    """The same jobs twice: undisturbed, and with a kill -9 every `every` seconds on average.

    No process is killed while a job has more than MOST_STRIKES strikes, and one at most while no coordinator answers.
    """
    with cluster(devices=devices, emulated=True) as client:
        began = time.monotonic()
        jobs = chaos_jobs(client, count, steps=steps)
        ended = wait(client, jobs, limit=limit)
        undisturbed = time.monotonic() - began
        finished(ended, "undisturbed")
        wanted = {job: curve(home_of(client), job) for job in jobs}
    with tempfile.TemporaryDirectory(prefix="dovetail-trial-") as folder:
        home = Home(Path(folder))
        with cluster(home.path, devices=devices, emulated=True) as client:
            killer = Killer(home, seed, most)
            pauses, glance = random.Random(seed + 1), Client(home.path, timeout=5.0)
            began = time.monotonic()
            jobs = chaos_jobs(client, count, steps=steps)
            shown, unanswered = [], 0
            while time.monotonic() - began < limit:
                time.sleep(every * pauses.uniform(0.5, 1.5))
                try:
                    shown, unanswered = glance.status()["jobs"], 0
                    if not shown:
                        break
                except (Unreachable, RequestRefused):
                    unanswered += 1
                # Six kills without progress end a job: on a slow machine it gets time to make some.
                if unanswered < 2 and all(job["strikes"] <= MOST_STRIKES for job in shown):
                    killer.kill()
            ended = wait(client, jobs, limit=max(5.0, limit - (time.monotonic() - began)))
            took = time.monotonic() - began
        states = {job: str(e["state"]) for job, e in ended.items()}
        curves = {job: curve(home, job) for job in jobs}
        return Survived(
            killed=killer.killed,
            states=states,
            reasons=[f"job {job}: {e['reason']}" for job, e in ended.items() if e["state"] != "finished"],
            differ=[job for job in jobs if curves[job] != wanted[job]],
            leases=leases(home),
            left=left(home),
            seconds=took,
            undisturbed_seconds=undisturbed,
        )

"""The other sides of an executor, with real sockets: a coordinator and aggregators that say what a test lets them say.

The executor under test is a process of its own (`python -m tests.cluster.executor.acting SETTINGS`), whose jobs are
acted too: a job's folder holds `part.json`, which says how long its tasks take and what its code does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dovetail.cluster.executor import recorder
from dovetail.cluster.transport import messages as m
from dovetail.cluster.transport.wire import Connection, Lost
from dovetail.emulate.launch import held_port
from tests.paths import ROOT

KEY = f"the secret of {os.getpid()}"
"""Of this process: an executor of a test elsewhere may look for its dead aggregator at a port that is ours by now."""
NODE = "here"
M = TypeVar("M", bound=m.Message)


class Server(threading.Thread):
    """Listens, and hands every message to `heard`, in a thread of its own."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", port))
        self.address: tuple[str, int] = self.socket.getsockname()
        self.connections: list[Connection] = []
        self.log: list[tuple[float, m.Message]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.socket, selectors.EVENT_READ)
        self._over = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over:
                for key, _ in self._selector.select(0.002):
                    if key.fileobj is self.socket:
                        connection = Connection(self.socket.accept()[0])
                        self.connections.append(connection)
                        self._selector.register(connection, selectors.EVENT_READ)
                    else:
                        assert isinstance(key.fileobj, Connection)
                        self._serve(key.fileobj)
                self.tick(time.monotonic())
        except BaseException as e:
            self.error = e
            raise
        finally:
            for connection in self.connections:
                connection.close()
            self.socket.close()

    def _serve(self, connection: Connection) -> None:
        try:
            for message in connection.waiting():
                if isinstance(message, m.Join | m.Hello) and message.key != KEY:
                    raise Lost("a stranger")
                self.log.append((time.monotonic(), message))
                self.heard(connection, message)
        except Lost:
            self.connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()
            self.lost(connection)

    def heard(self, connection: Connection, message: m.Message) -> None: ...

    def lost(self, connection: Connection) -> None: ...

    def tick(self, now: float) -> None: ...

    def end(self) -> None:
        """As if killed: every connection is gone."""
        self._over = True
        self.join(10)

    def all(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.log if isinstance(message, kind)]


class Head(Server):
    """A coordinator."""

    def say(self, message: m.Message) -> None:
        self.connections[-1].send(message)


@dataclass
class Acted:
    """How an acted aggregator behaves."""

    iterations: int = 3
    seconds: tuple[float, ...] = (0.01,)
    """By worker, ascending; what it predicts, and what `part.json` makes true unless told otherwise."""
    off_device: float = 0.0
    believed_off_device: float | None = None
    """What it says in Barrier, where that is wrong."""
    answers_after: float = 0.0
    """Seconds that every Claim takes."""
    depths: tuple[int, ...] = ()
    hold: bool = False
    """Releases nothing until told."""
    shares: bool = False
    """Its tasks can be taken without a question."""


class Aggregator(Server):
    """Of one job: hands out tasks, longest first, with barriers between iterations, as the real one does."""

    def __init__(self, job: str, acted: Acted, *, epoch: int = 1, first: int = 0) -> None:
        super().__init__()
        self.job, self.acted, self.epoch, self.iteration = job, acted, epoch, first - 1
        self.hold = acted.hold
        self.joined: list[Connection] = []
        self.queue: list[int] = []
        self.out: dict[int, Connection] = {}
        self.done: dict[int, list[m.Done]] = {}
        self.claims: dict[Connection, int] = {}
        self.steal: Callable[[int], bool] = lambda worker: False
        self.late: list[tuple[float, Connection, m.Claim]] = []
        self.offers = 0
        self.next_release = 0.0
        self.released_at: dict[int, float] = {}
        self.releases = 0
        """That have been sent."""
        self.finished = threading.Event()
        self._waiting = True
        self._prepare()

    def heard(self, connection: Connection, message: m.Message) -> None:
        if isinstance(message, m.Join):
            assert (message.job, message.epoch) == (self.job, self.epoch), message
            self.joined.append(connection)
            connection.send(m.Welcome(memory=f"arena of {self.job}"))
            connection.send(self._offered(), *([] if self._waiting else [self._released()]))
        elif isinstance(message, m.Took):
            task = self.offered.get(message.worker)
            if task is None:
                self.given_up(connection)
            elif (message.iteration, message.claim) == (task.iteration, task.claim):
                self.queue.remove(message.worker)
                self.out[message.worker] = connection
        elif isinstance(message, m.Claim):
            self.late.append((time.monotonic() + self.acted.answers_after, connection, message))
        elif isinstance(message, m.Done):
            self._done(message)
        elif isinstance(message, m.TaskFailed):
            self.out.pop(message.worker, None)
            self.queue.append(message.worker)
            self.finished.set()

    def lost(self, connection: Connection) -> None:
        if connection in self.joined:
            self.joined.remove(connection)
        self.given_up(connection)

    def given_up(self, connection: Connection) -> None:
        back = [worker for worker, holder in self.out.items() if holder is connection]
        for worker in back:
            del self.out[worker]
            self.queue.append(worker)
        self.queue.sort(key=lambda w: self.acted.seconds[w])
        if back and self.joined:
            self.say(self._offered(), *([] if self._waiting else [self._released()]))

    def tick(self, now: float) -> None:
        if self._waiting and self.joined and not self.hold and now >= self.next_release:
            self._release(now)
        while self.late and self.late[0][0] <= now:
            _, connection, claim = self.late.pop(0)
            with contextlib.suppress(Lost):
                self._answer(connection, claim)

    def say(self, *messages: m.Message, but: Connection | None = None) -> None:
        for connection in self.joined:
            if connection is not but:
                with contextlib.suppress(Lost):
                    connection.send(*messages)

    def _release(self, now: float) -> None:
        self._waiting = False
        self.released_at[self.iteration] = now
        self.say(self._released())
        self.releases += 1

    def _prepare(self) -> None:
        """The next iteration is known: it will be offered, to whoever is there and to whoever comes."""
        self.iteration += 1
        if self.iteration >= self.acted.iterations:
            self.hold = True
            self.finished.set()
            return
        self.queue = list(range(len(self.acted.seconds)))
        self.say(self._offered())

    def _offered(self) -> m.Offered:
        self.offered = {worker: self._offer(worker) for worker in self.queue}
        return m.Offered(iteration=self.iteration, tasks=tuple(self.offered.values()), width=len(self.acted.seconds))

    def _offer(self, worker: int) -> m.Task:
        self.offers += 1
        return m.Task(
            iteration=self.iteration,
            worker=worker,
            depth=self.acted.depths[worker] if self.acted.depths else 0,
            seconds=self.acted.seconds[worker],
            claim=self.offers if self.acted.shares else 0,
        )

    def _released(self) -> m.Released:
        return m.Released(iteration=self.iteration, at=self.released_at[self.iteration], gone=tuple(self.out))

    def _answer(self, connection: Connection, claim: m.Claim) -> None:
        if claim.iteration == self.iteration and self.queue and self.steal(self.queue[-1]):
            # Somebody else was quicker, and this executor could not know.
            stolen = self.queue.pop()
            now = time.monotonic()
            self._done(m.Done(iteration=self.iteration, worker=stolen, loss=0, samples=1, start=now, stop=now))
        if claim.iteration != self.iteration or not self.queue or self._waiting:
            connection.send(m.Task(iteration=claim.iteration))
            return
        worker = self.queue.pop()
        self.out[worker] = connection
        now, task = time.monotonic(), self._offer(worker)
        connection.send(task)
        taken = m.Taken(iteration=self.iteration, workers=(worker,), until=now + task.seconds, at=now)
        self.say(taken, but=connection)

    def _done(self, message: m.Done) -> None:
        assert message.iteration == self.iteration, "a task of another iteration"
        self.out.pop(message.worker, None)
        done = self.done.setdefault(self.iteration, [])
        assert message.worker not in [d.worker for d in done], "a task was done twice"
        done.append(message)
        if len(done) == len(self.acted.seconds):
            now = time.monotonic()
            self._waiting, self.next_release = True, now + self.acted.off_device
            believed = self.acted.believed_off_device
            until = now + (self.acted.off_device if believed is None else believed)
            self.say(m.Barrier(iteration=self.iteration, until=until, at=now))
            self._prepare()


@dataclass
class Stage:
    """A home, a coordinator, and executors that end with the test."""

    home: Path
    head: Head
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)

    def executor(self, device: int = 0, **more: Any) -> subprocess.Popen[bytes]:
        settings = {"home": str(self.home), "device": device, "coordinator": self.head.address, **more}
        before = len(self.head.all(m.Hello))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.executor.acting", json.dumps(settings)],
            env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": os.environ["PATH"]},
            cwd=self.home,
        )
        self.processes.append(process)
        wait(lambda: len(self.head.all(m.Hello)) > before, "an executor's Hello")
        return process

    def cast(self, *roles: dict[str, Any]) -> list[int]:
        """Real executors and aggregators, forked from one process that has imported torch; their process ids."""
        common = {"home": str(self.home), "coordinator": self.head.address}
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.cluster.executor.acting",
                "cast",
                json.dumps([common | role for role in roles]),
            ],
            env={"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
            cwd=self.home,
            stdout=subprocess.PIPE,
        )
        self.processes.append(process)
        assert process.stdout is not None
        with process.stdout:
            pids = json.loads(process.stdout.readline())
        wait(lambda: len(self.head.all(m.Hello)) >= len(roles), "everybody's Hello", timeout=60)
        return [int(pid) for pid in pids]

    def folder(self, job: str, **part: Any) -> Path:
        """A job's folder; `part` is what its tasks do (see `Player`)."""
        folder = self.home / "jobs" / job
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "part.json").write_text(json.dumps(part))
        return folder

    def aggregator(self, job: str, acted: Acted, *, epoch: int = 1, first: int = 0, **part: Any) -> Aggregator:
        self.folder(job, **part)
        made = Aggregator(job, acted, epoch=epoch, first=first)
        made.start()
        self.servers.append(made)
        return made

    def grant(self, aggregator: Aggregator, *, order: float = 0.0, **more: Any) -> m.Grant:
        background = more.pop("background", False)
        grant = m.Grant(
            job=aggregator.job,
            epoch=aggregator.epoch,
            aggregator=aggregator.address,
            node=NODE,
            folder=str(self.home / "jobs" / aggregator.job),
            rank=(background, order, 0.0, int(aggregator.job)),
            **more,
        )
        for connection in self.head.connections:
            connection.send(grant)
        return grant


@contextlib.contextmanager
def stage(home: Path) -> Iterator[Stage]:
    (home / "key").write_text(KEY)
    with held_port() as port:  # the next coordinator of a test listens where the first did
        head = Head(port)
        head.start()
        made = Stage(home, head)
        try:
            yield made
        finally:
            for process in made.processes:
                process.kill()
                process.wait()
            for server in [made.head, *made.servers]:
                server.end()
                assert server.error is None, server.error


def wait(condition: Callable[[], Any], what: str, *, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.002)


def ran(at: Stage, count: int) -> list[recorder.Ran]:
    """The recorded tasks, once there are so many."""
    wait(lambda: len(recorder.ran(at.home)) >= count, f"{count} recorded tasks")
    return recorder.ran(at.home)


class Player:
    """An acted job, loaded: its tasks sleep, print and raise as `part.json` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.part: dict[str, Any] = json.loads((folder / "part.json").read_text())
        self.ran = 0

    def claim(self, task: m.Task) -> bool:
        """Unless the test says that somebody else has it."""
        return not (self.folder / f"gone {task.claim}").exists()

    def forget(self, number: int) -> None:
        (self.folder / "forgotten").write_text(str(number))

    def run(self, task: m.Task) -> m.Done:
        part, start = self.part, time.monotonic()
        self.ran += 1
        if "code" in part:
            exec(part["code"], {"task": task, "player": self, "part": part})
        time.sleep(part.get("seconds", task.seconds))
        return m.Done(
            iteration=task.iteration, worker=task.worker, loss=0.0, samples=1, start=start, stop=time.monotonic()
        )

    def close(self) -> None:
        (self.folder / "closed").write_text(str(self.ran))


def play(grant: m.Grant, welcome: m.Welcome, emulated: bool, local: str) -> Player:
    player = Player(Path(grant.folder))
    exec(player.part.get("load", ""), {"grant": grant})
    return player


def cast(roles: list[dict[str, Any]]) -> None:
    """Forks every role and waits for all; they die with this process."""
    import torch

    from dovetail.cluster.engines.process import die_with_parent, run

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
    if sys.argv[1] == "cast":
        cast(json.loads(sys.argv[2]))
        sys.exit()
    from dovetail.cluster.executor import main

    given = json.loads(sys.argv[1])
    given["coordinator"] = tuple(given["coordinator"])
    home = Path(given.pop("home"))
    main.ANSWER = given.pop("answer", main.ANSWER)
    settings = {"node": NODE, "kind": "emulated", "core": -1} | given
    main.main(**settings, home=home, key_file=home / "key", opener=play)

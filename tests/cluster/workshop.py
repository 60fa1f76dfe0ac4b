"""Real aggregators and executors for tests, forked from one process that has imported torch; and a coordinator's desk.

`Workshop` starts `python -m tests.cluster.workshop`, which forks on command and reports exit codes. Aggregators connect
to a `Desk`: the test reads their messages and answers in the coordinator's place.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dovetail.cluster.home import arena_name, cluster_id
from dovetail.cluster.transport.messages import (
    Claim,
    Done,
    Hello,
    Join,
    Leave,
    Message,
    Offered,
    Released,
    Task,
    TaskFailed,
    Took,
    Welcome,
)
from dovetail.cluster.transport.wire import Connection
from tests.paths import ROOT

KEY = "secret"
LIMIT = 600.0
"""Seconds after which something that is waited for will not happen any more."""
M = TypeVar("M", bound=Message)


class Workshop:
    """A home with its jobs and their processes."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self._process, self.home = process, home
        self.pids: set[int] = set()

    def job(self, number: str, text: str, **options: Any) -> Path:
        folder = self.home / "jobs" / number
        folder.mkdir(parents=True)
        (folder / "job.py").write_text(text, encoding="utf-8")
        (folder / "submission.json").write_text(json.dumps({"options": options}), encoding="utf-8")
        return folder

    def aggregator(self, job: str, attempt: int, desk: Desk, *, node: str = "") -> int:
        settings = {"home": str(self.home), "job": job, "attempt": attempt, "coordinator": desk.address}
        return self._start("aggregator", {**settings, "node": node, "key_file": str(self.home / "key")})

    def executor(self, hello: Hello, device: int, **manner: Any) -> int:
        """Serves the aggregator that sent this Hello, until that ends. `manner`: see `execute`."""
        given = {"home": str(self.home), "job": hello.job, "attempt": hello.attempt, "address": hello.address}
        return self._start("executor", {**given, "device": device, **manner})

    def _start(self, role: str, settings: dict[str, Any]) -> int:
        pid = int(self._ask({"do": "start", "role": role, "settings": settings}))
        self.pids.add(pid)
        return pid

    def wait(self, pid: int, timeout: float = LIMIT) -> int:
        """The exit code; negative for a signal."""
        code = self._ask({"do": "wait", "pid": pid, "timeout": timeout})
        assert code is not None, f"process {pid} still runs after {timeout} s"
        self.pids.discard(pid)
        return int(code)

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def memory(self, job: str, attempt: int) -> Path:
        return Path("/dev/shm") / arena_name(self.home, job, attempt)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the workshop has ended"
        return json.loads(line)


@contextmanager
def workshop(home: Path) -> Iterator[Workshop]:
    (home / "key").write_text(KEY, encoding="ascii")
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cluster.workshop", str(home / "workshop.log")]
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ours = Workshop(process, home)
    try:
        yield ours
    finally:
        for pid in list(ours.pids):
            ours.kill(pid)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.wait(LIMIT)
        process.stdout.close()
        for path in Path("/dev/shm").glob(f"dovetail-{cluster_id(home)}-*"):
            path.unlink()


class Desk:
    """Listens in the coordinator's place, and does nothing by itself."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.connection: Connection | None = None

    def hello(self, timeout: float = LIMIT) -> Hello:
        """The Hello of the next aggregator that connects."""
        self._listener.settimeout(timeout)
        sock, _ = self._listener.accept()
        self.hang_up()
        self.connection = Connection(sock)
        return self.hear(Hello)

    def hear(self, kind: type[M], timeout: float = LIMIT) -> M:
        """The next message of that kind; others before it are dropped."""
        assert self.connection is not None
        limit = time.monotonic() + timeout
        while (left := limit - time.monotonic()) > 0:
            message = self.connection.receive(timeout=left)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout} s")

    def say(self, message: Message) -> None:
        assert self.connection is not None
        self.connection.send(message)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        self.hang_up()
        self._listener.close()


# -- in the other processes --


def execute(
    *,
    home: str,
    job: str,
    attempt: int,
    address: list[Any],
    device: int,
    jitter: float = 0.0,
    twice: float = 0.0,
    die_after: int = -1,
    emulated: bool = False,
    node: str = "",
    asks: bool = False,
    last: int | None = None,
) -> None:
    """The simplest executor: takes every task that is offered; asks for it if `asks`, or if on another machine.

    `jitter`: it waits up to so many seconds before claims and ends; `twice`: the share of tasks that it runs twice;
    `die_after`: the number of the task in which it kills itself; `last`: the last iteration that it serves.
    """
    from dovetail.cluster.executor import loader, task_runner
    from dovetail.cluster.job import spec, tensor_channel
    from dovetail.cluster.job.objects import JobError
    from dovetail.cluster.job.submission import stored_options

    chance = random.Random(device + 1000 * attempt)
    folder = Path(home) / "jobs" / job
    with contextlib.suppress(ConnectionError):
        connection = Connection.to((address[0], address[1]))
        connection.send(Join(key=KEY, job=job, attempt=attempt, device=device, node=node))
        welcome = connection.receive(timeout=LIMIT)
        if not isinstance(welcome, Welcome):
            return
        channel = None
        if not welcome.memory:
            channel = tensor_channel.join(welcome.store, welcome.channel, local="127.0.0.1", timeout=LIMIT)
        loaded = spec.load(folder / "job.py", stored_options(folder))
        runner = loader.open_runner(loaded, welcome.memory, emulated=emulated, header=welcome.header, channel=channel)
        count, offered, shares = 0, list[Task](), not asks and channel is None

        def wanted() -> list[Task]:
            return [t for t in offered if last is None or t.iteration <= last]

        def take() -> Task | None:
            """The longest task that can be locked; an outdated offer is as good as a new one."""
            found = next((t for t in reversed(wanted()) if runner.arena.claim(t.worker, t.claim)), None)
            if found is not None:
                offered.remove(found)  # its owner could lock it again
                connection.send(Took(iteration=found.iteration, worker=found.worker, claim=found.claim))
            return found

        while True:
            message = connection.receive(timeout=LIMIT)
            if message is None or isinstance(message, Leave):
                return
            if isinstance(message, Offered):
                offered = list(message.tasks)
            mine = message if isinstance(message, Task) and message.worker >= 0 else None
            if isinstance(message, Released) and shares:
                mine = take()
            elif isinstance(message, Released):
                connection.send(Claim(iteration=message.iteration))
            while mine is not None:
                count += 1
                time.sleep(jitter * chance.random())
                try:
                    done: Done = runner.run(mine)
                    if chance.random() < twice:
                        done = runner.run(mine)
                except JobError as e:
                    failed = TaskFailed(iteration=mine.iteration, worker=mine.worker, reason=str(e), trace=e.trace)
                    connection.send(failed)
                    break
                except task_runner.Stale:
                    break
                if 0 <= die_after <= count:  # not ==: that task may have been a stale one
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(jitter * chance.random())
                connection.send(done)
                if not shares:
                    connection.send(Claim(iteration=mine.iteration))
                mine = take() if shares else None


def _child(role: str, settings: dict[str, Any], log: str) -> None:
    from dovetail.cluster.engines import process
    from dovetail.core.processes import die_with_parent

    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    die_with_parent()
    if role == "aggregator":
        os._exit(process.run("aggregator", settings))
    execute(**settings)
    os._exit(0)


def _serve(log: str) -> None:
    import sklearn.datasets  # noqa: F401  # once for all, as torch
    import torch

    import dovetail.cluster.aggregator.main
    import dovetail.cluster.executor.loader  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()  # imports torch's compiler, for seconds
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        if asked["do"] == "start":
            pid = os.fork()
            if not pid:
                try:
                    _child(asked["role"], asked["settings"], log)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    os._exit(1)
            answer = pid
        else:
            limit = time.monotonic() + asked["timeout"]
            while answer is None and time.monotonic() < limit:
                ended, status = os.waitpid(asked["pid"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
                time.sleep(0.005)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])

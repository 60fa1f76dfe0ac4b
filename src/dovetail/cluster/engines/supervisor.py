"""The daemon that `dovetail cluster up` leaves behind on one machine. It starts processes and reports their ends.

It opens the two listening sockets and keeps them, so that addresses outlive a coordinator; starts the coordinator
(exec'd: no torch) and meanwhile imports torch once. Then it serves StartProcess, KillProcess and Shutdown on a Unix
socket: an executor or an aggregator is a fork of this process, ready within milliseconds. It has one thread, so that
forking is safe. Everything it started dies with it: executors and aggregators by SIGKILL, the coordinator by SIGTERM,
so that the coordinator can remove the shared memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from dovetail.cluster.home import Home, Settings
from dovetail.cluster.transport.messages import Alive, Exited, KillProcess, Message, Shutdown, StartProcess
from dovetail.cluster.transport.wire import Connection, Lost
from dovetail.core.processes import die_with_parent

from . import process

WRONG_SETTINGS = 78
"""Exit code of a coordinator that would fail the same way again: it is not restarted."""
_QUIET = 0.3  # seconds without a message after which there is time for more imports
_LONGEST_PAUSE = 5.0  # seconds before a coordinator that keeps dying is started again


class Supervisor:
    """Children by key, and the select loop around them."""

    def __init__(self, home: Home, settings: Settings) -> None:
        self.home, self.settings = home, settings
        self.children: dict[str, int] = {}
        self.connections: list[Connection] = []
        self.selector = selectors.DefaultSelector()
        self.control = _bind(settings.control_host, 0)
        self.http = _bind(settings.host, settings.port)
        self.listener = home.listen()
        self.coordinator = 0
        self.coordinator_start = 0.0
        self.pause = 0.1
        self.ending = False
        self.code = 0
        self.warm = settings.engine != "local"
        """Whether what only aggregators need has been imported."""
        self.wake, waker = socket.socketpair()
        for end in (self.wake, waker):
            end.setblocking(False)
        self.waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._signalled)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def run(self) -> int:
        """Serves until Shutdown or SIGTERM; the code to exit with."""
        try:
            self._start_coordinator()
            if self.settings.engine == "local":
                _import_once()
            while not self.ending:
                self._step()
        finally:
            self._end_all()
        return self.code

    def _step(self) -> None:
        waiting = self.coordinator_start - time.monotonic() if not self.coordinator else 5.0
        if waiting <= 0:
            self._start_coordinator()
            return
        if self.children and not self.warm:  # the executors run and `up` has answered: nobody waits for the imports
            waiting = min(waiting, _QUIET)
        ready = self.selector.select(timeout=waiting)
        if not ready and self.children and not self.warm:
            self.warm = True
            _import_rest()
        for key, _ in ready:
            if key.fileobj is self.wake:
                with contextlib.suppress(BlockingIOError):
                    self.wake.recv(4096)
            elif key.fileobj is self.listener:
                sock, _ = self.listener.accept()
                connection = Connection(sock)
                self.connections.append(connection)
                self.selector.register(connection, selectors.EVENT_READ)
                self._send(connection, Alive(processes=dict(self.children)))
            else:
                assert isinstance(key.fileobj, Connection)
                self._serve(key.fileobj)
        self._reap()

    def _signalled(self, signum: int, frame: object) -> None:
        if signum != signal.SIGCHLD:
            self.ending = True

    # -- the conversation --

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(Lost):
            while (message := connection.receive(timeout=0)) is not None:
                if isinstance(message, StartProcess):
                    self._start(message)
                elif isinstance(message, KillProcess):
                    self._kill(message.key)
                elif isinstance(message, Shutdown):
                    self.ending = True
                else:
                    process.note(f"supervisor: ignored a {type(message).__name__}")
            return
        self._drop(connection)

    def _send(self, connection: Connection, message: Message) -> None:
        try:
            connection.send(message, timeout=5.0)
        except Lost:
            self._serve(connection)  # what it sent before it closed counts: it may be Shutdown
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            self.selector.unregister(connection)
            connection.close()

    # -- processes --

    def _start(self, message: StartProcess) -> None:
        if message.key in self.children:
            process.note(f"supervisor: {message.key}: runs already")
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._become(message, parent)
                code = process.run(message.role, message.settings)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        with contextlib.suppress(OSError):  # both sides do it: whoever is first
            os.setpgid(pid, pid)
        self.children[message.key] = pid

    def _begin_child(self, parent: int, log: str, signum: int = signal.SIGKILL) -> None:
        """In a child: dies with the supervisor by `signum`; gets its own process group and log, and default signals."""
        die_with_parent(signum, parent=parent)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for handled in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(handled, signal.SIG_DFL)
        handle = os.open(self.home.logs / f"{log}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)

    def _become(self, message: StartProcess, parent: int) -> None:
        """In the child: gives up everything of the supervisor but the copy of its memory."""
        self._begin_child(parent, message.key.replace(" ", "-") if message.role == "executor" else "aggregators")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash of a job's code is reported, without a core file
        self.selector.close()
        os.closerange(3, 65536)
        os.chdir(self.home.path)

    def _start_coordinator(self) -> None:
        control, http = self.control.fileno(), self.http.fileno()
        command = [sys.executable, "-m", "dovetail.cluster.service", str(self.home.path), str(control), str(http)]
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._begin_child(parent, "coordinator", signal.SIGTERM)
                os.set_inheritable(control, True)
                os.set_inheritable(http, True)
                os.execve(sys.executable, command, os.environ)
            finally:
                os._exit(127)
        self.coordinator, self.coordinator_start = pid, time.monotonic()

    def _kill(self, key: str) -> None:
        pid = self.children.get(key)
        if pid is not None:
            _kill_group(pid)

    def _reap(self) -> None:
        """Reports every child that has ended, and kills its process group before the kernel may reuse its number."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            _kill_group(ended.si_pid)
            os.waitpid(ended.si_pid, 0)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if ended.si_pid == self.coordinator:
                self._coordinator_ended(code)
                continue
            for key, pid in list(self.children.items()):
                if pid == ended.si_pid:
                    del self.children[key]
                    for connection in list(self.connections):
                        self._send(connection, Exited(key=key, pid=pid, code=code))

    def _coordinator_ended(self, code: int) -> None:
        lived = time.monotonic() - self.coordinator_start
        process.note(f"supervisor: coordinator ended with {code} after {lived:.1f} s")
        self.coordinator = 0
        if code == WRONG_SETTINGS:
            self.ending, self.code = True, code
            return
        self.pause = 0.1 if lived > 10.0 else min(2 * self.pause, _LONGEST_PAUSE)
        self.coordinator_start = time.monotonic() + (0.0 if lived > 10.0 else self.pause - 0.1)

    def _end_all(self) -> None:
        """Ends all children and removes the sockets and the shared memory."""
        for pid in self.children.values():
            _kill_group(pid)
        if self.coordinator:
            with contextlib.suppress(OSError):
                os.kill(self.coordinator, signal.SIGTERM)
        limit = time.monotonic() + 3.0
        while self.children or self.coordinator:
            self._reap_silently()
            if time.monotonic() > limit and self.coordinator:
                _kill_group(self.coordinator)
            time.sleep(0.005)
        self.home.sweep()

    def _reap_silently(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self.coordinator:
                    self.coordinator = 0
                self.children = {k: p for k, p in self.children.items() if p != pid}
        self.children, self.coordinator = {}, 0


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as e:
        raise SystemExit(f"dovetail: {host}:{port}: cannot listen: {(e.strerror or str(e)).lower()}") from None
    sock.listen(512)
    return sock


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # by process id too: the child may not have its own group yet
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def _import_once() -> None:
    """Imports torch and the processes' modules before the first fork.

    Frozen then, so that garbage collections do not touch the shared pages.
    """
    for name in ("torch", "torch.optim", "dovetail.cluster.executor.main", "dovetail.cluster.aggregator.main"):
        try:
            importlib.import_module(name)
        except ImportError:
            traceback.print_exc()  # the child will fail the same way, and its end is reported
    _freeze()


def _import_rest() -> None:
    """An optimiser's first use imports torch's compiler, which takes two seconds: once here, not in each aggregator."""
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        process.note(f"supervisor: {threads} threads after the imports: a fork copies one of them only")


def main() -> None:
    """`python -m dovetail.cluster.engines.supervisor HOME`: detaches, then runs. Called by `up_down.up` only."""
    home = Home(Path(sys.argv[1]))
    if os.fork():
        os._exit(0)
    os.setsid()
    lock = home.lock()
    if lock is None:
        raise SystemExit("dovetail: a supervisor runs already")
    process.note(f"supervisor: starts as process {os.getpid()}")
    code = Supervisor(home, home.settings()).run()
    process.note("supervisor: ends")
    sys.exit(code)


if __name__ == "__main__":
    main()

"""Fakes of the processes that an executor talks to, on real sockets: a coordinator and aggregators."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dovetail.cluster.transport import messages as m
from dovetail.cluster.transport.wire import Connection, Lost

KEY = f"the secret of {os.getpid()}"
"""Of this process alone: an executor of another test may look for its dead aggregator at a port that is ours by now."""
LIMIT = 300.0
"""Seconds after which a test counts as hanging. Every wait is for an event: this is no guess at speed."""
M = TypeVar("M", bound=m.Message)


class FakeServer(threading.Thread):
    """Listens, and passes every message to `heard`, in a thread of its own."""

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
                    raise Lost("an executor of another test")
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
        """As if killed: every connection is lost."""
        self._over = True
        self.join(LIMIT)
        assert not self.is_alive()

    def all(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.log if isinstance(message, kind)]


class FakeCoordinator(FakeServer):
    """A coordinator that only says what a test lets it say."""

    def say(self, message: m.Message) -> None:
        self.connections[-1].send(message)


@dataclass
class Behaviour:
    """How a fake aggregator behaves."""

    iterations: int = 3
    seconds: tuple[float, ...] = (0.01,)
    """Predicted seconds of each worker's task, ascending. The tasks take so long, unless `fake.json` sets `seconds`."""
    off_device: float = 0.0
    believed_off_device: float | None = None
    """What it says in Barrier, if that is to be wrong."""
    depths: tuple[int, ...] = ()
    hold: bool = False
    """Releases nothing until the test sets `FakeAggregator.hold` to False."""
    release_when_taken: bool = False
    """Releases an iteration when one of its tasks is taken."""
    shares: bool = False
    """Its tasks can be taken by a lock, without a Claim."""


class FakeAggregator(FakeServer):
    """The aggregator of one job: hands out tasks, longest first, with barriers between iterations, as real ones do."""

    def __init__(self, job: str, behaviour: Behaviour, *, attempt: int = 1, first: int = 0) -> None:
        super().__init__()
        self.job, self.behaviour, self.attempt, self.iteration = job, behaviour, attempt, first - 1
        self.hold = behaviour.hold
        self.joined: list[Connection] = []
        self.queue: list[int] = []
        self.out: dict[int, Connection] = {}
        self.done: dict[int, list[m.Done]] = {}
        self.claims: dict[Connection, int] = {}
        self.steal: Callable[[int], bool] = lambda worker: False
        self.unanswered: list[tuple[Connection, m.Claim]] = []
        self.hold_answers = False
        """No Claim is answered until the test sets this to False."""
        self.offers = 0
        self.next_release = 0.0
        self.released_at: dict[int, float] = {}
        self.releases = 0
        """Number of Released messages that have been sent."""
        self.finished = threading.Event()
        self._waiting = True
        self._prepare()

    def heard(self, connection: Connection, message: m.Message) -> None:
        if isinstance(message, m.Join):
            assert (message.job, message.attempt) == (self.job, self.attempt), message
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
            self.unanswered.append((connection, message))
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
        self.queue.sort(key=lambda w: self.behaviour.seconds[w])
        if back and self.joined:
            self.say(self._offered(), *([] if self._waiting else [self._released()]))

    def tick(self, now: float) -> None:
        taken = self.out or not self.behaviour.release_when_taken
        if self._waiting and self.joined and not self.hold and now >= self.next_release and taken:
            self._release(now)
        while self.unanswered and not self.hold_answers:
            connection, claim = self.unanswered.pop(0)
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
        """Offers the next iteration, to the executors that have joined and to those that will."""
        self.iteration += 1
        if self.iteration >= self.behaviour.iterations:
            self.hold = True
            self.finished.set()
            return
        self.queue = list(range(len(self.behaviour.seconds)))
        self.say(self._offered())

    def _offered(self) -> m.Offered:
        self.offered = {worker: self._offer(worker) for worker in self.queue}
        return m.Offered(
            iteration=self.iteration, tasks=tuple(self.offered.values()), width=len(self.behaviour.seconds)
        )

    def _offer(self, worker: int) -> m.Task:
        self.offers += 1
        return m.Task(
            iteration=self.iteration,
            worker=worker,
            depth=self.behaviour.depths[worker] if self.behaviour.depths else 0,
            seconds=self.behaviour.seconds[worker],
            claim=self.offers if self.behaviour.shares else 0,
        )

    def _released(self) -> m.Released:
        return m.Released(iteration=self.iteration, at=self.released_at[self.iteration], taken=tuple(self.out))

    def _answer(self, connection: Connection, claim: m.Claim) -> None:
        if claim.iteration == self.iteration and self.queue and self.steal(self.queue[-1]):
            # Another executor was quicker, and this one could not know.
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
        if len(done) == len(self.behaviour.seconds):
            now = time.monotonic()
            self._waiting, self.next_release = True, now + self.behaviour.off_device
            believed = self.behaviour.believed_off_device
            until = now + (self.behaviour.off_device if believed is None else believed)
            self.say(m.Barrier(iteration=self.iteration, until=until, at=now))
            self._prepare()

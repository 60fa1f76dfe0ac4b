"""A coordinator with a real store and real connections; its executors and aggregators are acted in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.cluster.coordinator import coordinator, decide, executor_state, peers, strikes, watchdog
from dovetail.cluster.coordinator.coordinator import Coordinator
from dovetail.cluster.coordinator.events import PeerEvents
from dovetail.cluster.coordinator.job_state import ActiveJob
from dovetail.cluster.coordinator.job_store import Store
from dovetail.cluster.engines.base import ClusterDevice, Exit, Role
from dovetail.cluster.home import Home, Settings
from dovetail.cluster.job.submission import Submission
from dovetail.cluster.transport import messages as m
from dovetail.cluster.transport import wire

HANG = 300.0
"""Seconds after which something that is waited for will not happen any more."""


class Actor:
    """Stands for a process: connects to the coordinator, and again after that was restarted."""

    def __init__(self, engine: ActedEngine, key: str, settings: dict[str, Any]) -> None:
        self.engine, self.key, self.settings = engine, key, settings
        self.heard: list[m.Message] = []
        self.writer: asyncio.StreamWriter | None = None
        self.connections = 0
        self.leaves = False  # whether it ends with its connection
        self.pause = 0.01  # seconds before it connects again
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        while True:
            with contextlib.suppress(OSError, wire.Lost):
                reader, self.writer = await asyncio.open_connection(*self.settings["coordinator"])
                self.connections += 1
                try:
                    for message in self.first():
                        self.say(message)
                    while True:
                        message = await wire.read(reader)
                        self.heard.append(message)
                        self.obey(message)
                finally:
                    self.writer.close()
            if self.leaves:
                self.die(1)
                return
            await asyncio.sleep(self.pause)

    def say(self, message: m.Message) -> None:
        assert self.writer is not None
        self.writer.write(wire.encode(message))

    def first(self) -> list[m.Message]:
        raise NotImplementedError

    def obey(self, message: m.Message) -> None: ...

    def die(self, code: int) -> None:
        """Ends with an exit code, which the engine reports."""
        self.end()
        self.engine.ended.put_nowait(Exit(key=self.key, code=code))

    def end(self) -> None:
        self.task.cancel()
        self.engine.actors.pop(self.key, None)

    @property
    def said_key(self) -> str:
        return self.engine.key or Path(self.settings["key_file"]).read_text()

    def received(self, kind: type[m.Message]) -> list[Any]:
        return [x for x in self.heard if isinstance(x, kind)]


class Executor(Actor):
    """Remembers its leases and ranks."""

    leases: dict[str, m.GrantLease]
    ranks: dict[str, m.StartRank]
    kept: list[m.Message]

    def first(self) -> list[m.Message]:
        if not hasattr(self, "leases"):
            self.leases, self.ranks, self.kept = {}, {}, []
        served: list[m.GrantLease | m.StartRank] = [*self.leases.values(), *self.ranks.values()]
        d = self.settings["device"]
        return [
            m.Hello(
                key=self.said_key,
                role="executor",
                pid=1,
                device=d,
                node="n",
                leases=tuple((x.job, x.attempt) for x in served),
            ),
            *self.kept,
            m.Heartbeat(),
        ]

    def obey(self, message: m.Message) -> None:
        if isinstance(message, m.GrantLease):
            self.leases[message.job] = message
        elif isinstance(message, m.StartRank):
            self.ranks[message.job] = message
        elif isinstance(message, m.RevokeLease):
            self.leases.pop(message.job, None)
            self.ranks.pop(message.job, None)
            self.kept = [x for x in self.kept if getattr(x, "job", "") != message.job]
        elif isinstance(message, m.Shutdown):
            self.leaves = True
            for job in list(self.ranks):
                self.rank_ends(int(job), -15)
            self.die(0)

    def rank_ends(self, job: int, code: int, tail: str = "") -> None:
        rank = self.ranks.pop(str(job))
        message = m.RankEnded(job=rank.job, attempt=rank.attempt, worker=rank.worker, code=code, tail=tail)
        self.kept.append(message)
        with contextlib.suppress(OSError):
            self.say(message)


class Aggregator(Actor):
    """Describes its job as the engine's script says, then does what the test says."""

    def first(self) -> list[m.Message]:
        job, attempt = self.settings["job"], self.settings["attempt"]
        hello = m.Hello(
            key=self.said_key, role="aggregator", pid=1, node="n", job=job, attempt=attempt, address=("127.0.0.1", 9)
        )
        return [hello, self.engine.describe(int(job), attempt)] if job.isdigit() else [hello]

    def obey(self, message: m.Message) -> None:
        if isinstance(message, m.StopJob):
            self.die(0)

    def progress(self, iteration: int, checkpoint: int = 0, **fields: Any) -> None:
        job, attempt = self.settings["job"], self.settings["attempt"]
        self.say(m.Progress(job=job, attempt=attempt, iteration=iteration, loss=1.0, checkpoint=checkpoint, **fields))

    def finish(self) -> None:
        self.leaves = True
        self.say(m.Finished(job=self.settings["job"], attempt=self.settings["attempt"], iteration=10, loss=0.5))

    def fail(self, reason: str, *, fatal: bool = False) -> None:
        self.leaves = True
        self.say(m.Failed(job=self.settings["job"], attempt=self.settings["attempt"], reason=reason, fatal=fatal))


class ActedEngine:
    """Runs actors. It outlives coordinators, as the supervisor does."""

    name = "acted"

    def __init__(self, devices: int, *, nodes: int = 1) -> None:
        self._devices = [ClusterDevice(i, f"n{i * nodes // devices}", "emulated", 2**34) for i in range(devices)]
        self.actors: dict[str, Actor] = {}
        self.ended: asyncio.Queue[Exit] = asyncio.Queue()
        self.started: list[str] = []
        self.workers: dict[int, int] = {}
        self.broken: set[str] = set()
        self.key = ""
        self.stopped = False

    def describe(self, job: int, attempt: int) -> m.Described:
        return m.Described(job=str(job), attempt=attempt, workers=self.workers.get(job, 1), iterations=10, forward=0.1)

    async def open(self) -> dict[str, int]:
        return dict.fromkeys(self.actors, 1)

    async def devices(self) -> list[ClusterDevice]:
        return self._devices

    async def start(self, key: str, role: Role, settings: dict[str, Any], *, node: str = "") -> None:
        assert key not in self.actors, f"{key} runs"
        if key.partition(".")[0] in self.broken:
            raise OSError("no room")
        self.started.append(key)
        self.actors[key] = (Executor if role == "executor" else Aggregator)(self, key, settings)

    async def kill(self, key: str) -> None:
        if key in self.actors:
            self.actors[key].die(-9)

    async def exits(self) -> list[Exit]:
        return [await self.ended.get()]

    async def close(self, *, stop: bool) -> None:
        self.stopped = stop


class Stage:
    """The coordinator of a home, which can be killed and started again."""

    def __init__(self, home: Home, settings: Settings, engine: ActedEngine) -> None:
        self.home, self.settings, self.engine = home, settings, engine
        self.port = 0
        self.tasks: list[asyncio.Task[Any]] = []

    async def open(self) -> None:
        sock = socket.create_server(("127.0.0.1", self.port))
        sock.setblocking(False)
        self.port = sock.getsockname()[1]
        self.store = Store(self.home.database)
        self.c = c = Coordinator(self.home, self.settings, self.store, self.engine, ("127.0.0.1", self.port))
        await c.open()
        self.server = await peers.serve(sock, self.home.key(), PeerEvents(c))
        self.tasks = [
            asyncio.create_task(work) for work in (self._exits(), decide.decide_forever(c), watchdog.watch_forever(c))
        ]
        await self.until(lambda: len(c.ready()) == len(c.executors) or bool(self.engine.broken))

    async def _exits(self) -> None:
        while True:
            for end in await self.engine.exits():
                self.c.exited(end)

    async def kill(self) -> None:
        """Ends the coordinator as SIGKILL would; all other processes live."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.server.close()
        for e in self.c.executors.values():
            if e.peer is not None:
                e.peer.close()
        for peer in self.c.peers.values():
            peer.close()
        self.store.close()
        await asyncio.sleep(0)

    async def until(self, true: Callable[[], Any], timeout: float = HANG) -> None:
        limit = asyncio.get_running_loop().time() + timeout
        while not true():
            for task in self.tasks:
                if task.done():
                    task.result()
            assert asyncio.get_running_loop().time() < limit, "it did not happen"
            await asyncio.sleep(0.002)

    def submit(self, *, workers: int = 1, **fields: Any) -> int:
        job = self.c.submit(Submission(text="job", **fields)).id
        self.engine.workers[job] = workers
        return job

    def live(self, job: int) -> ActiveJob:
        return self.c.jobs[job]

    def state(self, job: int) -> str:
        return self.store.job(job).state

    def executor(self, device: int) -> Executor:
        found = self.engine.actors[f"executor {device}"]
        assert isinstance(found, Executor)
        return found

    def aggregator(self, job: int) -> Aggregator:
        found = self.engine.actors[self.c.jobs[job].key]
        assert isinstance(found, Aggregator)
        return found

    async def running(self, job: int) -> None:
        """Waits until its devices serve it."""
        await self.until(
            lambda: (
                job in self.c.jobs
                and self.live(job).devices
                and self.live(job).key in self.engine.actors
                and all(self._serves(d, job) for d in self.live(job).devices)
            )
        )

    def _serves(self, device: int, job: int) -> bool:
        actor = self.engine.actors.get(f"executor {device}")
        lease = actor.leases.get(str(job)) if isinstance(actor, Executor) and hasattr(actor, "leases") else None
        return lease is not None and lease.attempt == self.live(job).attempt


@contextlib.contextmanager
def patience(lost_limit: float = HANG) -> Iterator[None]:
    """Short pauses after strikes; and a process may be silent or lost for as long as a hang.

    So a loaded machine does not reach the product's limits; `lost_limit` is for scenes that wait for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strikes, "FIRST_PAUSE", 0.01)
        patch.setattr(executor_state, "LOST_LIMIT", lost_limit)
        for module, name in (
            (executor_state, "HELLO_LIMIT"), (executor_state, "HEARTBEAT_LIMIT"), (executor_state, "UNWANTED_LIMIT"),
            (coordinator, "FLUSH_LIMIT"), (coordinator, "STOP_LIMIT"),
        ):  # fmt: skip
            patch.setattr(module, name, HANG)
        yield


@contextlib.asynccontextmanager
async def stage(path: Path, *, devices: int = 2, nodes: int = 1, policy: str = "jigsaw") -> AsyncIterator[Stage]:
    home = Home(path / "home")
    home.create()
    engine = ActedEngine(devices, nodes=nodes)
    found = Stage(home, Settings(devices=devices, emulated=True, policy=policy), engine)
    await found.open()
    try:
        yield found
    finally:
        await found.kill()
        actors = list(engine.actors.values())
        for actor in actors:
            actor.end()
        await asyncio.gather(*(a.task for a in actors), return_exceptions=True)
        await asyncio.sleep(0.02)  # connections close


def play(path: Path, scene: Callable[[Stage], Awaitable[None]], *, lost_limit: float = HANG, **options: Any) -> None:
    """Plays a scene from its beginning to its end."""

    async def whole() -> None:
        async with stage(path, **options) as s:
            await asyncio.wait_for(scene(s), 2 * HANG)

    with patience(lost_limit):
        asyncio.run(whole())

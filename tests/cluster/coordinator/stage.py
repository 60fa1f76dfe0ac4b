"""A coordinator with a real store and real connections, whose executors and aggregators are acted in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.cluster.coordinator import decide, peers, strikes, watchdog
from dovetail.cluster.coordinator.coordinator import Coordinator
from dovetail.cluster.coordinator.events import Hearing
from dovetail.cluster.coordinator.job_state import Live
from dovetail.cluster.coordinator.job_store import Store
from dovetail.cluster.engines.base import Device, Exit, Role
from dovetail.cluster.home import Home, Settings
from dovetail.cluster.job.submission import Submission
from dovetail.cluster.transport import messages as m
from dovetail.cluster.transport import wire


class Actor:
    """One process that is none: connected to the coordinator, and again after that was restarted."""

    def __init__(self, engine: ActedEngine, key: str, settings: dict[str, Any]) -> None:
        self.engine, self.key, self.settings = engine, key, settings
        self.heard: list[m.Message] = []
        self.writer: asyncio.StreamWriter | None = None
        self.connections = 0
        self.leaves = False  # with its connection
        self.pause = 0.01  # seconds before it tries to come back
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
        """Ends, and the engine hears of it."""
        self.end()
        self.engine.ended.put_nowait(Exit(key=self.key, code=code))

    def end(self) -> None:
        self.task.cancel()
        self.engine.actors.pop(self.key, None)

    @property
    def said_key(self) -> str:
        return self.engine.key or Path(self.settings["key_file"]).read_text()

    def told(self, kind: type[m.Message]) -> list[Any]:
        return [x for x in self.heard if isinstance(x, kind)]


class Executor(Actor):
    """Remembers what it has been granted."""

    granted: dict[str, m.Grant]
    ranks: dict[str, m.StartRank]
    kept: list[m.Message]

    def first(self) -> list[m.Message]:
        if not hasattr(self, "granted"):
            self.granted, self.ranks, self.kept = {}, {}, []
        residents = tuple((x.job, x.epoch) for x in (*self.granted.values(), *self.ranks.values()))
        d = self.settings["device"]
        return [
            m.Hello(key=self.said_key, role="executor", pid=1, device=d, node="n", residents=residents),
            *self.kept,
            m.Beat(),
        ]

    def obey(self, message: m.Message) -> None:
        if isinstance(message, m.Grant):
            self.granted[message.job] = message
        elif isinstance(message, m.StartRank):
            self.ranks[message.job] = message
        elif isinstance(message, m.Revoke):
            self.granted.pop(message.job, None)
            self.ranks.pop(message.job, None)
            self.kept = [x for x in self.kept if getattr(x, "job", "") != message.job]
        elif isinstance(message, m.Shutdown):
            self.leaves = True
            for job in list(self.ranks):
                self.rank_ends(int(job), -15)
            self.die(0)

    def rank_ends(self, job: int, code: int, tail: str = "") -> None:
        rank = self.ranks.pop(str(job))
        message = m.RankEnded(job=rank.job, epoch=rank.epoch, worker=rank.worker, code=code, tail=tail)
        self.kept.append(message)
        with contextlib.suppress(OSError):
            self.say(message)


class Aggregator(Actor):
    """Describes its job as the engine's script says, then does what the test says."""

    def first(self) -> list[m.Message]:
        job, epoch = self.settings["job"], self.settings["epoch"]
        hello = m.Hello(
            key=self.said_key, role="aggregator", pid=1, node="n", job=job, epoch=epoch, address=("127.0.0.1", 9)
        )
        return [hello, self.engine.describe(int(job), epoch)] if job.isdigit() else [hello]

    def obey(self, message: m.Message) -> None:
        if isinstance(message, m.Stop):
            self.die(0)

    def progress(self, iteration: int, checkpoint: int = 0, **fields: Any) -> None:
        job, epoch = self.settings["job"], self.settings["epoch"]
        self.say(m.Progress(job=job, epoch=epoch, iteration=iteration, loss=1.0, checkpoint=checkpoint, **fields))

    def finish(self) -> None:
        self.leaves = True
        self.say(m.Finished(job=self.settings["job"], epoch=self.settings["epoch"], iteration=10, loss=0.5))

    def fail(self, reason: str, *, fatal: bool = False) -> None:
        self.leaves = True
        self.say(m.Failed(job=self.settings["job"], epoch=self.settings["epoch"], reason=reason, fatal=fatal))


class ActedEngine:
    """Runs actors. It outlives coordinators, as the supervisor does."""

    name = "acted"

    def __init__(self, devices: int, *, nodes: int = 1) -> None:
        self._devices = [Device(i, f"n{i * nodes // devices}", "emulated", 2**34) for i in range(devices)]
        self.actors: dict[str, Actor] = {}
        self.ended: asyncio.Queue[Exit] = asyncio.Queue()
        self.started: list[str] = []
        self.workers: dict[int, int] = {}
        self.broken: set[str] = set()
        self.key = ""
        self.stopped = False

    def describe(self, job: int, epoch: int) -> m.Described:
        return m.Described(job=str(job), epoch=epoch, workers=self.workers.get(job, 1), iterations=10, forward=0.1)

    async def open(self) -> dict[str, int]:
        return dict.fromkeys(self.actors, 1)

    async def devices(self) -> list[Device]:
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
        self.server = await peers.serve(sock, self.home.key(), Hearing(c))
        self.tasks = [
            asyncio.create_task(work) for work in (self._exits(), decide.decide_forever(c), watchdog.watch_forever(c))
        ]
        await self.until(lambda: len(c.ready()) == len(c.executors) or bool(self.engine.broken))

    async def _exits(self) -> None:
        while True:
            for end in await self.engine.exits():
                self.c.exited(end)

    async def kill(self) -> None:
        """The coordinator is gone, without a word; everybody else lives."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.server.close()
        for e in self.c.executors.values():
            if e.link is not None:
                e.link.close()
        for link in self.c.links.values():
            link.close()
        self.store.close()
        await asyncio.sleep(0)

    async def until(self, true: Callable[[], Any], timeout: float = 10.0) -> None:
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

    def live(self, job: int) -> Live:
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
        """Until its devices serve it."""
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
        grant = actor.granted.get(str(job)) if isinstance(actor, Executor) and hasattr(actor, "granted") else None
        return grant is not None and grant.epoch == self.live(job).epoch


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


def play(path: Path, scene: Callable[[Stage], Awaitable[None]], **options: Any) -> None:
    """A scene from its beginning to its end, within half a minute. Pauses are as in life, only shorter."""

    async def whole() -> None:
        async with stage(path, **options) as s:
            await asyncio.wait_for(scene(s), 30.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strikes, "FIRST_PAUSE", 0.01)
        asyncio.run(whole())

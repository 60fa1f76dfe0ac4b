"""The process of the coordinator: store, engine, peers and HTTP in one event loop. Started by the supervisor only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import uvicorn

from dovetail.core.errors import Error

from .coordinator import decide, peers, watchdog
from .coordinator.coordinator import Coordinator
from .coordinator.events import PeerEvents
from .coordinator.job_store import Store
from .engines.base import Engine
from .engines.local import LocalEngine, SupervisorLost
from .engines.process import note
from .engines.supervisor import WRONG_SETTINGS
from .home import Address, Home, Settings, read_token
from .web.api import make_app


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: `run` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def engine_for(home: Home, settings: Settings) -> Engine:
    if settings.engine == "ray":
        from .engines.ray import RayEngine

        return RayEngine(home, settings)
    return LocalEngine(home, settings)


async def run(home: Home, settings: Settings, control: socket.socket, http: socket.socket, parent: int) -> None:
    """Serves until SIGTERM, or until the supervisor has ended."""
    token = read_token(Path(settings.token_file)) if settings.token_file else ""
    store = Store(home.database)
    address: tuple[str, int] = control.getsockname()[:2]
    coordinator = Coordinator(home, settings, store, engine_for(home, settings), address)
    config = uvicorn.Config(
        make_app(coordinator, token=token), log_level="warning", access_log=False, lifespan="off", ws="none",
        timeout_keep_alive=30, limit_concurrency=512, server_header=False,
    )  # fmt: skip
    server = _HttpServer(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    tasks = [asyncio.create_task(server.serve(sockets=[http])), asyncio.create_task(stop.wait())]
    while not server.started and not tasks[0].done():
        await asyncio.sleep(0.002)
    host, port = http.getsockname()[:2]
    home.write_address(
        Address(
            host=host, port=port, control=address, supervisor=parent, coordinator=os.getpid(),
            engine=settings.engine, token_file=settings.token_file,
        )
    )  # fmt: skip

    async def work() -> None:
        try:
            await coordinator.open()
        except Error as e:
            _wrong_settings(e)
        await peers.serve(control, home.key(), PeerEvents(coordinator))
        note(f"{len(coordinator.executors)} devices, {len(coordinator.jobs)} jobs")
        await asyncio.gather(
            _take_exits(coordinator), decide.decide_forever(coordinator), watchdog.watch_forever(coordinator)
        )

    tasks.append(asyncio.create_task(work()))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    failures = [e for t in done if not t.cancelled() and (e := t.exception()) is not None]
    coordinator.save()
    store.close()
    if os.getppid() != parent:  # the supervisor has ended, and cannot clean up
        if settings.engine != "local":
            with contextlib.suppress(Exception):
                await asyncio.wait_for(coordinator.engine.close(stop=True), 10.0)
        home.sweep()
    for failure in failures:
        if not isinstance(failure, SupervisorLost):
            traceback.print_exception(failure)
            os._exit(1)
    os._exit(0)  # at once: nothing is left to be written, and no thread is waited for


async def _take_exits(coordinator: Coordinator) -> None:
    while True:
        for end in await coordinator.engine.exits():
            coordinator.exited(end)


def _wrong_settings(error: Error) -> NoReturn:
    """Another start would fail the same way: the supervisor gives up, and `up` prints this line."""
    print(f"dovetail: {error}", file=sys.stderr, flush=True)
    os._exit(WRONG_SETTINGS)


def main() -> None:
    """`python -m dovetail.cluster.service HOME CONTROL HTTP`: the numbers are descriptors of listening sockets."""
    home = Home(Path(sys.argv[1]))
    parent = os.getppid()
    try:
        settings = home.settings()
        control, http = (socket.socket(fileno=int(text)) for text in sys.argv[2:4])
        for sock in (control, http):
            sock.setblocking(False)
            sock.set_inheritable(False)
        asyncio.run(run(home, settings, control, http, parent))
    except Error as e:
        _wrong_settings(e)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()

"""The engine of one machine: asks the supervisor, over its Unix socket, to start and kill processes."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from dovetail.cluster.home import Home, Settings
from dovetail.cluster.transport import wire
from dovetail.cluster.transport.messages import Alive, Exited, KillProcess, Shutdown, StartProcess

from .base import ClusterDevice, Exit, Role

NODE = "local"


class SupervisorLost(ConnectionError):
    """The supervisor has ended. Nothing can be started without it, so the coordinator ends too."""


class LocalEngine:
    """The `Engine` of this machine."""

    name = "local"

    def __init__(self, home: Home, settings: Settings) -> None:
        self._home, self._settings = home, settings
        self._exits: asyncio.Queue[Exit | None] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> dict[str, int]:
        """Waits for the supervisor, which imports torch first."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._home.connect())
        first = await wire.read(reader)
        assert isinstance(first, Alive), "the supervisor speaks first"
        self._listening = asyncio.create_task(self._listen(reader))
        return first.processes

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await wire.read(reader)
                if isinstance(message, Exited):
                    self._exits.put_nowait(Exit(key=message.key, code=message.code))
        except wire.Lost:
            self._exits.put_nowait(None)

    async def devices(self) -> list[ClusterDevice]:
        """Cores in turn for CPU devices; emulated ones wait more than they compute and stay unpinned."""
        s = self._settings
        if s.accelerators:
            return [
                ClusterDevice(index=i, node=NODE, kind="accelerator", bytes=s.device_bytes, accelerator=name)
                for i, name in enumerate(s.accelerators)
            ]
        cores = sorted(os.sched_getaffinity(0))
        return [
            ClusterDevice(
                index=i,
                node=NODE,
                kind="emulated" if s.emulated else "cpu",
                bytes=s.device_bytes,
                core=-1 if s.emulated else cores[i % len(cores)],
            )
            for i in range(s.devices)
        ]

    async def start(self, key: str, role: Role, settings: dict[str, Any], *, node: str = "") -> None:
        given = settings if role == "executor" else settings | {"node": NODE}
        self._send(StartProcess(key=key, role=role, settings=given))

    async def kill(self, key: str) -> None:
        self._send(KillProcess(key=key))

    def _send(self, message: StartProcess | KillProcess | Shutdown) -> None:
        assert self._writer is not None, "open() comes first"
        self._writer.write(wire.encode(message))  # small and rare: no need to wait for the buffer

    async def exits(self) -> list[Exit]:
        found = [await self._exits.get()]
        while not self._exits.empty():
            found.append(self._exits.get_nowait())
        if None in found:
            raise SupervisorLost("the supervisor has ended")
        return [e for e in found if e is not None]

    async def close(self, *, stop: bool) -> None:
        if self._writer is None:
            return
        if stop:
            self._send(Shutdown())
        if self._listening is not None:
            self._listening.cancel()
        try:
            await self._writer.drain()
            self._writer.close()
        except OSError:
            pass  # the supervisor has closed it already

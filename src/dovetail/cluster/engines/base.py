"""What the coordinator needs of an engine: to start a process, to kill one, to learn of ends. Nothing else.

No task waits for a call of an engine. `local` runs everything on this machine, `ray` on several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Role = Literal["executor", "aggregator"]


@dataclass(frozen=True)
class ClusterDevice:
    """One device of the cluster."""

    index: int
    node: str
    """The machine it is on; devices of one node share memory and count as near for locality."""
    kind: Literal["cpu", "emulated", "accelerator"]
    bytes: int
    """Memory that its jobs may use together."""
    core: int = -1
    """The core a CPU device is pinned to; -1 for none."""
    accelerator: str = ""
    """Name of an accelerator, as "cuda:0" (see `cluster.accelerators`)."""


@dataclass(frozen=True)
class Exit:
    """The end of a process; a negative code is a signal."""

    key: str
    code: int
    node_lost: bool = False
    """Whether its machine was lost with it."""


class Engine(Protocol):
    """Runs executors and aggregators. All methods are coroutines of the coordinator's loop."""

    name: str

    async def open(self) -> dict[str, int]:
        """Connects. The processes that run already, after a coordinator's restart: process id by key."""
        ...

    async def devices(self) -> list[ClusterDevice]:
        """All devices; more may be added when machines join."""
        ...

    async def start(self, key: str, role: Role, settings: dict[str, Any], *, node: str = "") -> None:
        """Runs `dovetail.cluster.ROLE.main.main(**settings)` in a process of its own, on `node` if named.

        Returns without waiting for it. The environment is scrubbed, the folder is the cluster's home.
        """
        ...

    async def kill(self, key: str) -> None:
        """Kills the process and everything it started; no error if it has ended."""
        ...

    async def exits(self) -> list[Exit]:
        """Waits for the next ends of processes."""
        ...

    async def close(self, *, stop: bool) -> None:
        """Disconnects. `stop`: kills all processes first (`dovetail cluster down`); otherwise they go on."""
        ...

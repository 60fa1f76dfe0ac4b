"""What the coordinator needs of whoever runs processes: start one, end one, hear of ends. Nothing else.

No call of an engine is on the path of a task. `local` runs everything on this machine; `ray` places, watches and
restarts processes on several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Role = Literal["executor", "aggregator"]


@dataclass(frozen=True)
class Device:
    """One device of the cluster."""

    index: int
    node: str
    """The machine it is on; devices of one node share memory and count as near for locality."""
    kind: Literal["cpu", "emulated"]
    bytes: int
    """What its jobs may hold together."""
    core: int = -1
    """The core a CPU device is pinned to; -1 for none."""


@dataclass(frozen=True)
class Exit:
    """A process has ended; a negative code is a signal."""

    key: str
    code: int
    node_lost: bool = False
    """Its machine went with it."""


class Engine(Protocol):
    """Runs executors and aggregators. All methods are coroutines of the coordinator's loop."""

    name: str

    async def open(self) -> dict[str, int]:
        """Connects. Says which processes run already (key: pid or other number), after a coordinator's restart."""
        ...

    async def devices(self) -> list[Device]:
        """What there is; may grow when machines join."""
        ...

    async def start(self, key: str, role: Role, settings: dict[str, Any], *, node: str = "") -> None:
        """Runs `dovetail.cluster.ROLE.main.main(**settings)` in a process of its own, on `node` if named.

        Returns without waiting for it. The environment is scrubbed, the folder is the cluster's home.
        """
        ...

    async def kill(self, key: str) -> None:
        """Ends it with everything it started, at once; no error if it is gone."""
        ...

    async def exits(self) -> list[Exit]:
        """Waits for the next ends."""
        ...

    async def close(self, *, stop: bool) -> None:
        """`stop`: ends all processes (`dovetail cluster down`); otherwise lets go of them."""
        ...

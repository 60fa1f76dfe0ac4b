"""The engine of several machines: Ray starts and watches processes, and reports lost machines.

No task waits for a call of Ray. Machines join with Ray's own command (`ray start --address=HEAD:6379`), before or after
the cluster is up. Each node offers as many devices as it has of the resource "dovetail_device", or else one for each
CPU:

    ray start --address=head:6379 --resources='{"dovetail_device": 4}'

Every executor and every aggregator has an actor of its own, a *warden*, pinned to its node. The warden starts the
process, waits for its end and reports its exit code. So no job's code runs in a process of Ray: it gets a scrubbed
environment, and its end is an exit code instead of an exception. The kernel kills a process with its warden; a warden
dies with its node. Wardens are detached: they and their processes outlive a coordinator, and a new one finds them by
name. Ray restarts none of them: the coordinator decides whether and where.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from dovetail.cluster.home import Home, Settings, cluster_id
from dovetail.core.errors import Error, first_line
from dovetail.core.files import write_text
from dovetail.core.processes import die_with_parent

from . import process
from .base import ClusterDevice, Exit, Role

RESOURCE = "dovetail_device"
"""Ray's name for how many devices a node offers."""
STARTING = 60.0
"""Seconds that connecting to Ray, or a question to a warden, may take."""


class Warden:
    """An actor that runs one process and reports its exit code."""

    def __init__(self, role: Role, settings: dict[str, Any], home: str, key: str, cluster: str) -> None:
        folder = _folder(Path(home), key, cluster)
        given = {**settings, "home": str(folder), "key_file": str(folder / "key")}
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        name = f"executor-{given['device']}" if role == "executor" else f"aggregator-{given['job']}"
        command = [sys.executable, "-m", "dovetail.cluster.engines.ray", role, str(os.getpid()), json.dumps(given)]
        # In the constructor, since Ray runs it on the main thread, with whose end the kernel kills the child.
        with (logs / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=process.scrubbed(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def pid(self) -> int:
        return self._process.pid

    async def watch(self) -> int:
        """Waits for the process's end: its exit code, negative for a signal."""
        return await asyncio.to_thread(self._process.wait)


class RayEngine:
    """The `Engine` of clusters on several machines."""

    name = "ray"

    def __init__(self, home: Home, settings: Settings) -> None:
        if importlib.util.find_spec("ray") is None:
            raise Error("the ray engine needs Ray: pip install 'ray>=2.50'")
        self.home, self.address, self.cluster = home.path, settings.ray, cluster_id(home.path)
        self.emulated, self.device_bytes = settings.emulated, settings.device_bytes
        self.host = "127.0.0.1"
        """This machine's address as the others see it, known after `open`: where the coordinator should listen."""
        self._wardens: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._ended: asyncio.Queue[Exit] = asyncio.Queue()
        self._watching: set[asyncio.Task[None]] = set()
        self._nodes: dict[str, str] = {}  # name: Ray's id

    async def open(self) -> dict[str, int]:
        """Connects to Ray and finds the wardens that an earlier coordinator left."""
        found = await asyncio.to_thread(self._connect)
        running = {}
        for key, (handle, pid, node) in found.items():
            self._adopt(key, handle, node)
            running[key] = pid
        return running

    async def devices(self) -> list[ClusterDevice]:
        return await asyncio.to_thread(self._devices)

    async def start(self, key: str, role: Role, settings: dict[str, Any], *, node: str = "") -> None:
        assert key not in self._wardens, f"{key} is running"
        secret = Path(settings["key_file"]).read_text(encoding="utf-8")
        handle, where = await asyncio.to_thread(self._place, key, role, settings, node, secret)
        self._adopt(key, handle, where)

    async def kill(self, key: str) -> None:
        import ray

        handle = self._wardens.get(key)
        if handle is not None:
            await asyncio.to_thread(ray.kill, handle)  # its process dies with it; `_watch` reports the end

    async def exits(self) -> list[Exit]:
        found = [await self._ended.get()]
        while not self._ended.empty():
            found.append(self._ended.get_nowait())
        return found

    async def close(self, *, stop: bool) -> None:
        import ray

        if stop:
            for handle in list(self._wardens.values()):
                with contextlib.suppress(Exception):  # a failure with one must not keep the others alive
                    await asyncio.to_thread(ray.kill, handle)
        for task in list(self._watching):
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.to_thread(ray.shutdown)

    # -- calls of Ray that may take long run on other threads --

    def _connect(self) -> dict[str, tuple[Any, int, str]]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        try:
            ray.init(
                address=self.address,
                namespace=f"dovetail-{self.cluster}",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise Error(
                f"Ray at {self.address!r} does not answer: {first_line(e)}; start it with: ray start --head"
            ) from None
        self.host = ray.util.get_node_ip_address()
        found: dict[str, tuple[Any, int, str]] = {}
        for name in ray.util.list_named_actors():
            key, _, rest = name.partition("#")
            node = rest.partition("#")[0]
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended meanwhile: nothing to adopt
                handle = ray.get_actor(name)
                pid: Any = ray.get(handle.pid.remote(), timeout=STARTING)
                found[key] = handle, int(pid), node
        return found

    def _devices(self) -> list[ClusterDevice]:
        """Devices keep their numbers: nodes are listed in a file in the order in which they were first seen."""
        import ray

        path = self.home / "ray-nodes.json"
        known: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        alive: dict[str, int] = {}
        for node in sorted(ray.nodes(), key=lambda n: n["NodeID"]):
            if not node["Alive"]:
                continue
            name = f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}"
            resources = node["Resources"]
            alive[name] = int(resources.get(RESOURCE, resources.get("CPU", 0)))
            self._nodes[name] = node["NodeID"]
        fresh = [name for name in alive if name not in known]
        if fresh:
            known |= {name: alive[name] for name in fresh}
            write_text(path, json.dumps(known, indent=1) + "\n")
        found: list[ClusterDevice] = []
        index = 0
        for name, count in known.items():
            for i in range(count):
                if name in alive:
                    kind: Literal["cpu", "emulated"] = "emulated" if self.emulated else "cpu"
                    core = -1 if self.emulated else i
                    found.append(
                        ClusterDevice(index=index + i, node=name, kind=kind, bytes=self.device_bytes, core=core)
                    )
            index += count
        return found

    def _place(self, key: str, role: Role, settings: dict[str, Any], node: str, secret: str) -> tuple[Any, str]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Without `node` on this machine: if it is lost, so is the coordinator.
        alive = {n["NodeID"]: n["Resources"] for n in ray.nodes() if n["Alive"]}
        chosen = self._nodes.get(node, "") if node else ray.get_runtime_context().get_node_id()
        if chosen not in alive:
            raise Error(f"{key}: its machine {node} is lost")
        if role == "aggregator":
            node = next((name for name, number in self._nodes.items() if number == chosen), "")
            settings = {**settings, "node": node}
        needs = {RESOURCE: 1} if role == "executor" and RESOURCE in alive[chosen] else {}
        handle = (
            ray.remote(Warden)
            .options(
                name=f"{key}#{node}#{os.urandom(4).hex()}",
                lifetime="detached",
                max_restarts=0,
                num_cpus=0,
                resources=needs,
                scheduling_strategy=NodeAffinitySchedulingStrategy(chosen, soft=False),
            )
            .remote(role, settings, str(self.home), secret, self.cluster)
        )
        return handle, node

    def _adopt(self, key: str, handle: Any, node: str) -> None:
        self._wardens[key], self._where[key] = handle, node
        task = asyncio.get_running_loop().create_task(self._watch(key, handle))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, key: str, handle: Any) -> None:
        import ray

        lost = False
        try:
            code = int(await handle.watch.remote())
            with contextlib.suppress(Exception):
                await asyncio.to_thread(ray.kill, handle)
        except ray.exceptions.RayError:
            code = -signal.SIGKILL
            lost = await asyncio.to_thread(self._is_lost, self._where[key])
        if self._wardens.get(key) is handle:
            del self._wardens[key]
            self._ended.put_nowait(Exit(key, code, node_lost=lost))

    def _is_lost(self, node: str) -> bool:
        import ray

        wanted = self._nodes.get(node)
        try:
            return bool(wanted) and not any(n["Alive"] for n in ray.nodes() if n["NodeID"] == wanted)
        except Exception:  # Ray itself does not answer: every node is lost
            return True


def _folder(home: Path, key: str, cluster: str) -> Path:
    """The cluster's home if this machine sees it; otherwise a folder on this machine, with the key."""
    with contextlib.suppress(OSError):
        if (home / "key").read_text(encoding="utf-8") == key:
            return home
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = base / "dovetail" / f"node-of-{cluster}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / "key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(key)
    return folder


def _child(role: str, parent: str, settings: str) -> int:
    """The process that a warden starts: it ends when the warden does."""
    die_with_parent(parent=int(parent))
    return process.run(role, json.loads(settings))


if __name__ == "__main__":
    sys.exit(_child(*sys.argv[1:]))

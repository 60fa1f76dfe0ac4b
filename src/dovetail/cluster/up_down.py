"""Starting and ending a cluster: what `dovetail cluster up` and `down` call."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dovetail.core.errors import Error, MissingExtra

from .accelerators import parse, probe
from .client import Client, Unreachable
from .coordinator.job_store import Store
from .engines import process
from .home import Address, Home, Settings, default_home, read_token
from .transport.messages import Shutdown
from .transport.wire import Connection, Lost

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def up(
    home: Path | None = None,
    *,
    devices: int = 0,
    emulated: bool = False,
    accelerators: str = "",
    policy: str = "jigsaw",
    device_bytes: int = 0,
    engine: str = "local",
    ray: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    token_file: Path | None = None,
    prepare: int = 16,
    timeout: float = 60.0,
) -> tuple[Address, bool]:
    """Starts the cluster of a home, or finds it running: its address, and whether it ran already.

    `devices` 0: one per core, or 8 emulated ones. `accelerators`: names as "cuda:0,cuda:1", which are the devices then.
    `device_bytes` 0: four fifths of the memory, shared among CPU devices; 16 GiB for each emulated one; nine tenths of
    an accelerator's own. Returns when every device is ready.
    """
    import importlib.util

    from dovetail.planning.sharing.policies import POLICIES

    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("dovetail cluster", "cluster")
    where = Home((home or default_home()).absolute())
    live = [name for name, p in POLICIES.items() if not (p.preempt or p.partition or p.backfill == "easy")]
    if policy not in live:
        simulated = "only simulated; " if policy in POLICIES else ""
        raise Error(f"policy {policy!r}: {simulated}expected one of {', '.join(live)}")
    names = parse(accelerators) if accelerators else ()
    if names and (devices or emulated or engine != "local"):
        other = "--devices" if devices else "--emulated" if emulated else f"--engine {engine}"
        raise Error(f"--accelerators: the devices are those that it names, on this machine; not with {other}")
    if host not in LOOPBACK and token_file is None:
        raise Error(f"--host {host}: an address other than loopback needs --token-file")
    if token_file is not None:
        read_token(token_file)
    if where.supervisor() is not None:
        return _wait(where, timeout), True
    if where.database.exists():
        Store(where.database).close()  # a wrong store fails here, before any process is started
    if names:
        devices, found = len(names), probe(names, process.scrubbed(os.environ))
        if device_bytes > found:
            has, got = found / 2**30, device_bytes / 2**30
            raise Error(f"--memory: expected at most {has:.2f} GiB of an accelerator's, got {got:.2f}")
        device_bytes = device_bytes or found
    devices = devices or (8 if emulated else len(os.sched_getaffinity(0)))
    device_bytes = device_bytes or (16 * 2**30 if emulated else memory_bytes() * 4 // 5 // devices)
    where.create()
    where.address_file.unlink(missing_ok=True)
    where.write_settings(
        Settings(
            devices=devices, emulated=emulated, accelerators=names, device_bytes=device_bytes, policy=policy,
            host=host, port=port, engine="ray" if engine == "ray" else "local", ray=ray, prepare=prepare,
            control_host="0.0.0.0" if engine == "ray" else "127.0.0.1",
            token_file=str(token_file.absolute()) if token_file else "",
        )
    )  # fmt: skip
    sizes = {path: path.stat().st_size for path in where.logs.glob("*.log")}
    with (where.logs / "supervisor.log").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "dovetail.cluster.engines.supervisor", str(where.path)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=process.scrubbed(os.environ), cwd=where.path,
            check=True, timeout=timeout,
        )  # fmt: skip
    return _wait(where, timeout, sizes), False


def _wait(home: Home, timeout: float, sizes: dict[Path, int] | None = None) -> Address:
    """Waits until the API answers and every device is ready; an Error with the reason if the supervisor ends before.

    `sizes`: bytes of each log before this start.
    """
    limit, seen = time.monotonic() + timeout, False
    while time.monotonic() < limit:
        address = home.address()
        if address is not None and address.supervisor == home.supervisor():
            with contextlib.suppress(Unreachable):
                status = Client(home.path).status(jobs=False)
                if all(d["ready"] for d in status["devices"]) and status["devices"]:
                    return address
        running = home.supervisor() is not None
        seen = seen or running
        if not running and (seen or time.monotonic() > limit - timeout + 2.0):
            raise Error(f"the cluster did not start: {_last_error(home, sizes or {})}")
        time.sleep(0.01)
    raise Error(f"the cluster is not ready after {timeout:g} s; see {home.logs}")


def _last_error(home: Home, sizes: dict[Path, int]) -> str:
    """The last error line that the coordinator or the supervisor has logged since."""
    for path in (home.logs / "coordinator.log", home.logs / "supervisor.log"):
        with contextlib.suppress(OSError):
            lines = path.read_bytes()[sizes.get(path, 0) :].decode("utf-8", "replace").splitlines()
            errors = [line for line in lines if line.startswith("dovetail: ")]
            if errors:
                return errors[-1].removeprefix("dovetail: ")
    return f"see {home.logs}"


def down(home: Path | None = None, *, grace: float = 10.0, timeout: float = 30.0) -> bool:
    """Ends the cluster of a home: jobs write checkpoints within `grace` seconds, then everything ends.

    False if none ran. What a killed cluster left behind is removed in either case. Jobs stay in the store and continue
    with the next `up`.
    """
    where = Home((home or default_home()).absolute())
    pid = where.supervisor()
    if pid is None:
        if where.path.is_dir():
            where.sweep()
        return False
    try:
        Client(where.path, timeout=grace + 10.0).down(grace=grace)
    except Error:  # no coordinator answers: the supervisor ends the processes
        with contextlib.suppress(OSError, Lost):
            connection = Connection(where.connect())
            connection.send(Shutdown())
            connection.close()
    limit = time.monotonic() + timeout
    while (pid := where.supervisor()) is not None:
        if time.monotonic() > limit and pid:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > limit + 5.0:
            raise Error(f"process {pid} does not end")
        time.sleep(0.01)
    where.sweep()
    return True

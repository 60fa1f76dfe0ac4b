"""The cluster's home: the folder with everything that must survive a restart, and the names of its files."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dovetail.cluster.accelerators import is_emulated
from dovetail.core.errors import Error, InputError
from dovetail.core.files import replacing, write_text

VARIABLE = "DOVETAIL_HOME"
SHARED_MEMORY = Path("/dev/shm")
FLOCK = struct.Struct("@hhqqi4x")  # Linux's struct flock: type, whence, start, length, process


def default_home() -> Path:
    """$DOVETAIL_HOME, or dovetail/cluster under the user's state folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "dovetail" / "cluster"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `cluster up`, in `settings.json`; the coordinator and the supervisor read them."""

    devices: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    emulated: bool = False
    """Devices wait for the times of a job's profile instead of computing."""
    accelerators: tuple[str, ...] = ()
    """Names of accelerators, one for each device (see `cluster.accelerators`); none: cores, or emulated devices."""
    device_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 * 2**30
    policy: str = "jigsaw"
    engine: Literal["local", "ray"] = "local"
    ray: str = "auto"
    """Ray's address, for its engine."""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    control_host: str = "127.0.0.1"
    """Address at which executors and aggregators reach the coordinator; not loopback only if machines can join."""
    token_file: str = ""
    prepare: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    """Jobs, at most, whose aggregators are loaded while they wait for devices."""

    @property
    def imitated(self) -> bool:
        """Whether the devices stand in for others: they wait, or the accelerators are emulated. Outputs say so."""
        return self.emulated or any(map(is_emulated, self.accelerators))


@dataclass(frozen=True)
class Address:
    """Where a running cluster listens; in `address.json`."""

    host: str
    port: int
    control: tuple[str, int]
    supervisor: int
    """Process id of the supervisor."""
    coordinator: int
    """Process id of the coordinator."""
    engine: str = "local"
    token_file: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Home:
    """A home and the files in it."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "cluster.db"

    @property
    def key_file(self) -> Path:
        return self.path / "key"

    @property
    def address_file(self) -> Path:
        return self.path / "address.json"

    @property
    def settings_file(self) -> Path:
        return self.path / "settings.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def spans(self) -> Path:
        return self.path / "spans"

    def job(self, job: int | str) -> Path:
        """A job's folder. It is named by the job's number: no name that a user chose is part of a path."""
        return self.path / "jobs" / str(int(job))

    def running_file(self, device: int) -> Path:
        """Where an executor notes the job whose task it runs, so that the job gets the strike if the executor dies."""
        return self.path / "executors" / f"{device}.running"

    def create(self) -> None:
        """Makes the folders and the key, readable by the owner only."""
        if self.path.exists() and not self.path.is_dir():
            raise Error(f"{self.path}: expected a folder for the cluster's home")
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        for folder in ("jobs", "logs", "spans", "executors"):
            (self.path / folder).mkdir(exist_ok=True)
        if not self.key_file.exists():
            with replacing(self.key_file, durable=True, private=True) as temporary:
                temporary.write_text(secrets.token_hex(32), encoding="ascii")

    def key(self) -> str:
        return self.key_file.read_text(encoding="ascii").strip()

    # -- settings and address --

    def settings(self) -> Settings:
        try:
            return msgspec.json.decode(self.settings_file.read_bytes(), type=Settings)
        except OSError:
            raise Error(f"{self.settings_file}: missing: start the cluster with `dovetail cluster up`") from None
        except msgspec.MsgspecError as e:
            raise InputError(self.settings_file, "", str(e)) from None

    def write_settings(self, settings: Settings) -> None:
        write_text(self.settings_file, msgspec.json.format(msgspec.json.encode(settings), indent=1).decode() + "\n")

    def address(self) -> Address | None:
        """The address of the cluster that runs here; None if there is none or it is still starting."""
        try:
            data: dict[str, Any] = json.loads(self.address_file.read_text(encoding="utf-8"))
            data["control"] = tuple(data["control"])
            return Address(**data)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_address(self, address: Address) -> None:
        write_text(self.address_file, json.dumps(address.__dict__, indent=1) + "\n")

    # -- the supervisor --

    def lock(self) -> int | None:
        """Makes this process the home's only supervisor until it ends: a descriptor, or None if another one runs.

        A POSIX lock: forked children do not hold it, and the kernel releases it however the process ends.
        """
        handle = os.open(self.path / "supervisor.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        return handle

    def supervisor(self) -> int | None:
        """The process id of the supervisor, None if none runs."""
        try:
            handle = os.open(self.path / "supervisor.lock", os.O_RDONLY)
        except OSError:
            return None
        try:  # asks for the lock's owner; trying to take it could make a supervisor that starts now fail
            asked = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(handle, fcntl.F_GETLK, asked))
        finally:
            os.close(handle)
        return None if kind == fcntl.F_UNLCK else int(pid)

    def listen(self) -> socket.socket:
        """The supervisor's socket. Named through a descriptor, since the kernel allows paths of 108 bytes only."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(FileNotFoundError):
                (self.path / "supervisor.sock").unlink()
            sock.bind(f"/proc/self/fd/{folder}/supervisor.sock")
        finally:
            os.close(folder)
        (self.path / "supervisor.sock").chmod(0o600)
        sock.listen(16)
        return sock

    def connect(self) -> socket.socket:
        """A connection to the supervisor; an OSError if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sock.connect(f"/proc/self/fd/{folder}/supervisor.sock")
        except OSError:
            sock.close()
            raise
        finally:
            os.close(folder)
        return sock

    def sweep(self) -> None:
        """Removes what a cluster that has ended may leave behind: shared memory, the socket, the address."""
        sweep_arenas(self.path)
        for path in (self.path / "supervisor.sock", self.address_file):
            with contextlib.suppress(OSError):
                path.unlink()


def cluster_id(home: Path) -> str:
    """Eight characters that distinguish this home's shared memory from that of other clusters on the machine."""
    return hashlib.sha256(str(Path(home).resolve()).encode()).hexdigest()[:8]


def arena_name(home: Path, job: int | str, attempt: int) -> str:
    """The name under /dev/shm for one attempt of a job; further parts have a suffix after a dot."""
    return f"dovetail-{cluster_id(home)}-{job}-{attempt}"


def sweep_arenas(home: Path, *, alive: Iterable[tuple[str, int]] = ()) -> list[str]:
    """Removes the shared memory of dead aggregators: all but that of `alive` (job, attempt). The removed names."""
    keep = {arena_name(home, job, attempt) for job, attempt in alive}
    removed = []
    for path in SHARED_MEMORY.glob(f"dovetail-{cluster_id(home)}-*"):
        if path.name.partition(".")[0] not in keep:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def read_token(path: Path) -> str:
    """The API's token in a file: its only line."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise Error(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if not 16 <= len(text) <= 1024 or not text.isascii() or not text.isprintable() or " " in text:
        raise Error(f"{path}: expected a token of 16 to 1024 printable characters without spaces")
    return text

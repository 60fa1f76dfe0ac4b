"""Recorded spans: one line for every task that ran, in spans/device-D.jsonl of the cluster's home.

Recording a task appends a tuple to a list. The executor's heartbeat thread writes the list out twice a second, and the
executor once more at its end; a kill loses at most the tasks since. A file that has grown to its limit replaces
device-D.1.jsonl, so a device never has more than two files.

Times are of time.monotonic(), which all processes of a machine share. Each file, and each executor's part of it,
begins with a line that gives that clock's offset to time.time(), so that tasks of several machines can be compared.
A last line that was cut by a kill is skipped. Old recordings must stay readable: tags and field names do not change.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from dovetail.core.job import Lease, Schedule, TaskRun
from dovetail.core.timeline import Timeline

LIMIT_BYTES = 32 * 2**20
_MOST_WAITING = 100_000  # tasks kept while the disk is full; later ones are dropped
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Device = Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class ClockLine(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """First line of an executor's part."""

    device: _Device
    node: str
    boot: str
    """Id of the machine's boot: its clock restarts with each."""
    offset: float
    """Seconds to add to the times of the other lines to get time.time()."""
    emulated: bool = False


class TaskLine(msgspec.Struct, frozen=True, kw_only=True, tag="task", omit_defaults=True):
    """One task that ran."""

    job: str
    iteration: int
    worker: int
    device: _Device
    start: _Seconds
    stop: _Seconds
    overhead: float = 0.0
    """Seconds from when it could have started to its start. It could start at its release or at the end of the task
    before, whichever was later; if it was held back, when that ended."""
    waited: float = -1.0
    """Seconds from its iteration's release to its start; below 0 if unknown."""


class LeaseLine(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """A lease that has ended: a job was served by the device, or a rank of a gang had it."""

    job: str
    device: _Device
    start: _Seconds
    stop: _Seconds


Line = ClockLine | TaskLine | LeaseLine
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class DeviceRecorder:
    """Writes the spans of one device. `task` and `lease` may be called while another thread is in `flush`."""

    def __init__(self, home: Path, device: int, *, node: str, emulated: bool, limit: int = LIMIT_BYTES) -> None:
        self.path = Path(home) / "spans" / f"device-{device}.jsonl"
        self._device, self._limit = device, limit
        self._clock = ClockLine(
            device=device, node=node, boot=_boot(), offset=round(time.time() - time.monotonic(), 6), emulated=emulated
        )
        self._new: list[tuple[str, int, int, float, float, float, float]] = []
        self._leases: list[LeaseLine] = []
        self._lock = threading.Lock()
        self._file = self._open()

    def task(
        self, job: str, iteration: int, worker: int, start: float, stop: float, overhead: float, waited: float = -1.0
    ) -> None:
        """Records a task that has ended."""
        if len(self._new) < _MOST_WAITING:
            self._new.append((job, iteration, worker, start, stop, overhead, waited))

    def lease(self, job: str, start: float, stop: float) -> None:
        """Records a lease that has ended."""
        self._leases.append(LeaseLine(job=job, device=self._device, start=_short(start), stop=_short(stop)))

    def flush(self) -> None:
        """Writes out what is new. If the disk is full, the next call tries again."""
        with self._lock:
            tasks, leases = len(self._new), len(self._leases)
            if not tasks and not leases:
                return
            lines = [
                TaskLine(
                    job=job,
                    iteration=iteration,
                    worker=worker,
                    device=self._device,
                    start=_short(start),
                    stop=_short(stop),
                    overhead=_short(overhead),
                    waited=_short(waited),
                )
                for job, iteration, worker, start, stop, overhead, waited in self._new[:tasks]
            ]
            before = os.fstat(self._file).st_size
            try:
                _write(self._file, _encoder.encode_lines([*lines, *self._leases[:leases]]))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, before)
                return
            del self._new[:tasks], self._leases[:leases]
            if os.fstat(self._file).st_size >= self._limit:
                self.path.replace(self.path.with_name(f"{self.path.stem}.1.jsonl"))
                os.close(self._file)
                self._file = self._open()

    def close(self) -> None:
        self.flush()
        os.close(self._file)

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(handle).st_size
        cut = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        with contextlib.suppress(OSError):
            _write(handle, b"\n" * cut + _encoder.encode(self._clock) + b"\n")
        return handle


def lines(home: str | Path) -> Iterator[Line]:
    """All lines of all devices, older files first; anything else in the files is skipped."""
    for path in sorted(Path(home, "spans").glob("device-*.jsonl"), key=lambda p: (".1." not in p.name, p.name)):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    yield _decoder.decode(line)


def recorded_tasks(home: str | Path) -> list[TaskLine]:
    """Every recorded task in order of its start. Times are of time.time()."""
    return _read(home)[0]


def read(home: str | Path, *, policy: str = "cluster") -> Schedule:
    """The recorded tasks and leases as a schedule, in seconds from the first of either."""
    tasks, leases, _ = _read(home)
    covered: dict[tuple[str, int], list[LeaseLine]] = {}
    for lease in leases:
        covered.setdefault((lease.job, lease.device), []).append(lease)
    open_leases: dict[tuple[str, int], LeaseLine] = {}
    for t in tasks:  # of a lease that lasts, or lasted when its executor was killed
        key = t.job, t.device
        if not any(lease.start <= t.start and t.stop <= lease.stop for lease in covered.get(key, ())):
            start = open_leases[key].start if key in open_leases else t.start
            open_leases[key] = LeaseLine(job=t.job, device=t.device, start=start, stop=t.stop)
    all_leases = [*leases, *open_leases.values()]
    both: list[TaskLine | LeaseLine] = [*tasks, *all_leases]
    origin = min((x.start for x in both), default=0.0)
    return Schedule(
        policy=policy,
        source="measured",
        devices=1 + max((x.device for x in both), default=0),
        leases=tuple(
            Lease(job=x.job, devices=(x.device,), start=x.start - origin, stop=x.stop - origin)
            for x in sorted(all_leases, key=lambda x: (x.start, x.device))
        ),
        tasks=tuple(
            TaskRun(
                job=t.job,
                iteration=t.iteration,
                worker=t.worker,
                device=t.device,
                start=t.start - origin,
                stop=t.stop - origin,
            )
            for t in tasks
        ),
    )


def timeline(home: str | Path, *, name: str = "cluster") -> Timeline:
    """The recorded schedule as a timeline, which is marked as emulated if any device was."""
    emulated = _read(home)[2]
    return msgspec.structs.replace(read(home, policy=name).timeline(), emulated=emulated)


def _read(home: str | Path) -> tuple[list[TaskLine], list[LeaseLine], bool]:
    offsets: dict[tuple[str, str], float] = {}  # one per boot of a machine: its devices share a clock
    offset, emulated = 0.0, False
    tasks: list[TaskLine] = []
    leases: list[LeaseLine] = []
    for line in lines(home):
        if isinstance(line, ClockLine):
            offset = offsets.setdefault((line.node, line.boot), line.offset)
            emulated |= line.emulated
        elif line.stop >= line.start and line.start + offset >= 0:
            moved = msgspec.structs.replace(line, start=line.start + offset, stop=line.stop + offset)
            if isinstance(moved, TaskLine):
                tasks.append(moved)
            else:
                leases.append(moved)
    tasks.sort(key=lambda t: (t.start, t.device))
    return tasks, leases, emulated


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _short(seconds: float) -> float:
    return round(seconds, 7)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""

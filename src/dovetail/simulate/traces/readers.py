"""Trace files as jobs: Philly, Muri, Pollux, and a CSV of our own by their headers, Gavel by the suffix .trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dovetail.core.errors import InputError
from dovetail.core.files import MOST_BYTES
from dovetail.core.job import Job, JobPhase

from .assume import Assumed
from .rows import TraceRow, header, table


@dataclass(frozen=True)
class JobTrace:
    """The jobs of a trace by arrival, the first at 0 s; the file's name and format, and what was assumed."""

    name: str
    format: str
    jobs: tuple[Job, ...]
    assumed: str


OWN_REQUIRED = ("arrival", "workers")
OWN_OPTIONAL = (
    "name", "duration", "iterations", "forward", "backward", "off_device", "persistent_bytes", "ephemeral_bytes",
    "min_workers", "background", "tenant",
)  # fmt: skip

PHILLY = ["timestamp", "duration", "num_gpus", "gpu_time", "cluster"]
MURI = [
    "job_id", "num_gpu", "submit_time", "iterations", "model_name", "batch_size", "duration", "interval",
    "iteration_time", "resource_time_0", "resource_time_1", "resource_time_2", "priority",
]  # fmt: skip
POLLUX = ["name", "time", "application", "num_replicas", "batch_size"]
GAVEL = ["job_type", "command", "steps_arg", "needs_data_dir", "total_steps", "arrival", "scale_factor"]

POLLUX_HOURS = {"cifar10": 0.5, "ncf": 0.5, "deepspeech2": 3.0, "bert": 3.0, "yolov3": 30.0, "imagenet": 300.0}
"""Assumed device-hours by application, from the size class of the trace's authors: 0–1, 1–10, 10–100, more."""


def read_trace(path: str | Path, *, assumed: Assumed = Assumed(), device: str = "v100") -> JobTrace:
    """Reads a trace. `device` chooses the column of Gavel's throughputs.

    A bad row raises a `TraceError` that names its line and field, with the other bad rows in `rows`.
    """
    path = Path(path)
    if path.suffix == ".trace":
        jobs, what = _gavel(path, assumed, device)
        return _sorted(path, "gavel", jobs, what)
    names = header(path)
    if names == PHILLY:
        what = f"{assumed.describe()}; {assumed.memory()}"
        return _sorted(path, "philly", table(path, _numbered(_philly, assumed)), what)
    if names == MURI:
        what = f"{assumed.backward:.0%} of the device time backward; {assumed.memory()}"
        return _sorted(path, "muri", table(path, lambda row: _muri(row, assumed)), what)
    if names == POLLUX:
        jobs = _pollux(path, assumed)
        return _sorted(path, "pollux", jobs, f"device-hours by application, backward share; {assumed.memory()}")
    if set(OWN_REQUIRED) <= set(names):
        _check_own(path, names)
        return _sorted(path, "dovetail", table(path, _numbered(_own, assumed)), _assumed_of_own(names, assumed))
    raise InputError(
        path,
        "line 1",
        f"expected a header with {' and '.join(OWN_REQUIRED)}, or that of a Philly, Muri or Pollux trace",
    )


def _sorted(path: Path, kind: str, jobs: list[Job], assumed: str) -> JobTrace:
    first = min(j.arrival for j in jobs)
    moved = [msgspec.structs.replace(j, arrival=j.arrival - first) if first else j for j in jobs]
    moved.sort(key=lambda j: j.arrival)
    return JobTrace(path.name, kind, tuple(moved), assumed)


def _numbered(parse: Callable[[TraceRow, int, Assumed], Job], assumed: Assumed) -> Callable[[TraceRow], Job]:
    count = 0

    def one(row: TraceRow) -> Job:
        nonlocal count
        count += 1
        return parse(row, count - 1, assumed)

    return one


def _philly(row: TraceRow, serial: int, assumed: Assumed) -> Job:
    workers = row.whole("num_gpus", least=1)
    duration = row.number("duration", above=True)
    if not math.isclose(row.number("gpu_time"), duration * workers, rel_tol=1e-3, abs_tol=1.0):
        raise row.bad("gpu_time", f"duration × num_gpus = {duration * workers:g}")
    return assumed.job(
        name=f"job {serial}",
        serial=serial,
        arrival=row.moment("timestamp"),
        duration=duration,
        workers=workers,
        tenant=row.text("cluster"),
    )


def _muri(row: TraceRow, assumed: Assumed) -> Job:
    row.whole("batch_size", least=1)
    row.number("duration", above=True)
    for field in ("interval", "resource_time_0", "resource_time_2", "priority"):
        row.number(field)
    return assumed.measured(
        name=f"{row.text('model_name')} {row.text('job_id')}",
        arrival=row.number("submit_time") / 1e3,
        iterations=row.whole("iterations", least=1),
        workers=row.whole("num_gpu", least=1),
        device=row.number("resource_time_1", above=True) / 1e3,
        iteration=row.number("iteration_time", above=True) / 1e3,
    )


def _gavel(path: Path, assumed: Assumed, device: str) -> tuple[list[Job], str]:
    beside = path.parent / "simulation_throughputs.json"
    try:
        rates = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(beside, "", "expected Gavel's throughputs in JSON beside the trace") from None
    if not isinstance(rates, dict) or not isinstance(rates.get(device), dict):
        got = ", ".join(rates) if isinstance(rates, dict) else type(rates).__name__
        raise InputError(beside, device, f"expected throughputs of this device, got {got}")
    known = rates[device]
    count = 0

    def per_worker(kind: str, workers: int) -> float:
        """Iterations per second of one worker, at the nearest measured scale by ratio; the file counts those of all."""
        for scale in sorted((1, 2, 4, 8), key=lambda s: abs(math.log(s / workers))):
            entry = known.get(f"('{kind}', {scale})")
            rate = entry.get("null") if isinstance(entry, dict) else None
            if isinstance(rate, float | int) and rate > 0:
                return float(rate) / scale
        return 0.0

    def one(row: TraceRow) -> Job:
        nonlocal count
        count += 1
        workers = row.whole("scale_factor", least=1)
        kind = row.text("job_type")
        rate = per_worker(kind, workers)
        if rate <= 0:
            raise row.bad("job_type", f"a type with a throughput in {beside.name}")
        return assumed.measured(
            name=f"{kind} {count - 1}",
            arrival=row.number("arrival"),
            iterations=max(1, round(row.whole("total_steps", least=1) / workers)),
            workers=workers,
            device=assumed.duty(count - 1) / rate,
            iteration=1 / rate,
        )

    what = f"{assumed.duties()} of an iteration on the device; rates of {device}; {assumed.memory()}"
    return table(path, one, fields=GAVEL, delimiter="\t"), what


def _pollux(path: Path, assumed: Assumed) -> list[Job]:
    steps: dict[str, dict[int, dict[int, tuple[float, float]]]] = {}

    def load(application: str) -> dict[int, dict[int, tuple[float, float]]]:
        """replicas → local batch → (seconds of an iteration, of its synchronisation), on the fewest nodes measured."""
        found: dict[int, dict[int, tuple[float, float]]] = {}

        def spread(row: TraceRow) -> None:
            times = row.number("step_time", above=True), row.number("sync_time")
            replicas = row.whole("num_replicas", least=1)
            found.setdefault(replicas, {}).setdefault(row.whole("local_bsz", least=1), times)

        def placed(row: TraceRow) -> None:
            placement = row.text("placement")
            if not placement.isdecimal() or not sum(map(int, placement)):
                raise row.bad("placement", "one digit for each node, not all 0")
            replicas = sum(map(int, placement))
            tight = len(placement) == math.ceil(replicas / 4)
            if tight:
                times = row.number("step_time", above=True), row.number("sync_time")
                found.setdefault(replicas, {})[row.whole("local_bsz", least=1)] = times

        times = ("local_bsz", "step_time", "sync_time")
        table(path.parent / f"{application}-scalability.csv", spread, needed=("num_replicas", *times))
        table(path.parent / f"{application}-placements.csv", placed, needed=("placement", *times))
        return found

    def one(row: TraceRow) -> Job:
        application, workers = row.text("application"), row.whole("num_replicas", least=1)
        if application not in POLLUX_HOURS:
            raise row.bad("application", f"one of {', '.join(POLLUX_HOURS)}")
        if application not in steps:
            steps[application] = load(application)
        measured = steps[application]
        # The nearest measured number of replicas and local batch, by ratio.
        replicas = min(measured, key=lambda r: (abs(math.log(r / workers)), r))
        local = row.whole("batch_size", least=1) / workers
        step, sync = measured[replicas][min(measured[replicas], key=lambda b: abs(math.log(b / local)))]
        return assumed.measured(
            name=row.text("name"),
            arrival=row.number("time"),
            iterations=max(1, round(POLLUX_HOURS[application] * 3600 / (workers * step))),
            workers=workers,
            device=max(step - sync, 0.05 * step),
            iteration=step,
        )

    return table(path, one)


def _check_own(path: Path, names: list[str]) -> None:
    for name in names:
        if name not in OWN_REQUIRED + OWN_OPTIONAL:
            raise InputError(
                path, f"line 1, {name}", f"unknown column; known: {', '.join(OWN_REQUIRED + OWN_OPTIONAL)}"
            )
    if "iterations" in names:
        for name in ("forward", "backward"):
            if name not in names:
                raise InputError(path, "line 1", f"expected a column {name} beside iterations")
    elif "duration" not in names:
        raise InputError(path, "line 1", "expected a column duration, or iterations, forward and backward")


def _assumed_of_own(names: list[str], assumed: Assumed) -> str:
    said = []
    if "iterations" not in names:
        said.append(assumed.describe())
    elif "off_device" not in names:
        said.append("no time off the device")
    if not {"persistent_bytes", "ephemeral_bytes"} <= set(names):
        said.append(assumed.memory())
    return "; ".join(said)


def _own(row: TraceRow, serial: int, assumed: Assumed) -> Job:
    workers = row.whole("workers", least=1)
    name = row.text("name") if row.has("name") else f"job {serial}"
    arrival = row.number("arrival")
    tenant = row.cells.get("tenant", "")
    if "iterations" in row.cells:
        forward, backward = row.number("forward"), row.number("backward")
        if forward + backward <= 0:
            raise row.bad("forward", "forward + backward above 0")
        job = Job(
            name=name,
            arrival=arrival,
            phases=(JobPhase(iterations=row.whole("iterations", least=1), workers=workers),),
            forward=forward,
            backward=backward,
            off_device=row.number("off_device") if row.has("off_device") else 0.0,
            persistent_bytes=assumed.persistent_bytes,
            ephemeral_bytes=assumed.ephemeral_bytes,
            tenant=tenant,
        )
    else:
        duration = row.number("duration", above=True)
        job = assumed.job(name=name, serial=serial, arrival=arrival, duration=duration, workers=workers, tenant=tenant)
    phase = job.phases[0]
    if row.has("min_workers"):
        fewest = row.whole("min_workers", least=1)
        if fewest > workers:
            raise row.bad("min_workers", f"at most workers = {workers}")
        phase = msgspec.structs.replace(phase, min_workers=fewest)
    return msgspec.structs.replace(
        job,
        phases=(phase,),
        persistent_bytes=(
            row.whole("persistent_bytes", least=0, most=MOST_BYTES)
            if row.has("persistent_bytes")
            else job.persistent_bytes
        ),
        ephemeral_bytes=(
            row.whole("ephemeral_bytes", least=0, most=MOST_BYTES)
            if row.has("ephemeral_bytes")
            else job.ephemeral_bytes
        ),
        background=row.flag("background") if row.has("background") else False,
    )

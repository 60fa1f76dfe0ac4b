"""What commands print with --json and the page can show: read as strictly as the nouns, known by their fields."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any, TypeVar

import msgspec

from dovetail.core.errors import InputError
from dovetail.core.files import Bytes, Count, Name, Seconds


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A command's answer. Fields that the page does not use may come and go."""


class ScaleEntry(Report, frozen=True, kw_only=True):
    workers: Count
    policy: Name
    iteration: Seconds
    speedup: Seconds


class ScaleReport(Report, frozen=True, kw_only=True):
    """`dovetail scale … --json`."""

    profile: str
    network: str
    batch: Count
    points: tuple[ScaleEntry, ...]


class BurstEntryPrediction(Report, frozen=True, kw_only=True):
    iteration: Seconds
    device_time: Seconds
    one_device: Seconds
    memory: Bytes = 0


class BurstEntry(Report, frozen=True, kw_only=True):
    policy: Name
    name: str
    profile: str
    network: str
    devices: Count
    batch: Count
    layers: tuple[str, ...]
    counts: tuple[Count, ...]
    prediction: BurstEntryPrediction
    free_devices: float


class BurstReport(Report, frozen=True, kw_only=True):
    """`dovetail plan … --burst --json`."""

    chosen: Name
    explanation: tuple[str, ...]
    plans: tuple[BurstEntry, ...]


class Traced(Report, frozen=True, kw_only=True):
    name: str
    jobs: Count
    assumed: str = ""


class Sizes(Report, frozen=True, kw_only=True):
    mean: Seconds
    queueing: float


class Sample(Report, frozen=True, kw_only=True):
    makespan: Seconds
    busy: float
    groups: tuple[Sizes, ...]


class StudyCell(Report, frozen=True, kw_only=True):
    policy: Name
    load: float | None
    samples: tuple[Sample, ...]


class StudyReport(Report, frozen=True, kw_only=True):
    """`dovetail schedule … --json`."""

    trace: Traced
    devices: Count
    cells: tuple[StudyCell, ...]


class FabricReport(Report, frozen=True, kw_only=True):
    """`dovetail fabric status --json`."""

    name: Name
    links: dict[str, str]
    counters: dict[str, int] = {}  # msgspec copies it
    believed: dict[str, tuple[str, ...]] = {}


class TraceReport(Report, frozen=True, kw_only=True):
    """`dovetail fabric trace A B --json`."""

    source: str
    target: str
    policy: str
    walk: tuple[str, ...]
    why: str


R = TypeVar("R", bound=Report)

# The fields by which an answer is known, the most telling first.
KINDS: tuple[tuple[frozenset[str], type[Report], str], ...] = (
    (frozenset({"points", "profile"}), ScaleReport, "dovetail scale"),
    (frozenset({"plans", "chosen", "explanation"}), BurstReport, "dovetail plan --burst"),
    (frozenset({"cells", "trace"}), StudyReport, "dovetail schedule"),
    (frozenset({"links", "counters"}), FabricReport, "dovetail fabric status"),
    (frozenset({"walk", "why"}), TraceReport, "dovetail fabric trace"),
)


def read(path: FilePath) -> Report | None:
    """The answer in a file; None for what is no answer of ours, which then is read as a noun."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or "kind" in data:
        return None
    for fields, kind, command in KINDS:
        if fields <= data.keys():
            if kind is BurstReport and not _burst(data):
                continue
            return _convert(data, kind, path, command)
    return None


def _burst(data: dict[str, Any]) -> bool:
    """`dovetail plan --json` has the same fields, with plans of another kind."""
    plans = data["plans"]
    return isinstance(plans, list) and bool(plans) and isinstance(plans[0], dict) and "counts" in plans[0]


def _convert(data: dict[str, Any], kind: type[R], path: FilePath, command: str) -> R:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at `$")
        field = where.rstrip("`").lstrip(".")
        raise InputError(path, field, f"{what[:1].lower()}{what[1:]}, in what `{command} --json` prints") from None

"""Reports of commands, as printed with --json: read as strictly as nouns, and recognised by their fields."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any, TypeVar

import msgspec

from dovetail.core.errors import InputError
from dovetail.core.files import Bytes, Count, Name, Seconds


class CommandReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a command printed. Fields that the page does not use are ignored."""


class ScaleEntry(CommandReport, frozen=True, kw_only=True):
    workers: Count
    policy: Name
    iteration: Seconds
    speedup: Seconds


class ScaleReport(CommandReport, frozen=True, kw_only=True):
    """`dovetail scale … --json`."""

    profile: str
    network: str
    batch: Count
    points: tuple[ScaleEntry, ...]


class BurstEntryPrediction(CommandReport, frozen=True, kw_only=True):
    iteration: Seconds
    device_time: Seconds
    one_device: Seconds
    memory: Bytes = 0


class BurstEntry(CommandReport, frozen=True, kw_only=True):
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


class BurstReport(CommandReport, frozen=True, kw_only=True):
    """`dovetail plan … --burst --json`."""

    chosen: Name
    explanation: tuple[str, ...]
    plans: tuple[BurstEntry, ...]


class StudyTrace(CommandReport, frozen=True, kw_only=True):
    name: str
    jobs: Count
    assumed: str = ""


class StudyGroup(CommandReport, frozen=True, kw_only=True):
    mean: Seconds
    queueing: float


class StudySample(CommandReport, frozen=True, kw_only=True):
    makespan: Seconds
    busy: float
    groups: tuple[StudyGroup, ...]


class StudyEntry(CommandReport, frozen=True, kw_only=True):
    policy: Name
    load: float | None
    samples: tuple[StudySample, ...]


class StudyReport(CommandReport, frozen=True, kw_only=True):
    """`dovetail schedule … --json`."""

    trace: StudyTrace
    devices: Count
    cells: tuple[StudyEntry, ...]


class FabricReport(CommandReport, frozen=True, kw_only=True):
    """`dovetail fabric status --json`."""

    name: Name
    links: dict[str, str]
    counters: dict[str, int] = {}  # msgspec copies it
    believed: dict[str, tuple[str, ...]] = {}


class TraceReport(CommandReport, frozen=True, kw_only=True):
    """`dovetail fabric trace A B --json`."""

    source: str
    target: str
    policy: str
    walk: tuple[str, ...]
    why: str


R = TypeVar("R", bound=CommandReport)

# The fields by which a report is recognised, the most specific first.
KINDS: tuple[tuple[frozenset[str], type[CommandReport], str], ...] = (
    (frozenset({"points", "profile"}), ScaleReport, "dovetail scale"),
    (frozenset({"plans", "chosen", "explanation"}), BurstReport, "dovetail plan --burst"),
    (frozenset({"cells", "trace"}), StudyReport, "dovetail schedule"),
    (frozenset({"links", "counters"}), FabricReport, "dovetail fabric status"),
    (frozenset({"walk", "why"}), TraceReport, "dovetail fabric trace"),
)


def read(path: FilePath) -> CommandReport | None:
    """Reads the report in a file; None where the file is no report (it may be a noun)."""
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

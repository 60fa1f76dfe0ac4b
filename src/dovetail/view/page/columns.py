"""Timelines as columns: a row for each lane of each track, spans by time, communication split where it is exposed."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.core.job import Schedule
from dovetail.core.timeline import Span, Timeline
from dovetail.view import palette, tracks, units
from dovetail.view.schedule import span

from .document import Columns, DrawnTimeline, JobRow, LegendEntry, ScheduleSection, Source, TimelineRow

HEIGHTS = {"communication": 0.55, "wait": 0.2, "idle": 0.2}
"""Shares of a row's height. Hidden communication is half as high and idle time a line, so colour is not needed."""
OTHER_JOBS = "#8a8f98"


class DrawnSpan(NamedTuple):
    """A span to draw; `look` is a key of the looks it is drawn with."""

    look: str
    start: float
    stop: float
    name: str
    bytes: int = 0


class DrawnRow(NamedTuple):
    label: str
    group: str
    cells: list[DrawnSpan]


def drawn(timeline: Timeline) -> DrawnTimeline:
    """A timeline as the page draws it; its time starts at 0."""
    title = f"{timeline.source}{', emulated' if timeline.emulated else ''} · {timeline.name}"
    looks = {
        key: LegendEntry(label=look.label, color=look.color, height=HEIGHTS.get(key, 1.0))
        for key, look in palette.LOOKS.items()
    }
    return pack(
        list(_lanes(timeline)),
        looks,
        name=timeline.name,
        title=f"{title}: {units.seconds(timeline.duration)}",
        source=timeline.source,
        emulated=timeline.emulated,
        duration=timeline.duration,
    )


def _lanes(timeline: Timeline) -> Iterator[DrawnRow]:
    computing = tracks.computing(timeline)
    for track, spans in tracks.by_track(timeline).items():
        group = tracks.group(track)
        for i, lane in enumerate(tracks.lanes(spans)):
            yield DrawnRow(f"{track} {i + 1}" if i else track, group, list(_cells(lane, computing.get(group))))


def _cells(lane: Iterable[Span], computing: list[tracks.Interval] | None) -> Iterator[DrawnSpan]:
    for whole in lane:
        for piece in tracks.pieces((whole,), computing):
            yield DrawnSpan(*piece, whole.bytes)


def pack(
    lanes: Sequence[DrawnRow],
    looks: Mapping[str, LegendEntry],
    *,
    name: str,
    title: str,
    source: Source,
    duration: float,
    emulated: bool = False,
    origin: float = 0.0,
) -> DrawnTimeline:
    """Lanes as columns. The first cell starts at 0; at most 256 looks may occur."""
    cells = [cell for lane in lanes for cell in lane.cells]
    occur = {cell.look for cell in cells}
    used = [key for key in looks if key in occur]
    look_at, name_at = {key: i for i, key in enumerate(used)}, dict[str, int]()
    for cell in cells:
        name_at.setdefault(cell.name, len(name_at))
    start = np.array([c.start for c in cells], dtype=np.float64)
    start -= start.min(initial=np.inf) if len(cells) else 0.0
    sizes = np.array([c.bytes for c in cells], dtype=np.float64)
    rows, at = [], 0
    for lane in lanes:
        rows.append(TimelineRow(label=lane.label, group=lane.group, first=at, stop=at + len(lane.cells)))
        at += len(lane.cells)
    return DrawnTimeline(
        name=name,
        title=title,
        source=source,
        emulated=emulated,
        duration=duration,
        origin=origin,
        looks=tuple(looks[key] for key in used),
        names=tuple(name_at),
        rows=tuple(rows),
        columns=Columns(
            count=len(cells),
            start=_base64(start, "<f8"),
            duration=_base64(np.array([c.stop - c.start for c in cells]), "<f4"),
            look=_base64(np.array([look_at[c.look] for c in cells]), "<u1"),
            name=_base64(np.array([name_at[c.name] for c in cells]), "<u4"),
            bytes=_base64(sizes, "<f8") if sizes.any() else "",
        ),
    )


def _base64(values: npt.NDArray[np.generic], dtype: str) -> str:
    return base64.b64encode(values.astype(np.dtype(dtype)).tobytes()).decode("ascii")


class _Occupancy(NamedTuple):
    """A task or a lease."""

    job: str
    devices: tuple[int, ...]
    start: float
    stop: float
    name: str

    @property
    def held(self) -> float:
        """Device-seconds."""
        return (self.stop - self.start) * len(self.devices)


def _runs(schedule: Schedule) -> list[_Occupancy]:
    """Tasks where they were recorded, leases otherwise."""
    return [
        _Occupancy(r.job, (r.device,), r.start, r.stop, f"{r.job}, iteration {r.iteration}, worker {r.worker}")
        for r in schedule.tasks
    ] or [_Occupancy(x.job, x.devices, x.start, x.stop, x.job) for x in schedule.leases]


def shared(schedule: Schedule) -> ScheduleSection:
    """A schedule: a row per device (more where leases share it), a colour per job, the largest jobs first."""
    runs = _runs(schedule)
    held: dict[str, float] = {}
    for run in runs:
        held[run.job] = held.get(run.job, 0.0) + run.held
    largest = sorted(held, key=lambda job: -held[job])
    colors = dict(zip(largest, palette.SERIES, strict=False))
    looks = {job: LegendEntry(label=job, color=color) for job, color in colors.items()}
    looks["other"] = LegendEntry(label=units.count(len(held) - len(colors), "smaller job"), color=OTHER_JOBS)
    by_device: dict[int, list[DrawnSpan]] = {}
    for run in runs:
        cell = DrawnSpan(run.job if run.job in colors else "other", run.start, run.stop, run.name)
        for device in run.devices:
            by_device.setdefault(device, []).append(cell)
    lanes = [
        DrawnRow(f"device {device}" + (f" ({i + 1})" if i else ""), f"device {device}", lane)
        for device in sorted(by_device)
        for i, lane in enumerate(apart(by_device[device]))
    ]
    timeline = schedule.timeline()
    what = "tasks" if schedule.tasks else "leases"
    title = f"{schedule.source} · {schedule.policy}: {what} on {units.count(schedule.devices, 'device')}"
    return ScheduleSection(
        title=title,
        sentence=_busy(schedule, sum(held.values()), timeline.duration),
        drawn=pack(lanes, looks, name=schedule.policy, title=title, source=schedule.source, duration=timeline.duration),
        jobs=_jobs(runs, colors, tasks=bool(schedule.tasks)),
    )


def _busy(schedule: Schedule, held: float, duration: float) -> str:
    names = {lease.job for lease in schedule.leases} | {run.job for run in schedule.tasks}
    jobs = units.count(len(names), "job")
    if not duration:
        return f"{jobs}: nothing ran."
    share = units.percent(held / (duration * schedule.devices))
    if schedule.tasks:
        return f"{jobs} ran for {span(duration)}; devices were in a task for {share} of the time."
    # Leases may share a device, so this can pass 100 %.
    return f"{jobs} ran for {span(duration)}; leases cover the devices for {share} of the time."


def _jobs(runs: Sequence[_Occupancy], colors: Mapping[str, str], *, tasks: bool) -> tuple[JobRow, ...]:
    """A row per job, by device-time."""
    mine: dict[str, list[_Occupancy]] = {}
    for run in runs:
        mine.setdefault(run.job, []).append(run)
    rows = [
        JobRow(
            name=job,
            color=colors.get(job, OTHER_JOBS),
            first=min(r.start for r in ran),
            last=max(r.stop for r in ran),
            devices=len({d for r in ran for d in r.devices}),
            tasks=len(ran) if tasks else 0,
            device_time=sum(r.held for r in ran),
        )
        for job, ran in mine.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.device_time))


def apart(cells: list[DrawnSpan]) -> list[list[DrawnSpan]]:
    """Cells of a device in as few rows as let no two overlap."""
    rows: list[list[DrawnSpan]] = []
    for cell in sorted(cells, key=lambda c: (c.start, c.stop)):
        free = next((row for row in rows if row[-1].stop <= cell.start + 1e-9), None)
        if free is None:
            rows.append([cell])
        else:
            free.append(cell)
    return rows

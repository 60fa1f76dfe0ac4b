"""A running cluster as a section of the page: devices and their tasks; each job's progress, reasons, promised speed.

`section` is a pure function of the coordinator's snapshot and of the newest spans of its devices. `ClusterSource` gets
the section from a running cluster, for `dovetail view --cluster`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dovetail.cluster.client import Client, Unreachable
from dovetail.cluster.coordinator.status import Ongoing, Snapshot
from dovetail.cluster.executor.recorder import LeaseLine, TaskLine
from dovetail.view import palette, units
from dovetail.view.page import Contents, columns
from dovetail.view.page.columns import OTHER_JOBS, DrawnRow, DrawnSpan
from dovetail.view.page.document import Document, DrawnTimeline, LegendEntry, LiveDevice, LiveJob, ScheduleSection
from dovetail.view.schedule import span as duration

MOST_SPANS = 4000
"""Spans in the picture: the newest."""
MOST_ENDED = 20
"""Ended jobs in the table, besides `status.MOST_JOBS` that have not ended."""
WINDOW = 600.0
"""Seconds that the picture shows at most: in a longer one the present cannot be seen."""
_MOST_LOOKS = 60  # jobs with an entry of their own in the legend
NOTHING = "Nothing has been submitted to this cluster yet."
HOW = "`dovetail cluster submit examples/cluster/digits.py` submits a first job; it appears here by itself."


def section(now: Snapshot, spans: Sequence[TaskLine | LeaseLine]) -> ScheduleSection:
    status = now.status
    names = {j["job"]: _called(j) for j in (*status["jobs"], *status["ended"])}
    gangs = {str(j["job"]) for j in (*status["jobs"], *status["ended"]) if j["kind"] == "gang"}
    recorded = [s for s in spans if isinstance(s, TaskLine) or s.job in gangs]
    cells = _cells(recorded, now.ongoing, names)
    drawn, busy = _draw(cells, status, names)
    jobs = [_job(j, now.reasons) for j in status["jobs"]]
    jobs += [_job(j, now.reasons) for j in status["ended"][:MOST_ENDED]]
    missing = ""
    if not drawn.columns.count:
        missing = "No task has run yet, so there is nothing to draw." if jobs else HOW
    return ScheduleSection(
        title=f"{_devices(status)}, policy {status['policy']}",
        sentence=_sentence(status),
        more=tuple(_more(status, now.reasons, drawn, busy)),
        drawn=drawn,
        live=tuple(jobs),
        devices=tuple(_device(d, names) for d in status["devices"]),
        missing=missing,
    )


def _called(job: Mapping[str, Any]) -> str:
    return f"job {job['job']} ({job['name']})"


# -- the picture --


def _cells(
    recorded: Sequence[TaskLine | LeaseLine], ongoing: Sequence[Ongoing], names: Mapping[int, str]
) -> dict[int, list[DrawnSpan]]:
    """By device, in seconds of time.time(): the newest spans that have ended, then what has not ended yet."""
    last = max((s.stop for s in (*recorded, *ongoing)), default=0.0)
    newest = sorted((s for s in recorded if s.stop > last - WINDOW), key=lambda s: s.stop)[-MOST_SPANS:]
    found: dict[int, list[DrawnSpan]] = {}
    ended: dict[int, float] = {}
    for s in newest:
        name = names.get(int(s.job), f"job {s.job}")
        if isinstance(s, TaskLine):
            name = f"{name}, iteration {s.iteration}, worker {s.worker}"
            ended[s.device] = max(s.stop, ended.get(s.device, 0.0))
        found.setdefault(s.device, []).append(DrawnSpan(s.job, s.start, s.stop, name))
    begin = newest[0].start if newest else 0.0
    for d in ongoing:
        # A task that ran at the last heartbeat may have ended, and have been recorded, since.
        start = max(d.start, begin, 0.0 if d.gang else ended.get(d.device, 0.0))
        if d.stop > start:
            name = f"{names.get(d.job, f'job {d.job}')}, {'has the device' if d.gang else 'running'}"
            found.setdefault(d.device, []).append(DrawnSpan(str(d.job), start, d.stop, name))
    return found


def _draw(
    cells: Mapping[int, list[DrawnSpan]], status: Mapping[str, Any], names: Mapping[int, str]
) -> tuple[DrawnTimeline, float]:
    """The picture, and the share of its time that devices spend in tasks."""
    seconds: dict[str, float] = {}
    for cell in (c for found in cells.values() for c in found):
        seconds[cell.look] = seconds.get(cell.look, 0.0) + cell.stop - cell.start
    largest = set(sorted(seconds, key=lambda job: -seconds[job])[:_MOST_LOOKS])
    looks = {
        job: LegendEntry(label=names.get(int(job), f"job {job}"), color=_color(int(job)))
        for job in sorted(largest, key=int)
    }
    looks["other"] = LegendEntry(label=units.count(len(seconds) - len(largest), "smaller job"), color=OTHER_JOBS)
    lanes = []
    for device in sorted({d["device"] for d in status["devices"]} | set(cells)):
        mine = [c if c.look in largest else c._replace(look="other") for c in cells.get(device, ())]
        for i, row in enumerate(columns.apart(mine) or [[]]):
            lanes.append(DrawnRow(f"device {device}" + (f" ({i + 1})" if i else ""), f"device {device}", row))
    origin = min((c.start for found in cells.values() for c in found), default=0.0)
    last = max((c.stop for found in cells.values() for c in found), default=0.0)
    wide, devices = last - origin, len(status["devices"])
    title = f"measured{', emulated' if status['emulated'] else ''} · the last {duration(wide)} that anything ran"
    drawn = columns.pack(
        lanes, looks, name=status["policy"], title=title, source="measured", emulated=status["emulated"],
        duration=wide, origin=origin,
    )  # fmt: skip
    return drawn, sum(seconds.values()) / (wide * devices) if wide and devices else 0.0


def _color(job: int) -> str:
    """A job keeps its colour."""
    return palette.SERIES[(job - 1) % len(palette.SERIES)]


# -- sentences --


def _sentence(status: Mapping[str, Any]) -> str:
    counts = status["counts"]
    where = _devices(status)
    if not counts:
        return f"{NOTHING} {_are(where, len(status['devices']))} ready."
    running, waiting = counts.get("running", 0), counts.get("queued", 0) + counts.get("preparing", 0)
    ended = sum(counts.get(state, 0) for state in ("finished", "failed", "cancelled"))
    parts = [f"{units.count(running, 'job')} {'runs' if running == 1 else 'run'} on {where}" if running else
             f"No job runs on {where}"]  # fmt: skip
    if waiting:
        parts.append(f"{waiting:,} {'waits' if waiting == 1 else 'wait'}")
    if counts.get("paused"):
        parts.append(f"{_are(str(counts['paused']), counts['paused'])} paused")
    if ended:
        failed = f" ({counts['failed']:,} failed)" if counts.get("failed") else ""
        parts.append(f"{ended:,} {'has' if ended == 1 else 'have'} ended{failed}")
    return ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1] + "."


def _devices(status: Mapping[str, Any]) -> str:
    return units.count(len(status["devices"]), "emulated device" if status["emulated"] else "device")


def _are(what: str, count: int) -> str:
    return f"{what} {'is' if count == 1 else 'are'}"


def _more(
    status: Mapping[str, Any], reasons: Mapping[int, Sequence[str]], drawn: DrawnTimeline, busy: float
) -> list[str]:
    lines = []
    lost = [d["device"] for d in status["devices"] if not d["ready"]]
    if lost:
        lines.append(f"{units.count(len(lost), 'device')} not ready: {', '.join(map(str, lost[:8]))}.")
    waiting = [j for j in status["jobs"] if j["state"] in ("queued", "preparing") and not j["devices"]]
    if waiting and (why := reasons.get(waiting[0]["job"])):
        kind, _, reason = why[0].rpartition(": ")
        first = f"{_called(waiting[0]).capitalize()} waits{f' ({kind})' if kind else ''}: {reason}."
        lines.append(first + (f" {len(waiting) - 1:,} more behind it." if len(waiting) > 1 else ""))
    for j in status["jobs"]:
        if j.get("bound") is not None and j["devices"]:
            lines.append(f"{_called(j).capitalize()} is {_promise(j)}.")
            break
    if drawn.columns.count:
        lines.append(f"In the {duration(drawn.duration)} below devices were in use {units.percent(busy)} of the time.")
    return lines


def _promise(job: Mapping[str, Any]) -> str:
    slow, bound = job.get("slowdown"), job.get("bound")
    if bound is not None:
        promise = f"promised to be slowed by at most {units.percent(bound)} by others"
        if slow is None:
            return f"{promise}: not measured yet"
        return f"{promise}: {units.percent(slow)} measured, {'kept' if slow <= bound else 'broken'}"
    if slow is None:
        return ""
    how = "through others" if job["share"] == "foreground" else "than alone"
    return f"{units.percent(slow)} slower {how}"


def _job(j: Mapping[str, Any], reasons: Mapping[int, Sequence[str]]) -> LiveJob:
    share = "" if j["share"] == "normal" else f", {j['share']}"
    return LiveJob(
        number=j["job"],
        name=f"{_called(j)}{share}",
        color=_color(j["job"]),
        state=j["state"],
        done=j["iteration"],
        total=j["iterations"],
        speed=j.get("iteration_seconds") or 0.0,
        promise=_promise(j),
        devices=", ".join(map(str, j.get("devices", ()))),
        submitted=j["submitted"],
        why=tuple(reasons.get(j["job"], ())) or ((j["reason"],) if j["reason"] else ()),
    )


def _device(d: Mapping[str, Any], names: Mapping[int, str]) -> LiveDevice:
    def called(job: int) -> str:
        return names.get(job, f"job {job}")

    return LiveDevice(
        name=f"device {d['device']}",
        state="not ready" if not d["ready"] else f"runs {called(d['running'])}" if d["running"] else "idle",
        jobs=", ".join(map(called, d["residents"])),
        busy=d["utilization"],
        bytes=d["bytes"],
        bytes_total=d["bytes_total"],
    )


# -- from elsewhere --


@dataclass(frozen=True)
class ClusterSource:
    """A `view.page.Source`: what the cluster's own page shows at the moment of the call."""

    client: Client
    live: bool = True

    def contents(self) -> Contents:
        try:
            found = msgspec.json.decode(self.client.raw("/data.json"), type=Document)
        except msgspec.MsgspecError:
            raise Unreachable(f"{self.client.url}: expected a cluster of this dovetail's version") from None
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        named = "a running cluster" if self.live else f"a running cluster, {when}"
        return Contents(files=(named,), clusters=found.schedules, only=("cluster",))

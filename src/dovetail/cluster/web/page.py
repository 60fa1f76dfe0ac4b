"""A live cluster as a section of the page: who runs where, how far every job is, why it waits, what it was promised.

A pure function of what the cluster says of itself (`report.status`, `why`) and of the newest spans of its devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.cluster.coordinator.snapshot import Doing, Snapshot
from dovetail.cluster.executor.recorder import Held, Ran
from dovetail.view import palette, units
from dovetail.view.page import columns
from dovetail.view.page.columns import OTHER_JOBS, Cell, Lane
from dovetail.view.page.pictures import Drawn, Look
from dovetail.view.page.places import LiveDevice, LiveJob, Shared
from dovetail.view.schedule import span as duration

MOST_SPANS = 4000
"""In the picture; the newest."""
MOST_ENDED = 20
"""In the table, besides `glimpse.MOST_JOBS`."""
WINDOW = 600.0
"""Seconds: a picture of more tells nobody who runs now."""
_MOST_LOOKS = 60
NOTHING = "Nothing has been submitted to this cluster yet."
HOW = "`dovetail cluster submit examples/cluster/digits.py` hands in a first job; it appears here by itself."


def section(now: Snapshot, spans: Sequence[Ran | Held]) -> Shared:
    status = now.status
    names = {j["job"]: _called(j) for j in (*status["jobs"], *status["ended"])}
    gangs = {str(j["job"]) for j in (*status["jobs"], *status["ended"]) if j["kind"] == "gang"}
    recorded = [s for s in spans if isinstance(s, Ran) or s.job in gangs]
    cells = _cells(recorded, now.doing, names)
    drawn, busy = _draw(cells, status, names)
    jobs = [_job(j, now.whys) for j in status["jobs"]]
    jobs += [_job(j, now.whys) for j in status["ended"][:MOST_ENDED]]
    missing = ""
    if not drawn.columns.count:
        missing = "No task has run yet, so there is nothing to draw." if jobs else HOW
    return Shared(
        title=f"{_devices(status)}, policy {status['policy']}",
        sentence=_sentence(status),
        more=tuple(_more(status, now.whys, drawn, busy)),
        drawn=drawn,
        live=tuple(jobs),
        devices=tuple(_device(d, names) for d in status["devices"]),
        missing=missing,
    )


def _called(job: Mapping[str, Any]) -> str:
    return f"job {job['job']} ({job['name']})"


# -- the picture --


def _cells(recorded: Sequence[Ran | Held], doing: Sequence[Doing], names: Mapping[int, str]) -> dict[int, list[Cell]]:
    """By device, in seconds of the calendar's clock: the newest that ended, and what goes on behind them."""
    last = max((s.stop for s in (*recorded, *doing)), default=0.0)
    newest = sorted((s for s in recorded if s.stop > last - WINDOW), key=lambda s: s.stop)[-MOST_SPANS:]
    found: dict[int, list[Cell]] = {}
    ended: dict[int, float] = {}
    for s in newest:
        name = names.get(int(s.job), f"job {s.job}")
        if isinstance(s, Ran):
            name = f"{name}, iteration {s.iteration}, worker {s.worker}"
            ended[s.device] = max(s.stop, ended.get(s.device, 0.0))
        found.setdefault(s.device, []).append(Cell(s.job, s.start, s.stop, name))
    begin = newest[0].start if newest else 0.0
    for d in doing:
        # A task that was running when its device last said so may have ended, and be recorded, since.
        start = max(d.start, begin, 0.0 if d.gang else ended.get(d.device, 0.0))
        if d.stop > start:
            name = f"{names.get(d.job, f'job {d.job}')}, {'has the device' if d.gang else 'running'}"
            found.setdefault(d.device, []).append(Cell(str(d.job), start, d.stop, name))
    return found


def _draw(cells: Mapping[int, list[Cell]], status: Mapping[str, Any], names: Mapping[int, str]) -> tuple[Drawn, float]:
    """The picture, and the share of their time that devices spend in tasks in it."""
    held: dict[str, float] = {}
    for cell in (c for found in cells.values() for c in found):
        held[cell.look] = held.get(cell.look, 0.0) + cell.stop - cell.start
    largest = set(sorted(held, key=lambda job: -held[job])[:_MOST_LOOKS])
    looks = {
        job: Look(label=names.get(int(job), f"job {job}"), color=_color(int(job))) for job in sorted(largest, key=int)
    }
    looks["other"] = Look(label=units.count(len(held) - len(largest), "smaller job"), color=OTHER_JOBS)
    lanes = []
    for device in sorted({d["device"] for d in status["devices"]} | set(cells)):
        mine = [c if c.look in largest else c._replace(look="other") for c in cells.get(device, ())]
        for i, row in enumerate(columns.apart(mine) or [[]]):
            lanes.append(Lane(f"device {device}" + (f" ({i + 1})" if i else ""), f"device {device}", row))
    origin = min((c.start for found in cells.values() for c in found), default=0.0)
    last = max((c.stop for found in cells.values() for c in found), default=0.0)
    wide, devices = last - origin, len(status["devices"])
    title = f"measured{', emulated' if status['emulated'] else ''} · the last {duration(wide)} that anything ran"
    drawn = columns.pack(
        lanes, looks, name=status["policy"], title=title, source="measured", emulated=status["emulated"],
        duration=wide, origin=origin,
    )  # fmt: skip
    return drawn, sum(held.values()) / (wide * devices) if wide and devices else 0.0


def _color(job: int) -> str:
    """The same one for a job as long as it lives."""
    return palette.SERIES[(job - 1) % len(palette.SERIES)]


# -- words --


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


def _more(status: Mapping[str, Any], whys: Mapping[int, Sequence[str]], drawn: Drawn, busy: float) -> list[str]:
    lines = []
    away = [d["device"] for d in status["devices"] if not d["ready"]]
    if away:
        lines.append(f"{units.count(len(away), 'device')} away: {', '.join(map(str, away[:8]))}.")
    waiting = [j for j in status["jobs"] if j["state"] in ("queued", "preparing") and not j["devices"]]
    if waiting and (why := whys.get(waiting[0]["job"])):
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
        told = f"promised to be slowed by at most {units.percent(bound)} by others"
        if slow is None:
            return f"{told}: not measured yet"
        return f"{told}: {units.percent(slow)} measured, {'kept' if slow <= bound else 'broken'}"
    if slow is None:
        return ""
    how = "through others" if job["share"] == "foreground" else "than alone"
    return f"{units.percent(slow)} slower {how}"


def _job(j: Mapping[str, Any], whys: Mapping[int, Sequence[str]]) -> LiveJob:
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
        why=tuple(whys.get(j["job"], ())) or ((j["reason"],) if j["reason"] else ()),
    )


def _device(d: Mapping[str, Any], names: Mapping[int, str]) -> LiveDevice:
    def called(job: int) -> str:
        return names.get(job, f"job {job}")

    return LiveDevice(
        name=f"device {d['device']}",
        state="away" if not d["ready"] else f"runs {called(d['running'])}" if d["running"] else "idle",
        jobs=", ".join(map(called, d["residents"])),
        busy=d["utilization"],
        bytes=d["bytes"],
        bytes_total=d["bytes_total"],
    )

"""The results of a cluster study: tables for the terminal, and load curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from . import units
from .palette import MARKERS, SERIES
from .png import hide_frame, new_figure, save_png
from .tables import plain_table

if TYPE_CHECKING:
    from dovetail.simulate.cluster.report import ClusterReport, Spread
    from dovetail.simulate.cluster.study import Capacity, StudyCell

NOTHING = 0.01
"""Differences below one per cent are called none."""


def span(seconds: float) -> str:
    """A time in the unit that suits it: "4.50 s", "12.3 min", "3.20 h", "11.0 d"."""
    for factor, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * factor:
            return f"{units.seconds(seconds / factor).removesuffix(' s')} {unit}"
    return units.seconds(seconds)


def _with_spread(s: Spread, text: str) -> str:
    wide = s.high - s.low > 0.01 * abs(s.mean)
    return f"{text} ±{(s.high - s.low) / 2 / s.mean:.0%}" if wide and s.mean else text


def outcomes(cells: Sequence[StudyCell]) -> RenderableType:
    """One row per policy: times over all jobs. The spread over samples follows where it is above one per cent."""
    table = plain_table("policy", ">makespan", ">mean", ">median", ">p99", ">queueing", ">busy")
    table.columns[0].no_wrap = True
    for cell in cells:
        mean, makespan = cell.figure(lambda r: r.all.mean), cell.figure(lambda r: r.makespan)
        table.add_row(
            cell.contender.name,
            _with_spread(makespan, span(makespan.mean)),
            _with_spread(mean, span(mean.mean)),
            span(cell.figure(lambda r: r.all.median).mean),
            span(cell.figure(lambda r: r.all.p99).mean),
            span(cell.figure(lambda r: r.all.queueing).mean),
            f"{cell.figure(lambda r: r.busy).mean:.0%}",
        )
    return table


def _against(value: float, base: float) -> str:
    return f"{value / base - 1:+.0%}".replace("+0%", "0%").replace("-0%", "0%") if base else ""


def _means(cell: StudyCell) -> dict[str, float]:
    """Mean completion by size, over all samples that have jobs of that size."""
    found: dict[str, list[float]] = {}
    for r in cell.reports:
        for g in r.groups:
            found.setdefault(g.name, []).append(g.mean)
    return {name: sum(values) / len(values) for name, values in found.items()}


def by_size(cells: Sequence[StudyCell], baseline: StudyCell) -> RenderableType:
    """Makespan, mean completion by the number of workers, and fairness, against the baseline."""
    base = baseline.reports[0]
    table = plain_table(f"against {baseline.contender.name}", ">makespan", *(f">{g.name}" for g in base.groups))
    table.columns[0].no_wrap = True
    table.add_row("jobs", "", *(f"{g.jobs:,}" for g in base.groups), style="dim")
    for cell in cells:
        if cell is not baseline:
            mine, there = _means(cell), _means(baseline)
            changes = (_against(mine[g.name], there[g.name]) for g in base.groups)
            makespans = [c.figure(lambda r: r.makespan).mean for c in (cell, baseline)]
            table.add_row(cell.contender.name, _against(*makespans), *changes)
    fair = plain_table("fairness", ">10% later than an equal share", ">99th percentile", ">slowdown")
    for cell in cells:
        fair.add_row(
            cell.contender.name,
            f"{cell.figure(lambda r: r.all.unfair).mean:.0%} of jobs",
            f"{cell.figure(lambda r: r.all.worst_fairness).mean:.2f}",
            f"{cell.figure(lambda r: r.all.slowdown).mean:.2f}",
        )
    note = Text("mean completion by number of workers; below 0 is sooner", style="dim")
    return Lines(table, note, Text(), fair)


def limits(r: ClusterReport) -> str:
    """The lower bounds, in one line."""
    b = r.bound
    which = "the work on all devices" if b.area >= b.critical_path else "one job's own iterations"
    return f"no schedule ends before {span(b.makespan)} ({which}) or has a mean completion below {span(b.completion)}"


def verdict(cell: StudyCell, baseline: StudyCell) -> str:
    """What a policy gains over the baseline, in words, and which sizes of jobs gain nothing."""
    mine, base = _means(cell), _means(baseline)
    makespan = cell.figure(lambda r: r.makespan).mean / baseline.figure(lambda r: r.makespan).mean - 1
    parts = [_phrase("mean completion", mine["all"] / base["all"] - 1), _phrase("makespan", makespan)]
    nothing = [name for name in base if name != "all" and mine[name] > base[name] * (1 - NOTHING)]
    text = f"{cell.contender.name} against {baseline.contender.name}: {', '.join(parts)}"
    if nothing:
        return f"{text}; no gain for jobs of {', '.join(nothing)}"
    return text


def _phrase(what: str, change: float) -> str:
    if abs(change) < NOTHING:
        return f"{what} the same"
    return f"{what} {abs(change):.0%} {'shorter' if change < 0 else 'longer'}"


def sweep(cells: Sequence[StudyCell]) -> RenderableType:
    """Mean completion and queue growth over load: a row per load, a column per policy; "…" where the queue grows."""
    names = list(dict.fromkeys(c.contender.name for c in cells))
    table = plain_table(">load", *(f">{n}" for n in names))
    for load in dict.fromkeys(c.load for c in cells):
        row = [c for c in cells if c.load == load]
        texts = []
        for c in row:
            mean = c.figure(lambda r: r.all.mean)
            growing = any(not r.bounded for r in c.reports)
            texts.append(_with_spread(mean, span(mean.mean)) + (" …" if growing else ""))
        table.add_row(f"{load:g}" if load else "", *texts)
    note = "mean completion; … where the queue grows: above capacity the mean says more about the trace's length"
    return Lines(table, Text(note, style="dim"))


def capacities(found: Sequence[tuple[str, Sequence[Capacity]]]) -> RenderableType:
    table = plain_table("policy", ">capacity", ">lowest", ">highest")
    for name, runs in found:
        loads = [c.load for c in runs]
        table.add_row(name, f"{sum(loads) / len(loads):.2f}", f"{min(loads):.2f}", f"{max(loads):.2f}")
    note = "the largest load with a bounded queue; 1.0: devices full of gangs with full backpropagation"
    return Lines(table, Text(note, style="dim"))


def curves_png(cells: Sequence[StudyCell], path: str | Path, *, title: str = "") -> None:
    """Load curves: slowdown of the mean job and share of device time used, by policy; spread over samples as bars."""
    names = list(dict.fromkeys(c.contender.name for c in cells))
    figure = new_figure(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    for i, name in enumerate(names):
        mine = [c for c in cells if c.contender.name == name and c.load]
        loads = [c.load for c in mine]
        look = {
            "color": SERIES[i % len(SERIES)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4,
            "linewidth": 1.3,
        }
        slow = [c.figure(lambda r: r.all.slowdown) for c in mine]
        bars = [[s.mean - s.low for s in slow], [s.high - s.mean for s in slow]]
        left.errorbar(loads, [s.mean for s in slow], yerr=bars, label=name, capsize=2, **look)
        right.plot(loads, [c.figure(lambda r: r.window_busy).mean * 100 for c in mine], **look)
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    left.set_yscale("log")
    left.yaxis.set_major_locator(FixedLocator([1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000]))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.yaxis.set_minor_locator(NullLocator())
    left.set_ylabel("completion / time alone, mean over jobs")
    right.set_ylabel("device time in tasks (%)")
    for axis in (left, right):
        axis.set_xlabel("offered load (1 = devices full of gangs)")
        axis.grid(alpha=0.25)
        hide_frame(axis)
    figure.suptitle(f"predicted: {title}" if title else "predicted", x=0.01, ha="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), frameon=False, fontsize=8.5)
    save_png(figure, path)

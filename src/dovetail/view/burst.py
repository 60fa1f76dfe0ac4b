"""What burst plans say: the trade-off as a table, in sentences and as a picture. Everything here is predicted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error
from dovetail.planning.burst import rules
from dovetail.planning.burst.background import LIMITS, background
from dovetail.planning.burst.overlap import fastest_overlapped, overlapped
from dovetail.planning.burst.planner import BurstPlanner

from . import units
from .palette import MARKERS, SERIES
from .png import hide_frame, new_figure, save_png
from .tables import plain_table

SHOWN = (1.1, 1.25, 1.5, 2.0, 3.0)
"""Limits on total device-time that get a row of the table."""
NOTHING = 0.02
"""Differences below two per cent are called none: layer times are not known better."""
MOST_CELLS = 1500
"""Layers times choices up to which plans with hidden gradients are looked for too."""
WORTH = 0.1
"""Share of the speed, or of the devices, that must be gained to be worth another way of training."""


@dataclass(frozen=True)
class BurstRow:
    """A plan and what it leaves to others."""

    plan: BurstPlan
    free: float
    """Devices, on average over an iteration."""
    useful: float
    """The same, counting only gaps that background tasks fit into."""


@dataclass(frozen=True)
class BurstStudy:
    """Plans side by side for one job."""

    planner: BurstPlanner
    chosen: BurstRow
    rows: list[BurstRow]
    """Data parallelism first, then what others would do, then burst plans."""
    task: float
    """Seconds of a background task."""
    broken: list[rules.Violation]
    """Layers in which the plan by DeepPool's rule is above the rule's own limit."""

    def row(self, policy: str) -> BurstRow | None:
        return next((r for r in self.rows if r.plan.policy == policy), None)


def study(planner: BurstPlanner, *, amplification: float | None = None, task: float = 0.0) -> BurstStudy:
    """Data parallelism on 1, 2, 4, … devices, DeepPool's rule where it applies, and burst plans along the front."""
    if not planner.one_device:
        raise Error(f"profile {planner.profile.name!r}: expected layers that take time, all of its layers take 0 s")

    def row(plan: BurstPlan) -> BurstRow:
        left = background(planner, plan.counts, task=task)
        idle = planner.devices - plan.prediction.device_time / (plan.prediction.iteration or 1)
        return BurstRow(plan, idle, left.devices)

    widest = min(planner.devices, planner.cost.batch)
    numbers = [*(2**i for i in range(widest.bit_length()) if 2**i < widest), widest]
    plans = [rules.by_name(planner, f"dp:{g}") for g in numbers]
    broken: list[rules.Violation] = []
    with contextlib.suppress(Error):  # in a graph with branches: its rule knows chains only
        limit = amplification or rules.DEFAULT_AMPLIFICATION
        rule, broken = rules.deeppool(planner, amplification=limit)
        plans.append(rule)
    chosen = planner.fastest(amplification=amplification)
    burst = planner.tradeoff([a for a in SHOWN if amplification is None or a < amplification])
    found = [chosen, *(p for p in burst if p.counts != chosen.counts)]
    found.sort(key=lambda p: p.prediction.iteration)
    rows = [row(p) for p in [*plans, *found]]
    return BurstStudy(planner, next(r for r in rows if r.plan is chosen), rows, task, broken)


def table(found: BurstStudy) -> RenderableType:
    devices = found.planner.devices
    base = next(r for r in reversed(found.rows) if r.plan.policy.startswith("dp:")).plan
    columns = ["   plan", ">iteration", ">speed", ">device-time", f">free of {devices:,}"]
    made = plain_table(*columns, *([">in tasks"] if found.task else []), ">stages")
    for r in found.rows:
        p, mark = r.plan.prediction, r is found.chosen
        row = [f"{'->' if mark else '  '} {name(r.plan)}", units.seconds(p.iteration)]
        speed = f"{base.prediction.iteration / p.iteration:.2f}x" if p.iteration else "-"
        row += [speed, f"{p.amplification:.2f}x", f"{r.free:.1f}"]
        row += [f"{r.useful:.1f}"] if found.task else []
        made.add_row(*row, str(len(r.plan.stages())), style="bold" if mark else "")
    note = f"speed against {base.policy}; device-time against one device; free devices on average"
    note += f", and in gaps that tasks of {units.seconds(found.task)} fill" if found.task else ""
    return Group(made, Text(note, style="dim"))


def stages(plan: BurstPlan) -> RenderableType:
    """A plan's runs of layers with one device count."""
    p = plan.prediction
    lines = [
        f"burst plan {plan.policy} for {plan.profile} on {plan.network}: global batch {plan.batch}, up to "
        f"{units.count(plan.devices, 'device')}",
        f"predicted iteration {units.seconds(p.iteration)}, device-time {units.seconds(p.device_time)} "
        f"({p.amplification:.2f}x one device), {units.size(p.memory)} on rank 0",
    ]
    made = plain_table(">stage", ">devices", ">layers", "first", "last")
    for i, (first, stop, devices) in enumerate(plan.stages()):
        made.add_row(str(i), f"{devices:,}", str(stop - first), plan.layers[first], plan.layers[stop - 1])
    return Group(*map(Text, lines), made)


def name(plan: BurstPlan) -> str:
    kind, _, limit = plan.policy.partition(":")
    if kind == "fastest":
        return f"burst <={limit}x" if limit else "burst fastest"
    return plan.policy


def sentences(found: BurstStudy) -> list[str]:
    """Whether the layers are uneven enough, what it would gain and what it would free."""
    planner, devices = found.planner, found.planner.devices
    best = min((r.plan for r in found.rows if r.plan.policy.startswith("dp:")), key=lambda p: p.prediction.iteration)
    fastest, one = planner.fastest().prediction, planner.one_device
    gain = best.prediction.iteration / fastest.iteration - 1 if fastest.iteration else 0.0
    lines = [
        f"{planner.profile.name} at a global batch of {planner.cost.batch} on up to {units.count(devices, 'device')}, "
        f"{planner.network}: one device computes for {units.seconds(one)} per iteration. Predicted; nothing ran.",
        f"The fastest plan takes {units.seconds(fastest.iteration)}, "
        + (f"{gain:.0%} faster than" if gain >= NOTHING else "no faster than")
        + f" {best.policy} ({units.seconds(best.prediction.iteration)}), the fastest data-parallel one.",
    ]
    lines += _behind_backward(planner, best)
    most_memory = planner.memory if planner.memory is not None else math.inf
    fit = [r.plan for r in found.rows if r.plan.policy.startswith("dp:") and r.plan.prediction.memory <= most_memory]
    parallel = [p for p in rules.data_parallel(planner) if p.prediction.memory <= most_memory]
    freed = [freed_devices(planner, plan, parallel) for plan in fit if plan.counts[0] > 1]
    most = max(freed, key=lambda f: f[1] - f[2], default=None)
    more = (most[1] - most[2]) / devices if most is not None else 0.0
    if most is not None and more >= NOTHING:
        plan, burst, static = most
        lines.append(
            f"At the speed of {plan.policy} ({units.seconds(plan.prediction.iteration)}) burst leaves {burst:.1f} of "
            f"{devices} devices to others, a static partition {static:.1f}."
        )
    if max(gain, more) < NOTHING:
        lines.append("Not worth bursting: a static partition (data-parallel on fewer devices) gives the same.")
    elif max(gain, more) < WORTH:
        lines.append(
            "Hardly worth bursting: a static partition (data-parallel on fewer devices) gives nearly the same."
        )
    else:
        lines.append("Worth bursting: its layers are uneven.")
    if found.broken:
        worst = max(found.broken, key=lambda v: v.amplification)
        lines.append(
            f"deeppool's rule breaks its own limit in {units.count(len(found.broken), 'layer')}, most in "
            f"{worst.layer} ({worst.amplification:.2f}x)."
        )
    return lines + _doubts(planner, found.chosen.plan)


def _behind_backward(planner: BurstPlanner, dp: BurstPlan) -> list[str]:
    """The gain that is left where backward hides gradients; no line where that would take long to plan."""
    if len(planner.choices) * len(planner.profile.layers) > MOST_CELLS:
        return []
    same, best = overlapped(planner, dp).prediction, fastest_overlapped(planner).prediction
    return [
        f"All-reduces are paid for in full here. Behind backward, as well as merging can hide them, {dp.policy} would "
        f"take {units.seconds(same.iteration)} and burst {units.seconds(best.iteration)}."
    ]


def freed_devices(
    planner: BurstPlanner, dp: BurstPlan, parallel: Sequence[BurstPlan]
) -> tuple[BurstPlan, float, float]:
    """(a data-parallel plan, devices that burst frees at its speed, devices that the best static partition frees).

    An iteration that is shorter than it has to be leaves the rest of the time free as well.
    """
    speed = dp.prediction.iteration
    burst = planner.cheapest(iteration=speed).prediction.device_time
    static = min(p.prediction.device_time for p in (dp, *parallel) if p.prediction.iteration <= speed)
    return dp, planner.devices - burst / (speed or 1), planner.devices - static / (speed or 1)


def _doubts(planner: BurstPlanner, plan: BurstPlan) -> list[str]:
    """A warning if the plan rests on local batches that were not measured."""
    measured = sorted({t.batch for layer in planner.profile.layers for t in layer.times})
    needed = sorted({-(-plan.batch // g) for g in plan.counts} | {plan.batch})
    if len(measured) == 1:
        return [
            f"Only one local batch ({measured[0]}) was measured, so every layer is taken to scale perfectly and hardly "
            f"one can look uneven: profile {needed[0]} to {needed[-1]} with `dovetail profile --batches`."
        ]
    if needed[0] >= measured[0] and needed[-1] <= measured[-1]:
        return []
    return [
        f"Layer times beyond the measured local batches ({measured[0]} to {measured[-1]}) are extrapolated; this plan "
        f"needs {needed[0]} to {needed[-1]}: profile those with `dovetail profile --batches`."
    ]


def burst_png(found: BurstStudy, path: str | Path) -> None:
    """Left: iteration time against device-time, the front and what others would do. Right: devices of every layer."""
    figure = new_figure(11.0, 4.6)
    trade, layers = figure.subplots(1, 2)
    planner = found.planner
    front = planner.tradeoff(LIMITS)
    _draw(trade, front, "burst (points of the exact front)", 0, line=True)
    _draw(trade, [r.plan for r in found.rows if r.plan.policy.startswith("dp:")], "data-parallel", 1, line=True)
    others = [r.plan for r in found.rows if r.plan.policy.split(":")[0] not in ("dp", "fastest")]
    if others:
        _draw(trade, others, others[0].policy, 2, line=False)
    chosen = found.chosen.plan
    trade.plot(*_at(chosen), "*", color="black", markersize=13, label=f"chosen: {name(chosen)}", zorder=5)
    trade.set_xlabel("iteration (ms)")
    trade.set_ylabel("device-time (times one device)")
    trade.set_ylim(bottom=0)
    trade.set_xlim(left=0)
    trade.grid(color="#dddddd", linewidth=0.6)
    trade.legend(frameon=False, fontsize=8)
    layers.bar(range(len(chosen.counts)), chosen.counts, width=1.0, color=SERIES[0], edgecolor="white", linewidth=0.3)
    layers.set_ylim(0, planner.devices * 1.05)
    layers.set_xlabel("layer, in execution order")
    layers.set_ylabel(f"devices of {planner.devices}")
    for axis in (trade, layers):
        hide_frame(axis)
    title = f"predicted: {planner.profile.name}, global batch {planner.cost.batch}, up to {planner.devices} devices, "
    figure.suptitle(title + planner.network, x=0.01, ha="left", fontsize=11)
    save_png(figure, path)


def _at(plan: BurstPlan) -> tuple[float, float]:
    return plan.prediction.iteration * 1e3, plan.prediction.amplification


def _draw(axis: Any, plans: Sequence[BurstPlan], label: str, series: int, *, line: bool) -> None:
    x, y = zip(*map(_at, plans), strict=True)
    style = "-" if line else ""
    axis.plot(x, y, MARKERS[series] + style, color=SERIES[series], markersize=5, linewidth=1.2, label=label)
    if label == "data-parallel":
        for plan, a, b in zip(plans, x, y, strict=True):
            axis.annotate(f" {plan.counts[0]}", (a, b), fontsize=8, color=SERIES[series])

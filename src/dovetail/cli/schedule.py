"""`dovetail schedule`: simulates a trace of jobs on a cluster under several policies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from dovetail.core.errors import Error

from . import console, inputs

if TYPE_CHECKING:
    from dovetail.simulate.cluster.study import StudyCell
    from dovetail.simulate.traces import JobTrace

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "small-cluster.csv"
BASELINE = "gang-fifo-backfill"
LEAST_LOAD, MOST_LOAD = 0.01, 100.0


class ScheduleCommand(TyperCommand):
    """Its help ends with the list of policies."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from dovetail.planning.sharing.policies import POLICIES

        with formatter.section("Policies"):
            formatter.write_dl(POLICIES.described())


def schedule(
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="A trace of jobs; default: a small one that is shipped.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, max=1_000_000, help="Devices of the cluster.")] = 64,
    policy: Annotated[
        str, typer.Option(metavar="NAME,…", help="Policies; a suffix :full, :ladder or :late sets the depths of one.")
    ] = f"jigsaw,{BASELINE}",
    load: Annotated[
        str | None, typer.Option(metavar="0.5..1.2", help="Stretch arrivals to these loads: a range, or a list.")
    ] = None,
    spb: Annotated[
        Literal["full", "ladder", "late"],
        typer.Option(
            help="Depths under policies that share devices: partial backpropagation always, or in the last half."
        ),
    ] = "full",
    capacity: Annotated[bool, typer.Option("--capacity", help="Find the largest load with a bounded queue.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Samples of the trace with Poisson arrivals; needs --load.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of jobs: the first of the trace, or of each sample.")
    ] = None,
    window: Annotated[
        str, typer.Option(metavar="0.2..0.8", help="Steady state: the part of the arrivals that is reported.")
    ] = "0..1",
    level: Annotated[Literal["auto", "task", "fluid"], typer.Option(help="auto: task level if small enough.")] = "auto",
    node: Annotated[int, typer.Option(min=1, help="Devices of a node.")] = 8,
    memory: Annotated[float, typer.Option(min=0.001, help="Memory of a device, GiB.")] = 16.0,
    duty_cap: Annotated[
        float | None, typer.Option(min=0.1, help="Largest sum of duties on a device; default: the policy's.")
    ] = None,
    jitter: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Coefficient of variation of a task's duration.")
    ] = 0.04,
    switch: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a device needs to turn to another job's task.")
    ] = 0.002,
    restart: Annotated[float, typer.Option(min=0.0, help="Seconds to restart a preempted job.")] = 5.0,
    shape: Annotated[
        str, typer.Option(help="Kind of iterations, where the trace does not say: gpu-bound, typical, mixed, …")
    ] = "typical",
    iteration: Annotated[
        float, typer.Option(min=1e-4, help="Seconds of an iteration, where the trace does not say.")
    ] = 0.4,
    clip: Annotated[bool, typer.Option("--clip", help="Narrow jobs that are wider than the cluster.")] = False,
    png: Annotated[Path | None, typer.Option(metavar="out.png", help="Also draw the load curves.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="out.json", help="Also write which job ran where, for Perfetto.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Also write which job ran where under the first policy, for `dovetail view`."
        ),
    ] = None,
    json: console.Json = False,
) -> None:
    """Simulate a cluster: how much sooner would your jobs finish if they shared devices, iteration by iteration?

    A trace is a CSV with the columns arrival, workers and duration (seconds), or one of the formats of Philly, Muri,
    Pollux and Gavel. Everything printed is predicted: no job runs.
    """
    from dovetail.planning.sharing.pack import ClusterSize
    from dovetail.simulate.cluster import Overheads
    from dovetail.simulate.cluster.study import clipped, contenders, study
    from dovetail.simulate.traces import Assumed, TraceError, read_trace

    finite(memory=memory, duty_cap=duty_cap or 0.0, switch=switch, jitter=jitter, restart=restart, iteration=iteration)
    source = trace or SHIPPED
    loads = numbers("--load", load) if load else []
    low, high = bounds("--window", window)
    if png and not loads:
        raise Error("--png draws load curves: give --load 0.5..1.2")
    for path in (png, perfetto, output):
        inputs.not_an_input(path, source)
        if path:
            console.writable(path)
    who = contenders(policy, spb=spb, duty_cap=duty_cap)
    cluster = ClusterSize(devices=devices, node=min(node, devices), device_bytes=inputs.memory_bytes(memory))
    overheads = Overheads(jitter=jitter, switch=switch, restart=restart)
    try:
        found = read_trace(source, assumed=Assumed(shape=shape, iteration=iteration))
    except TraceError as e:
        for row in e.rows[1:]:
            console.say(f"dovetail: {row}")
        raise
    work = list(found.jobs)
    if jobs and samples == 1:
        work = work[:jobs]
    if clip:
        work = clipped(work, devices)
    widest = max(work, key=lambda j: j.workers)
    if widest.workers > devices:
        raise Error(f"{source}: {widest.name!r} needs {widest.workers} devices, the cluster has {devices}: see --clip")
    with console.working("simulating") as tell:
        cells = study(
            work, cluster, who, loads=loads, samples=samples, count=jobs, level=level, overheads=overheads,
            window=(low, high), record=bool(perfetto or output), tell=tell,
        )  # fmt: skip
        carried = []
        if capacity:
            from dovetail.simulate.cluster import capacity as find

            for c in who:
                tell(f"capacity of {c.name}")
                runs = [
                    find(work, cluster, c.policy, depths=c.depths, seed=s, overheads=overheads)
                    for s in range(max(samples, 2))
                ]
                carried.append((c.name, runs))
    if png:
        from dovetail.view.schedule import curves_png

        curves_png(cells, png, title=f"{found.name}, {devices} devices")
        console.wrote(png)
    if perfetto:
        import msgspec

        from dovetail.view import perfetto as writer

        timelines = [msgspec.structs.replace(c.outcome.schedule().timeline(), name=c.name) for c in cells]
        writer.write(timelines, perfetto)
        console.wrote(perfetto)
    if output:
        from dovetail.core import files

        files.write(output, cells[0].outcome.schedule())
        console.wrote(output)
    if json:
        console.emit(
            {
                "trace": {"name": found.name, "format": found.format, "jobs": len(work), "assumed": found.assumed},
                "devices": devices,
                "cells": [
                    {"policy": c.contender.name, "load": c.load, "samples": [r.to_json() for r in c.reports]}
                    for c in cells
                ],
                "capacity": [{"policy": name, "loads": [c.load for c in runs]} for name, runs in carried],
            }
        )
        return
    _show(found, work, cells, carried, devices)


def _show(found: JobTrace, work: list[Any], cells: list[StudyCell], carried: list[Any], devices: int) -> None:
    from dovetail.simulate.cluster.study import offered
    from dovetail.view import schedule as view

    own = offered(work, devices)
    line = f"predicted: {found.name} ({found.format}), {len(work):,} jobs on {devices:,} devices"
    console.show(line + (f", offered load {own:.2f}" if own < float("inf") else ", all at once"))
    if found.assumed:
        console.show(f"not in the trace, assumed: {found.assumed}")
    last = [c for c in cells if c.load == cells[-1].load]
    baseline = next((c for c in last if c.contender.name == BASELINE), last[-1])
    if cells[0].load is not None:
        console.show("", view.sweep(cells), "", f"at load {cells[-1].load:g}:")
    console.show("", view.outcomes(last), "", view.by_size(last, baseline), "", view.limits(baseline.reports[0]))
    for c in last:
        if c is not baseline:
            console.show(view.verdict(c, baseline))
    if carried:
        console.show("", view.capacities(carried))


def bounds(option: str, text: str) -> tuple[float, float]:
    """A range "0.2..0.8" within 0 and 1."""
    first, dots, last = text.partition("..")
    try:
        low, high = float(first), float(last)
    except ValueError:
        low, high = 1.0, 0.0
    if not dots or not 0 <= low < high <= 1:
        raise Error(f"{option}: expected a range within 0..1 such as 0.2..0.8, got {text!r}")
    return low, high


def finite(**options: float) -> None:
    """Refuses options that a user wrote as inf or nan."""
    for name, value in options.items():
        if not math.isfinite(value):
            raise Error(f"--{name.replace('_', '-')}: expected a finite number, got {value}")


def numbers(option: str, text: str) -> list[float]:
    """A list "0.5,0.8" or a range "0.5..1.2" in steps of a tenth."""
    try:
        if ".." in text:
            found = []
            first, last = (float(x) for x in text.split("..", 1))
            if LEAST_LOAD <= first <= last <= MOST_LOAD:
                found = [round(first + 0.1 * i, 6) for i in range(math.floor((last - first) / 0.1 + 1e-6) + 1)]
                if found[-1] < last - 1e-6:
                    found.append(last)
        else:
            found = [float(x) for x in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not LEAST_LOAD <= x <= MOST_LOAD for x in found):
        raise Error(f"{option}: expected loads such as 0.5..1.2 or 0.5,0.9, got {text!r}")
    return found

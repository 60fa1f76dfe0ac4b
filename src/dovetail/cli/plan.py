"""`dovetail plan`, `simulate` and `scale`: what to do and what it is worth, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from . import console, depth, inputs

if TYPE_CHECKING:
    from dovetail.core.plan import Overlap
    from dovetail.planning.merge.cycle_choice import Memory
    from dovetail.planning.merge.setting import Precisions

ProfileFile = Annotated[Path, typer.Argument(metavar="job.json", help="A profile, from `dovetail profile`.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Ranks to plan for; default: the network's own.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Local batch; default: the profile's own.")]
Png = Annotated[Path | None, typer.Option(metavar="out.png", callback=inputs.png_path, help="Also draw a picture.")]
NETWORK = "A network file, or a preset such as 10gbe-16."


class Behind(StrEnum):
    """Behind what communication hides."""

    backward = "backward"
    forward = "forward"


class Bits(StrEnum):
    """What may travel in fewer bits."""

    full = "full"
    bf16 = "bf16"
    int8 = "int8"
    auto = "auto"


class Goal(StrEnum):
    """What --auto optimises."""

    time = "time"
    device_time = "device-time"
    throughput = "throughput"


OVERLAP = """backward: all-reduces behind backward, as torch's DDP; forward: each bucket is all-reduced (whole), or
reduce-scattered behind backward and all-gathered behind the next forward (split)."""


BELONGS = {
    "workers": ("", "--spb"),
    "policy": ("",),
    "overlap": ("",),
    "optimizer": ("", "--auto"),
    "png": ("", "--burst"),
    "devices": ("--burst", "--auto"),
    "precision": ("",),
    "memory": ("", "--burst", "--auto"),
    "task": ("--burst", "--auto --objective throughput"),
    "amplification": ("--burst",),
    "objective": ("--auto",),
    "within": ("--auto",),
    "allow_statistics": ("--auto",),
}
"""Options that not every way of planning has, and the ways that have them; "" is the one of merging."""


class PlanCommand(TyperCommand):
    """`dovetail plan`; its help lists all policies."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from dovetail.planning.depth.planner import POLICIES as DEPTH
        from dovetail.planning.merge.policies import POLICIES as MERGE

        with formatter.section("Policies"):
            formatter.write_dl(MERGE.described())
        with formatter.section("Policies of partial backpropagation (--spb)"):
            formatter.write_dl(DEPTH.described())


def plan(
    ctx: typer.Context,
    profile: ProfileFile,
    network: Annotated[
        str | None, typer.Argument(metavar="net.json", help=f"{NETWORK} With --burst it may be left out: NVLink.")
    ] = None,
    workers: Workers = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Local batch, with --burst and --auto the global one; default: the profile's own (--auto: on each "
            "device).",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="The policy to use; `auto` chooses a robust one no slower than ddp.")
    ] = "auto",
    overlap: Annotated[Behind, typer.Option(help=OVERLAP)] = Behind.backward,
    optimizer: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Overlap with forward: the optimiser on one rank's share."),
    ] = 0.0,
    spb: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan partial backpropagation instead and write a depth plan."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", dir_okay=False, help="Where to write the plan; default: plan.json (--spb: depth.json)."
        ),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Choose the best combination of all techniques and numbers of devices.")
    ] = False,
    objective: Annotated[
        Goal, typer.Option(help="--auto: what to optimise; all but time keep at least the speed of torch's DDP.")
    ] = Goal.time,
    within: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="--auto: another speed to keep, as an iteration.")
    ] = None,
    allow_statistics: Annotated[
        bool,
        typer.Option("--allow-statistics", help="--auto: also techniques that change the statistics of the gradients."),
    ] = False,
    burst: Annotated[
        bool, typer.Option("--burst", help="Plan how many devices each layer gets, for a fixed global batch.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="--burst, --auto: devices the job may use; default: the network's ranks, or 8."),
    ] = None,
    amplification: Annotated[
        float | None, typer.Option(min=1, help="--burst: most device-time, in multiples of one device's.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="time|shard|GIB",
            help="--overlap forward: the fastest, or the most split buckets (1/n of the optimiser's state) within 2 % "
            "of it. --burst, --auto: most memory of a rank, in GiB.",
        ),
    ] = None,
    precision: Annotated[
        Bits, typer.Option(help="--overlap forward: fewer bits on the wire, in buckets where that saves time.")
    ] = Bits.full,
    task: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="MS",
            help="--burst, --auto --objective throughput: a background task; shorter gaps are worthless.",
        ),
    ] = 0.5,
    png: Png = None,
    json: console.Json = False,
) -> None:
    """Compare every policy for a job on a network, choose one, explain it, and write the plan.

    Below the ways of merging gradients stands what partial backpropagation would save.
    With --burst: how many devices each layer should get, the trade-off between time and device-time, what it frees.
    With --auto: all of it and plain data parallelism side by side, and the best combination.
    """
    if auto + burst + (spb is not None) > 1:
        raise typer.BadParameter("--auto, --burst and --spb are several ways: give one")
    ways = ["--auto", f"--auto --objective {objective.value}"] if auto else ["--burst" if burst else ""]
    _only_what_belongs(ctx, ways if spb is None else ["--spb"])
    gib = _gib(memory) if auto or burst else None
    if not (auto or burst) and memory not in (None, "time", "shard"):
        raise typer.BadParameter(f"--memory: expected time or shard (GiB with --burst or --auto), got {memory}")
    for path in (output or Path("plan.json" if spb is None else "depth.json"), png):
        inputs.not_an_input(path, profile, network)
    if burst:
        from .burst import plan as plan_burst

        plan_burst(
            profile,
            network,
            devices=devices,
            batch=batch,
            amplification=amplification,
            memory_gib=gib,
            task_ms=task,
            output=output or Path("plan.json"),
            png=png,
            json=json,
        )
        return
    if network is None:
        raise typer.BadParameter("missing, expected a network file or a preset such as 10gbe-16", param_hint="net.json")
    if auto:
        from .auto import plan as plan_auto

        plan_auto(
            profile,
            network,
            devices=devices,
            batch=batch,
            objective=objective.value,
            within=within,
            task_ms=task,
            statistics=allow_statistics,
            memory_gib=gib,
            optimizer=optimizer,
            output=output or Path("plan.json"),
            json=json,
        )
        return
    from dovetail import planning
    from dovetail.core import files
    from dovetail.planning.depth import planner
    from dovetail.view import depth as depth_view
    from dovetail.view import explain, tables

    job, net = inputs.read_profile(profile), inputs.read_network(network)
    if spb is not None:
        depth.plan(job, net, spb, workers=workers, batch=batch, output=output or Path("depth.json"), json=json)
        return
    output = output or Path("plan.json")
    with console.working("planning", brief=True):
        mode: Overlap = "forward" if overlap is Behind.forward else "backward"
        wanted: Memory = "shard" if memory == "shard" else "time"
        bits: Precisions = precision.value
        compare = partial(planning.compare, job, net, workers=workers, batch=batch, overlap=mode, optimizer=optimizer)
        compared = compare(memory=wanted, precision=bits)
        chosen = next((p for p in compared if p.policy == policy), None)
        if chosen is None:
            chosen = compare(memory=wanted, precision=bits, policies=[policy])[0]
        if mode == "forward" and "all_reduce" in net.collectives:
            compared.append(planning.plan(job, net, workers=workers, batch=batch, policy="ddp"))
        reducible = chosen.workers > 1 and "all_reduce" in net.collectives
        shallow = planner.compare(job, net, workers=workers, batch=batch) if reducible else []
    if all(p.policy != chosen.policy for p in compared):
        compared = [chosen, *compared]
    if png:
        from dovetail.view.png import plan_png

        plan_png(job, net, compared, png)
        console.wrote(png)
    files.write(output, chosen)
    console.wrote(output)
    sentences = explain.explain(chosen, compared, net)
    base = next((p for p in sorted(compared, key=lambda p: p.overlap) if p.policy == "ddp"), chosen)
    sentences += inputs.doubts(job, net, before=base.prediction.iteration, after=chosen.prediction.iteration)
    if json:
        plans = [console.builtins(p) for p in tables.by_promise(compared)]
        result = {"chosen": chosen.policy, "written": str(output), "explanation": sentences, "plans": plans}
        console.emit(result | {"partial": [depth.saving(p) for p in shallow]})
    else:
        savings = ["", depth_view.savings(shallow)] if shallow else []
        console.show(tables.plans(compared, chosen=chosen), "", *sentences, *savings)


def _gib(memory: str | None) -> float | None:
    if memory is None:
        return None
    try:
        number = float(memory)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise typer.BadParameter(f"--memory: expected GiB, at least 0, got {memory}")
    return number


def _only_what_belongs(ctx: typer.Context, chosen: Sequence[str]) -> None:
    """Refuses an option that would have no effect on the chosen technique."""
    for name, ways in BELONGS.items():
        source = ctx.get_parameter_source(name)
        if not set(chosen) & set(ways) and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            where = " and ".join(w for w in ways if w)
            only = f"goes with {where} only" if "" not in ways else f"does not go with {chosen[0]}"
            raise typer.BadParameter(f"{option} {only}")


def simulate(
    plan: Annotated[Path, typer.Argument(metavar="plan.json", help="A plan, from `dovetail plan`.")],
    profile: Annotated[
        Path | None, typer.Option(metavar="job.json", help="Default: the file beside the plan that it was made from.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="net.json", help=f"{NETWORK} Default: the one that the plan names.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", dir_okay=False, help="Where to write the timeline.")
    ] = None,
    png: Png = None,
    json: console.Json = False,
) -> None:
    """Predict one iteration of a plan as a timeline, and draw it. Of a depth plan, one of its last phase."""
    from dovetail.core import files
    from dovetail.core.burst_plan import BurstPlan
    from dovetail.core.depth_plan import DepthPlan
    from dovetail.core.plan import Plan
    from dovetail.simulate.auto import timeline as predict
    from dovetail.simulate.depth import simulate_depth
    from dovetail.view import burst, tables
    from dovetail.view import depth as depth_view
    from dovetail.view.timeline import TimelineView

    chosen = inputs.read_plan(plan)
    for path in (output, png):
        if path and path.exists():
            inputs.not_an_input(path, plan, profile, network, *inputs.sources(plan, chosen))
    job = inputs.read_profile(profile) if profile else inputs.profile_of(plan, chosen)
    if isinstance(chosen, DepthPlan):
        named = network or chosen.network != "none"  # planned without a network, it is predicted without one
        net = (inputs.read_network(network) if network else inputs.network_of(plan, chosen)) if named else None
        timeline, table = simulate_depth(chosen, job, net), depth_view.depths(chosen)
    else:
        net = inputs.read_network(network) if network else inputs.network_of(plan, chosen)
        table = burst.stages(chosen) if isinstance(chosen, BurstPlan) else tables.buckets(chosen)
        timeline = predict(chosen, job, net)
    if png:
        from dovetail.view.png import timeline_png

        timeline_png([timeline], png)
        console.wrote(png)
    if output:
        files.write(output, timeline)
        console.wrote(output)
    if json:
        console.emit(console.builtins(timeline))
    else:
        below = ["", tables.hidden(timeline)] if isinstance(chosen, Plan) and chosen.overlap == "forward" else []
        console.show(table, "", TimelineView([timeline]), *below)


def scale(
    profile: ProfileFile,
    network: Annotated[str, typer.Option(metavar="net.json", help=NETWORK)],
    workers: Annotated[str, typer.Option(help='"4..2048" doubles, "4,8,12" lists.')] = "4..2048",
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Only these policies; default: all of them. `both` is --overlap forward: buckets whole or split.",
        ),
    ] = None,
    techniques: Annotated[
        bool, typer.Option("--techniques", help="Every technique, and the best combination, in place of policies.")
    ] = False,
    allow_statistics: Annotated[
        bool, typer.Option("--allow-statistics", help="--techniques: also partial backpropagation.")
    ] = False,
    png: Png = None,
    json: console.Json = False,
) -> None:
    """Predict the speed-up over one worker for many numbers of workers and every policy, or every technique."""
    if policies and techniques:
        raise typer.BadParameter("--policies are ways of merging, --techniques all that there is: give one")
    if allow_statistics and not techniques:
        raise typer.BadParameter("--allow-statistics belongs to --techniques")
    inputs.not_an_input(png, profile, network)
    import msgspec

    from dovetail import simulate as predict
    from dovetail.planning.merge.policies import COMPARED
    from dovetail.simulate.scale import BOTH
    from dovetail.view import tables

    job, net = inputs.read_profile(profile), inputs.read_network(network)
    halves = {"reduce_scatter", "all_gather"} <= set(net.collectives)
    names = [n.strip() for n in policies.split(",")] if policies else [*COMPARED, *([BOTH] if halves else [])]
    numbers = inputs.counts(workers)
    points = []
    with console.working("predicting", brief=not techniques) as step:
        for i, number in enumerate(numbers):
            step(f"predicting {number:,} workers", i / len(numbers))
            if techniques:
                points += predict.techniques(job, net, devices=[number], statistics=allow_statistics)
            else:
                points += predict.scale(job, net, workers=[number], policies=names)
    title = f"{job.name} on {net.name}, local batch {job.batch}"
    if png:
        from dovetail.view.png import scale_png

        scale_png(points, png, title=title)
        console.wrote(png)
    if json:
        result = {"profile": job.name, "network": net.name, "batch": job.batch}
        console.emit(result | {"points": [msgspec.to_builtins(p) for p in points]})
    else:
        console.show(f"predicted speed-up over one worker: {title}", tables.scale(points))

"""`dovetail train`, `dovetail doctor` and `dovetail demo`: real training."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from . import console, inputs


def train(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A training script that uses torch's DDP; with -m a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="Arguments of the script, after `--`.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as for python -m.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine; default: 2.")] = None,
    spawns: Annotated[
        bool,
        typer.Option("--spawns", help="The script starts its ranks itself (mp.spawn): run it once, without torchrun."),
    ] = False,
    nnodes: Annotated[
        str | None, typer.Option(metavar="N|LEAST:MOST", help="Machines; this command is run on each of them.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Number of this machine, from 0; else as they come.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the machines meet: the same on all, on one of them.")
    ] = None,
    rdzv_backend: Annotated[
        str | None, typer.Option(help="torchrun's; default: static with a node rank, else c10d.")
    ] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="torchrun's: a name for this training.")] = None,
    rdzv_conf: Annotated[str | None, typer.Option(help="torchrun's: key=value,…")] = None,
    master_addr: Annotated[str | None, typer.Option(help="torchrun's, in place of --rdzv-endpoint.")] = None,
    master_port: Annotated[int | None, typer.Option(help="torchrun's, in place of --rdzv-endpoint.")] = None,
    local_addr: Annotated[
        str | None, typer.Option(help="torchrun's: address at which others reach this machine.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="plan.json", help="Follow this plan instead of measuring and choosing one.")
    ] = None,
    spb: Annotated[
        str | None,
        typer.Option(
            metavar="guard|ladder|balanced",
            help="Partial backpropagation: each worker goes back through the last layers only. --plan is a depth plan.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="With --spb guard: share of a step's progress that a segment may lose; default: 0.03."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --spb and a plan with phases: length of the training.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="The script's CUDA devices are emulated: for machines without GPUs.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="job.json", help="With --emulate: layers take the times of this profile.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="1gbit", help="With --emulate: links of this speed between the ranks (root).")
    ] = None,
    races: Annotated[
        bool, typer.Option("--races", help="With --emulate: look for races between streams, and for host syncs.")
    ] = False,
    json: console.Json = False,
) -> None:
    """Run an unchanged DistributedDataParallel script with planned gradient buckets.

    The last line, on the machine with rank 0, says what was kept, or why nothing was. With --spb the script runs under
    partial backpropagation instead; the guard's decisions go to stderr, a line each.
    With --emulate it runs on emulated accelerators: kernels queue as on a GPU, collectives are real, and one more line
    says what was emulated. The script's own output passes through; with --json it goes to stderr.
    """
    from dovetail.core.errors import Error
    from dovetail.emulate.shaped_network import available
    from dovetail.emulate.training.emulated_run import Emulation, train_emulated
    from dovetail.train.run.launcher import train as run
    from dovetail.train.run.rendezvous import Rendezvous

    meeting = {
        "node_rank": node_rank,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_backend": rdzv_backend,
        "rdzv_id": rdzv_id,
        "rdzv_conf": rdzv_conf,
        "master_addr": master_addr,
        "master_port": master_port,
        "local_addr": local_addr,
    }
    if nnodes is None and any(value is not None for value in meeting.values()):
        given = next(name for name, value in meeting.items() if value is not None)
        raise Error(f"{given.replace('_', '-')}: expected together with nnodes, the number of machines")
    if not emulate and (profile is not None or rate is not None or races):
        raise Error("profile, rate, races: expected together with emulate, which they belong to")
    if emulate and (spawns or nnodes is not None):
        raise Error("emulate: the ranks are started here, one process each; expected neither spawns nor nnodes")
    begin, lines = time.monotonic(), list[str]()
    if rate is not None and (missing := available()) is not None:
        console.say(f"links are not limited: {missing}; the ranks talk over loopback instead")
    with console.stdout_to_stderr() if json else contextlib.nullcontext():
        if emulate:
            code = train_emulated(
                script,
                Emulation(profile, rate, races),
                workers=workers,
                module=module,
                plan=plan,
                spb=spb,
                epsilon=epsilon,
                steps=steps,
                args=arguments or [],
                tell=lines.append,
            )
        else:
            code = run(
                script,
                workers=workers,
                module=module,
                rendezvous=Rendezvous(nnodes, **meeting) if nnodes is not None else None,  # type: ignore[arg-type]
                spawns=spawns,
                plan=plan,
                spb=spb,
                epsilon=epsilon,
                steps=steps,
                args=arguments or [],
                tell=lines.append,
            )
    for line in lines:
        typer.echo(f"dovetail: {line}", err=True)
    if code > 128:  # ended by a signal that was passed on
        if code == 130:
            raise KeyboardInterrupt
        raise typer.Exit(code)
    if code:
        raise Error(f"{script}: training failed with exit code {code}; its own messages stand above")
    if json:
        seconds = time.monotonic() - begin
        used = {"plan": str(plan) if plan else None, "spb": spb, "result": lines[0] if lines else None}
        used |= {"emulated": lines[1] if emulate else None}
        console.emit({"script": script, "workers": None if spawns else workers or 2, **used, "seconds": seconds})


def doctor(
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the report.")] = Path(
        "doctor.json"
    ),
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda|emu|…", help="Type of the devices; default: torch's accelerator, else cpu."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks, each with a device of its own.")] = 2,
    json: console.Json = False,
) -> None:
    """Train a few steps in every way on this machine's devices, compare, and write a report to send.

    Two ranks run torch's DDP, dovetail's with one line and with two, partial backpropagation and burst, each against
    torch's DDP or its oracle, and measure the network between them. What fails gets one line, and the rest goes on.
    `--device emu` runs on the emulated accelerator, which also looks for races between streams; the first use builds
    it. Takes five minutes at most.
    """
    from dovetail.core import files
    from dovetail.core.errors import Error
    from dovetail.doctor import diagnosis_text
    from dovetail.doctor.examination import examine

    console.writable(output)
    with console.working("the doctor: five minutes at most") as tell:
        found = examine(device=device, ranks=ranks, tell=tell)
    files.write(output, found)
    console.wrote(output)
    if json:
        console.emit(console.builtins(found))
    else:
        console.show(*diagnosis_text.lines(found))
    if not found.passed:
        wrong = [check.name for check in found.checks if check.outcome != "passed"]
        raise Error(f"doctor: {', '.join(wrong)} did not pass; send {output} with your question")


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: a first look, noisier figures.")] = False,
    rate: Annotated[str, typer.Option(help="Speed of the shaped network's links.")] = "2gbit",
    fabric: Annotated[
        bool, typer.Option("--fabric", help="Instead: train over an emulated fabric while its links fail and heal.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="out.html", callback=inputs.html_path, help="The run's page; default: out/demo.html."),
    ] = None,
    timelines: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", file_okay=False, help="Also write both timelines there: ddp, dovetail."),
    ] = None,
    json: console.Json = False,
) -> None:
    """The main job, start to end: profile, plan, and train a real model against DDP on a shaped network.

    Ends with three lines of figures, and a page of this very run to look into.
    """
    screen = console.console(stderr=json)
    if fabric and (html or timelines):
        raise typer.BadParameter("--html and --timelines go without --fabric")
    if html:
        console.writable(html)
    if fabric:
        from dovetail.fabric.disturbed import demo as over_fabric

        result = over_fabric.run(
            iterations=30 if quick else 60,
            failures=3 if quick else 6,
            tell=lambda line: screen.print(line, soft_wrap=True),
        )
    else:
        from dovetail import demo as main

        result = main.main(quick=quick, rate=rate, html=html, timelines=timelines, console=screen)
    if json:
        console.emit(result)

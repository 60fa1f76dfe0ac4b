"""`dovetail train` and `dovetail demo`: real training."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from . import console, inputs


def train(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script that uses torch's DDP.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="Arguments of the script, after `--`.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Ranks on this machine.")] = 2,
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
    json: console.Json = False,
) -> None:
    """Run an unchanged DistributedDataParallel script with planned gradient buckets.

    With --spb it runs under partial backpropagation instead; the guard's decisions go to stderr, a line each.
    The script's own output passes through; with --json it goes to stderr.
    """
    from dovetail.core.errors import Error
    from dovetail.train.run.launcher import train as run

    begin = time.monotonic()
    with console.stdout_to_stderr() if json else contextlib.nullcontext():
        code = run(script, workers=workers, plan=plan, spb=spb, epsilon=epsilon, steps=steps, args=arguments or [])
    if code > 128:  # ended by a signal that was passed on
        if code == 130:
            raise KeyboardInterrupt
        raise typer.Exit(code)
    if code:
        raise Error(f"{script}: training failed with exit code {code}; its own messages stand above")
    if json:
        seconds = time.monotonic() - begin
        used = {"plan": str(plan) if plan else None, "spb": spb}
        console.emit({"script": str(script), "workers": workers, **used, "seconds": seconds})


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

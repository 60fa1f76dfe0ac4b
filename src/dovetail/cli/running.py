"""`dovetail train` and `dovetail demo`: real training."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from . import shell


def train(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script that uses torch's DDP.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="Arguments of the script, after `--`.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Ranks on this machine.")] = 2,
    plan: Annotated[
        Path | None, typer.Option(metavar="plan.json", help="Follow this plan instead of measuring and choosing one.")
    ] = None,
    json: shell.Json = False,
) -> None:
    """Run an unchanged DistributedDataParallel script with planned gradient buckets.

    The script's own output passes through; with --json it goes to stderr.
    """
    from dovetail.core.errors import Error
    from dovetail.train.run import train as run

    begin = time.monotonic()
    with shell.stdout_to_stderr() if json else contextlib.nullcontext():
        code = run(script, workers=workers, plan=plan, args=arguments or [])
    if code > 128:  # ended by a signal that was passed on
        if code == 130:
            raise KeyboardInterrupt
        raise typer.Exit(code)
    if code:
        raise Error(f"{script}: training failed with exit code {code}; its own messages stand above")
    if json:
        seconds = time.monotonic() - begin
        shell.emit({"script": str(script), "workers": workers, "plan": str(plan) if plan else None, "seconds": seconds})


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: a first look, noisier figures.")] = False,
    rate: Annotated[str, typer.Option(help="Speed of the shaped network's links.")] = "2gbit",
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON.")] = None,
) -> None:
    """The main job, start to end: profile, plan, and train a real model against DDP on a shaped network."""
    from dovetail import demo as main

    if json:
        shell.writable(json)
    main.main(quick=quick, json=json, rate=rate)

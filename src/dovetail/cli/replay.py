"""`dovetail cluster replay`: what the simulator predicts for a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import console


def replay(
    policy: Annotated[
        str, typer.Option(metavar="NAME,…", help="Policies to predict besides the recorded one.")
    ] = "jigsaw,gang-fifo-backfill",
    since: Annotated[float, typer.Option(min=0.0, help="Leave out jobs submitted before this time.time().")] = 0.0,
    home: Annotated[
        Path | None, typer.Option("--home", metavar="DIR", help="The cluster's folder; it need not be running.")
    ] = None,
    json: console.Json = False,
) -> None:
    """Replay the recorded jobs in the simulator: predicted and measured makespan, and those of other policies."""
    from dovetail.cluster.home import default_home
    from dovetail.cluster.replay import play, read

    run = read(home or default_home(), since=since)
    others = [name for name in dict.fromkeys(policy.split(",")) if name and name != run.policy]
    plays = [play(run, policy=name) for name in (run.policy, *others)]
    kind = "emulated devices" if run.emulated else "devices"
    lines = [f"{len(run.jobs)} jobs on {run.cluster.devices} {kind} under {run.policy}: {run.makespan:.2f} s measured"]
    for p in plays:
        same = p.policy == run.policy
        note = f"{p.comparison.error:+.1%} of the measured" if same else "had it run"
        lines.append(f"  {p.policy}: {p.comparison.predicted:.2f} s predicted, {note}")
    data = {
        "policy": run.policy,
        "emulated": run.emulated,
        "devices": run.cluster.devices,
        "jobs": len(run.jobs),
        "measured": run.makespan,
        "overhead": run.overhead,
        "jitter": run.jitter,
        "error": plays[0].comparison.error,
        "predicted": {p.policy: p.comparison.predicted for p in plays},
    }
    console.result(data, json, *lines)

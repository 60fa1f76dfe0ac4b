"""`dovetail plan --auto`: the best combination of techniques and devices for a job on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import console, inputs

if TYPE_CHECKING:
    from dovetail.planning.auto.options import Objective


def plan(
    profile: Path,
    network: str,
    *,
    devices: int | None,
    batch: int | None,
    objective: Objective,
    within: float | None,
    task_ms: float,
    statistics: bool,
    memory_gib: float | None,
    optimizer: float,
    output: Path,
    json: bool,
) -> None:
    from dovetail.core import files
    from dovetail.simulate.auto import choose
    from dovetail.view import auto

    job, net = inputs.read_profile(profile), inputs.read_network(network)
    with console.working("planning", brief=True):
        found = choose(
            job,
            net,
            devices=devices,
            batch=batch,
            objective=objective,
            within=within,
            task=task_ms * 1e-3 if objective == "throughput" else 0.0,
            statistics=statistics,
            memory=None if memory_gib is None else inputs.memory_bytes(memory_gib),
            optimizer=optimizer,
        )
    files.write(output, found.chosen.plan)
    console.wrote(output)
    lines, code = auto.sentences(found), auto.recipe(found, output, profile=str(profile), network=network)
    if objective == "time":
        lines += inputs.doubts(job, net, before=found.baseline.score.iteration, after=found.chosen.score.iteration)
    if json:
        plan = console.builtins(found.chosen.plan)
        result = {"written": str(output), "explanation": lines, "run": code, "plan": plan}
        console.emit(auto.as_data(found) | result)
    else:
        many = found.chosen.devices
        where = f"To run it, in a script on {f'each of {many:,} devices' if many > 1 else 'one device'}:"
        console.show(auto.table(found), "", auto.rejected(found), "", *auto.excluded(found), *lines, where)
        console.verbatim(*(f"  {c}" for c in code))

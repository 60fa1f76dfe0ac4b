"""`dovetail plan --burst`: how many devices each layer should get, and what that would free."""

from __future__ import annotations

from pathlib import Path

from . import console, inputs


def plan(
    profile: Path,
    network: str | None,
    *,
    devices: int | None,
    batch: int | None,
    amplification: float | None,
    memory_gib: float | None,
    task_ms: float,
    output: Path,
    png: Path | None,
    json: bool,
) -> None:
    """Without a network, links are those of one server with NVLink, as published."""
    from dovetail.core import files
    from dovetail.planning.burst.cost import Links, NetworkLinks, ProfileCost
    from dovetail.planning.burst.planner import BurstPlanner
    from dovetail.view import burst

    job = inputs.read_profile(profile)
    net = inputs.read_network(network) if network else None
    wires = NetworkLinks(net) if net else Links()
    count = devices or (net.ranks if net else 8)
    planner = BurstPlanner(
        job,
        ProfileCost(job, batch or job.batch, wires),
        count,
        memory=None if memory_gib is None else inputs.memory_bytes(memory_gib),
        network=net.name if net else "nvlink (published figures)",
    )
    with console.working("planning", brief=True):
        found = burst.study(planner, amplification=amplification, task=task_ms * 1e-3)
        lines = burst.sentences(found)
    if png:
        burst.burst_png(found, png)
        console.wrote(png)
    files.write(output, found.chosen.plan)
    console.wrote(output)
    if json:
        plans = [
            {**console.builtins(r.plan), "free_devices": r.free, "useful_devices": r.useful, "name": burst.name(r.plan)}
            for r in found.rows
        ]
        console.emit({"chosen": found.chosen.plan.policy, "written": str(output), "explanation": lines, "plans": plans})
    else:
        console.show(burst.table(found), "", *lines)

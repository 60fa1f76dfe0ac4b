"""`dovetail plan --spb`: partial backpropagation, and what its policies save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console

if TYPE_CHECKING:
    from dovetail.core.depth_plan import DepthPlan
    from dovetail.core.network import Network
    from dovetail.core.profile import Profile


def plan(
    job: Profile, net: Network, policy: str, *, workers: int | None, batch: int | None, output: Path, json: bool
) -> None:
    """`dovetail plan --spb`: a depth plan beside what other policies would save."""
    from dovetail.core import files
    from dovetail.planning.depth import planner
    from dovetail.view import depth as view

    with console.working("planning", brief=True):
        chosen = planner.plan(job, net, workers=workers, batch=batch, policy=policy)
        compared = planner.compare(job, net, workers=workers, batch=batch)
    if all(p.policy != chosen.policy for p in compared):
        compared = [chosen, *compared]
    files.write(output, chosen)
    console.wrote(output)
    if json:
        plan = console.builtins(chosen)
        console.emit({"chosen": policy, "written": str(output), "plan": plan, "partial": [saving(p) for p in compared]})
    else:
        console.show(view.depths(chosen), "", view.savings(compared, chosen=chosen), "", *view.advice(chosen))


def saving(plan: DepthPlan) -> dict[str, Any]:
    """A policy of partial backpropagation and the shares that it saves."""
    from dataclasses import asdict

    from dovetail.simulate.depth import savings

    return {"policy": plan.policy, "saves": asdict(savings(plan))}

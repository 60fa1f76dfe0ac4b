"""`dovetail demo --fabric`: a model trains over an emulated fabric while its links fail and heal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.fabric import emulation
from dovetail.fabric.check import check
from dovetail.fabric.routing import shapes

from . import disturbed_run
from .disturbed_run import TrainingRun

POLICY: dict[str, Any] = {
    "tenants": {"training": ["h0", "h3", "h5", "h7"], "others": ["h1", "h2"]},
    "classes": [{"name": "training traffic", "from": "h0", "to": ["h3", "h5", "h7"], "avoid": "core3"}],
}
_BARS = "▁▂▃▄▅▆▇█"


def run(
    *, iterations: int = 60, failures: int = 6, ranks: int = 4, tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """Trains undisturbed, then the same while links fail and heal, then checks the policy; returns facts.

    `tell` gets one line at a time for people. Switches and links are emulated; packets, ranks and losses are real.
    """
    plan = shapes.fat_tree(4)
    hosts = [0, 7, 3, 5][: max(2, min(4, ranks))]
    events = disturbed_run.disturbances(plan, iterations=iterations, failures=failures, hosts=hosts)
    cuts = [plan.link_name(e.link) for e in events if e.action == "fail"]
    tell(f"fat-tree of {len(plan.switches)} switches (emulated), {len(hosts)} ranks on hosts of different pods")
    with emulation.temporary(plan, POLICY) as fabric:
        tell(f"training {iterations} iterations undisturbed …")
        calm = disturbed_run.run(fabric, hosts, iterations=iterations)
        tell(f"training {iterations} iterations while {len(cuts)} links fail and heal, one after the other …")
        rough = disturbed_run.run(fabric, hosts, iterations=iterations, events=events)
        report = check(fabric, flows=1)
        counters = fabric.plane.totals(plan)
    _tell_times(calm, rough, tell)
    tell(
        f"switches rerouted {counters['rerouted']:,} packets, dropped {counters['drop no path']:,} for want of a path; "
        f"{report.probes} probes afterwards: policy {'holds' if report.holds else 'BROKEN'}"
    )
    return {
        "emulated": True,
        "steps": iterations,
        "failures": len(cuts),
        "links": cuts,
        "systems": {"dovetail": _facts(calm, rough)},
        "check": {"holds": report.holds, "probes": report.probes},
        "rerouted": counters["rerouted"],
    }


def _facts(calm: TrainingRun, rough: TrainingRun) -> dict[str, Any]:
    return {
        "same_losses": calm.losses == rough.losses,
        "steps": len(rough.losses),
        "median_step": rough.median,
        "stall": rough.stall,
        "stall_undisturbed": calm.stall,
        "steps_200ms_late": rough.late_iterations,
        "seconds": rough.seconds,
        "losses": rough.losses,
        "events": [{"step": e.iteration, "action": e.action, "link": e.link} for e in rough.events],
    }


def _tell_times(calm: TrainingRun, rough: TrainingRun, tell: Callable[[str], None]) -> None:
    top = max(rough.seconds[2:])
    picture = "".join(_BARS[min(7, int(8 * s / top))] for s in rough.seconds[2:])
    same = "identical to the undisturbed run" if calm.losses == rough.losses else "NOT those of the undisturbed run"
    tell(f"{len(rough.losses)} of {len(calm.losses)} iterations, losses {same}")
    tell(
        f"median iteration {rough.median * 1e3:.0f} ms, longest stall {rough.stall * 1e3:.0f} ms "
        f"(undisturbed {calm.stall * 1e3:.0f} ms), {rough.late_iterations} iterations 200 ms late"
    )
    tell(f"iteration times {picture}")


if __name__ == "__main__":
    run()

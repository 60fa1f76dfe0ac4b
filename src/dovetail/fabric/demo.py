"""`dovetail demo --fabric`: a model trains over an emulated fabric while an operator breaks its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from . import emulate, frr, shapes, training
from .check import check

POLICY: dict[str, Any] = {
    "tenants": {"training": ["h0", "h3", "h5", "h7"], "others": ["h1", "h2"]},
    "classes": [{"name": "training traffic", "from": "h0", "to": ["h3", "h5", "h7"], "avoid": "core3"}],
}
_BARS = "▁▂▃▄▅▆▇█"


def run(
    *, steps: int = 60, failures: int = 6, ranks: int = 4, compare: bool = True, tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """Trains undisturbed, then with failures, over the fabric and (if asked for and installed) over FRR; returns facts.

    `tell` gets one line at a time for people. Switches and links are emulated; packets, ranks and losses are real.
    """
    plan = shapes.fat_tree(4)
    hosts = [0, 7, 3, 5][: max(2, min(4, ranks))]
    events = training.disturbances(plan, steps=steps, failures=failures, hosts=hosts)
    cuts = [plan.link_name(e.link) for e in events if e.action == "fail"]
    facts: dict[str, Any] = {"emulated": True, "steps": steps, "failures": len(cuts), "links": cuts, "systems": {}}
    tell(f"fat-tree of {len(plan.switches)} switches (emulated), {len(hosts)} ranks on hosts of different pods")
    with emulate.temporary(plan, POLICY) as fabric:
        calm, rough = _both(fabric, hosts, steps, events, tell)
        report = check(fabric, flows=1)
        counters = fabric.plane.totals(plan)
    facts["systems"]["dovetail"] = _facts(calm, rough)
    facts["check"] = {"holds": report.holds, "probes": report.probes}
    facts["rerouted"] = counters["rerouted"]
    _tell_system("dovetail", calm, rough, tell)
    tell(
        f"switches rerouted {counters['rerouted']:,} packets, dropped {counters['drop no path']:,} for want of a path; "
        f"{report.probes} probes afterwards: policy {'holds' if report.holds else 'BROKEN'}"
    )
    if compare and not frr.missing():
        tell("the same with FRR (OSPF with BFD) in every switch …")
        with frr.frr(plan) as other:
            calm, rough = _both(other, hosts, steps, events, tell)
        facts["systems"]["FRR"] = _facts(calm, rough)
        _tell_system("FRR", calm, rough, tell)
    elif compare:
        tell(f"no comparison: {frr.missing()}")
    return facts


def _both(
    fabric: Any, hosts: list[int], steps: int, events: list[training.Event], tell: Callable[[str], None]
) -> tuple[training.Result, training.Result]:
    tell(f"training {steps} steps undisturbed …")
    calm = training.run(fabric, hosts, steps=steps)
    tell(f"training {steps} steps while {len(events) // 2} links fail and heal, one after the other …")
    return calm, training.run(fabric, hosts, steps=steps, events=events)


def _facts(calm: training.Result, rough: training.Result) -> dict[str, Any]:
    return {
        "same_losses": calm.losses == rough.losses,
        "steps": len(rough.losses),
        "median_step": rough.median,
        "stall": rough.stall,
        "stall_undisturbed": calm.stall,
        "steps_200ms_late": rough.slow_steps,
        "seconds": rough.seconds,
        "losses": rough.losses,
        "events": [asdict(e) for e in rough.events],
    }


def _tell_system(name: str, calm: training.Result, rough: training.Result, tell: Callable[[str], None]) -> None:
    top = max(rough.seconds[2:])
    picture = "".join(_BARS[min(7, int(8 * s / top))] for s in rough.seconds[2:])
    same = "identical to the undisturbed run" if calm.losses == rough.losses else "NOT those of the undisturbed run"
    tell(f"{name}: {len(rough.losses)} of {len(calm.losses)} steps, losses {same}")
    tell(
        f"{name}: median step {rough.median * 1e3:.0f} ms, longest stall {rough.stall * 1e3:.0f} ms "
        f"(undisturbed {calm.stall * 1e3:.0f} ms), {rough.slow_steps} steps 200 ms late"
    )
    tell(f"{name}: step times {picture}")


if __name__ == "__main__":
    run()

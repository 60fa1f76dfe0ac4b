"""The fabric against routers: what a link failure costs, whether a policy is ever broken, what a packet costs.

    python benchmarks/fabric.py [--quick] [--json FILE]

Needs root on Linux with clang and libbpf; the FRR rows need FRR and are left out, and said to be, where it is absent.
Everything runs in namespaces of this machine (emulated switches, real packets); no hardware switch is involved.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from common import Check, console, finish, parser
from dovetail.core.errors import Error
from dovetail.fabric import check, cost, emulate, frr, kernel, loss, routed, shapes, topology, training
from dovetail.fabric.heartbeat import Heartbeat
from dovetail.fabric.topology import Topology

ZOO = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "topologies"
RATE = 20_000
Cell = dict[str, Any]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# What a failure costs


@contextmanager
def _ours() -> Iterator[tuple[loss.Runs, Callable[[], None]]]:
    with emulate.temporary(shapes.fat_tree(4)) as fabric:
        yield fabric, lambda: fabric.plane.forget(fabric.topology)


@contextmanager
def _ecmp() -> Iterator[tuple[loss.Runs, Callable[[], None]]]:
    with routed.routed(shapes.fat_tree(4)) as fabric:
        yield fabric, fabric.restore


@contextmanager
def _controller() -> Iterator[tuple[loss.Runs, Callable[[], None]]]:
    with routed.routed(shapes.fat_tree(4)) as fabric:
        controller = routed.Controller(fabric, delay=0.05)
        controller.start()

        def settle() -> None:
            time.sleep(0.4)
            fabric.restore()

        try:
            yield fabric, settle
        finally:
            controller.stop()


@contextmanager
def _frr() -> Iterator[tuple[loss.Runs, Callable[[], None]]]:
    with frr.frr(shapes.fat_tree(4)) as fabric:
        yield fabric, lambda: frr.wait_for_routes(fabric, all_ways=3.0)


SYSTEMS = {"dovetail": _ours, "static ECMP": _ecmp, "controller, 50 ms": _controller, "FRR OSPF+BFD": _frr}


def failures(*, quick: bool) -> list[Cell]:
    """A stream at 20,000 datagrams/s, one link of its path cut in mid-stream, at each of the four positions."""
    cells = []
    turns = 1 if quick else 3
    for name, start in SYSTEMS.items():
        if name.startswith("FRR") and frr.missing():
            say(f"{name}: left out: {frr.missing()}")
            continue
        say(f"link failures: {name}")
        with start() as (fabric, settle):
            for turn in range(turns):
                for position in range(4):
                    cells.append(_one(name, fabric, settle, position, turn, how="down"))
    return cells


def _one(name: str, fabric: loss.Runs, settle: Callable[[], None], position: int, turn: int, *, how: str) -> Cell:
    for attempt in range(3):
        try:
            got = loss.measure(
                fabric, 0, 7, position, rate=RATE, seconds=1.2, sport=20_000 + 13 * turn + 101 * attempt, how=how,
                end=turn % 2 if how == "down" else 0, settle=settle,
            )  # fmt: skip
        except Error as e:
            say(f"{name}: {e}; once more")
            settle()
            continue
        return {"part": "failure", "system": name, "how": how, **dataclasses.asdict(got)}
    raise Error(f"{name}: no measurement at position {position}")


def silent(*, quick: bool) -> list[Cell]:
    """The same with links that fail in silence, which take heartbeats or BFD and some time to detect."""
    cells = []
    for name in ("dovetail, heartbeat 3 × 10 ms", "dovetail, heartbeat 3 × 50 ms", "FRR OSPF+BFD 3 × 50 ms"):
        if name.startswith("FRR") and (frr.missing() or quick):
            continue
        say(f"silent failures: {name}")
        with (_frr if name.startswith("FRR") else _ours)() as (fabric, settle):
            if isinstance(fabric, emulate.Fabric):
                with Heartbeat(fabric, interval=0.05 if "50" in name else 0.01, misses=3):
                    for position in (1, 2) if quick else range(4):
                        cells.append(_one(name, fabric, settle, position, 0, how="silent"))
                        time.sleep(0.2)
            else:
                for position in range(4):
                    cells.append(_one(name, fabric, settle, position, 0, how="silent"))
    return cells


# Whether a policy is ever broken


def fabrics() -> list[Topology]:
    made = [
        shapes.fat_tree(4, hosts=2),
        shapes.fat_tree(6),
        shapes.leaf_spine(6, 4, hosts=2),
        shapes.ring(12, chords=5),
    ]
    if ZOO.exists():
        names = ("Abilene", "Nsfnet", "Internet2", "AttMpls", "Geant2012", "BtNorthAmerica", "Tinet")
        made += [topology.load(ZOO / f"{name}.gml") for name in names if (ZOO / f"{name}.gml").exists()]
    else:
        say("no Topology Zoo files beside the checkout: random regular graphs in their place")
        made += [shapes.expander(n, 4, seed=n) for n in (12, 20, 30, 40)]
    return made


def policies(plan: Topology, rng: random.Random) -> dict[str, Any]:
    """Every kind of clause at once, on hosts drawn by lot; drawn again until the compiler accepts it."""
    from dovetail.fabric.policy import compile_policy

    hosts, switches = [h.name for h in plan.hosts], list(plan.switches)
    while True:
        inner = [s for s in switches if s not in {switches[h.switch] for h in plan.hosts}] or switches
        picked = rng.sample(hosts, 8)
        document = {
            "tenants": {"one": picked[6:]},
            "classes": [
                {"name": "waypoint", "from": picked[0], "to": picked[1], "via": rng.sample(inner, 2)},
                {
                    "name": "chain",
                    "from": picked[1],
                    "to": picked[2],
                    "via": [[rng.choice(inner)], [rng.choice(inner)]],
                },
                {"name": "avoid", "from": picked[2], "to": picked[3], "avoid": [rng.choice(inner)]},
                {"name": "prefer", "from": picked[3], "to": picked[4], "prefer": [rng.choice(inner)]},
                {"name": "deny", "from": picked[4], "to": picked[5], "deny": True},
            ],
        }
        try:
            compile_policy(document, plan)
        except Error:
            continue
        return document


def probes(*, quick: bool) -> list[Cell]:
    """Real probes on every fabric with 0 to 5 failed links, every walk compared with the oracle."""
    cells = []
    rng = random.Random(11)
    for plan in fabrics():
        say(f"probes: {plan.name}")
        with emulate.temporary(plan, policies(plan, rng)) as fabric, check.Prober(fabric) as prober:
            for n in range(6):
                for link in rng.sample(range(len(plan.links)), n):
                    fabric.fail(link, end=rng.randrange(2))
                most = 200 if quick else 400
                report = check.check(fabric, flows=4, most=most, seed=n, v6=bool(n % 2), prober=prober)
                cells.append(
                    {
                        "part": "probes", "topology": plan.name, "switches": len(plan.switches), "failed": n,
                        "probes": report.probes, "delivered": report.delivered, "no_path": report.no_path,
                        "denied": report.denied, "violations": len(report.violations), "loops": len(report.loops),
                        "lost": len(report.lost), "less_preferred": len(report.less_preferred),
                        "stretch": round(report.stretch, 4), "examples": report.faults[:3],
                    }
                )  # fmt: skip
                for link in fabric.failed():
                    fabric.heal(link)
    return cells


# What a packet costs, and what it carries


def costs(*, quick: bool) -> list[Cell]:
    cells = []
    plans = [shapes.fat_tree(4), shapes.ring(64, chords=8), shapes.expander(256, 4)]
    for plan in plans if quick else [*plans[:1], shapes.fat_tree(6), *plans[1:2], shapes.fat_tree(8), *plans[2:]]:
        for waypoints in (0, 1, 3):
            say(f"cost: {plan.name}, {waypoints} waypoints")
            got = cost.measure(plan, waypoints=waypoints, turns=3 if quick else 15, repeat=10_000 if quick else 20_000)
            cells.append({"part": "cost", **dataclasses.asdict(got), "ratio": got.ratio, "net_ratio": got.net_ratio})
    return cells


def throughput(*, quick: bool) -> list[Cell]:
    """All-reduce of 16 MiB among hosts in different pods, ours and kernel forwarding by turns."""
    plan, hosts = shapes.fat_tree(4), [0, 7] if quick else [0, 3, 5, 7]
    turns = 2 if quick else 3
    rates: dict[str, list[float]] = {}
    with (
        emulate.temporary(plan) as ours,
        routed.routed(plan) as plain,
        routed.routed(plan, superframes=True) as superframes,
    ):
        systems: dict[str, loss.Runs] = {"dovetail": ours, "kernel forwarding": plain}
        if not quick:
            systems["kernel forwarding, 64 KiB frames between namespaces"] = superframes
        for turn in range(turns):
            for name, fabric in systems.items():
                say(f"all-reduce: {name}, turn {turn + 1} of {turns}")
                rates.setdefault(name, []).append(training.all_reduce_rate(fabric, hosts, turns=8 if quick else 14))
    return [
        {
            "part": "all-reduce",
            "system": name,
            "ranks": len(hosts),
            "bytes_per_second": r,
            "median": statistics.median(r),
        }
        for name, r in rates.items()
    ]


def trained(*, quick: bool) -> list[Cell]:
    """The same training undisturbed and with eight failures, over ours and over FRR."""
    plan, hosts = shapes.fat_tree(4), [0, 7] if quick else [0, 3, 5, 7]
    steps, count = (50, 6) if quick else (90, 8)
    cells = []
    events = training.disturbances(plan, steps=steps, failures=count, hosts=hosts)
    for name, start in (("dovetail", _ours), ("FRR OSPF+BFD", _frr)):
        if name.startswith("FRR") and (quick or frr.missing()):
            continue
        with start() as (fabric, settle):
            say(f"training: {name}, undisturbed")
            calm = training.run(fabric, hosts, steps=steps)
            say(f"training: {name}, {count} failures")
            rough = training.run(fabric, hosts, steps=steps, events=events)
            settle()
        cells.append(
            {
                "part": "training", "system": name, "steps": len(rough.losses), "failures": count,
                "same_losses": calm.losses == rough.losses, "median_step": rough.median, "stall": rough.stall,
                "stall_undisturbed": calm.stall, "steps_200ms_late": rough.slow_steps,
                "total": sum(rough.seconds), "total_undisturbed": sum(calm.seconds),
            }
        )  # fmt: skip
    return cells


def size(*, quick: bool) -> list[Cell]:
    """A fabric of more than 256 switches, up and checked."""
    plan = shapes.expander(260, 4)
    say("size: 260 switches")
    begin = time.monotonic()
    with emulate.temporary(plan) as fabric:
        built = time.monotonic() - begin
        for link in (1, 50, 99):
            fabric.fail(link)
        report = check.check(fabric, flows=1, most=300)
    return [
        {
            "part": "size", "switches": len(plan.switches), "links": len(plan.links), "seconds_to_build": built,
            "probes": report.probes, "delivered": report.delivered, "holds": report.holds,
        }
    ]  # fmt: skip


PARTS: dict[str, Callable[..., list[Cell]]] = {
    "costs": costs, "failures": failures, "silent": silent, "throughput": throughput, "trained": trained,
    "probes": probes, "size": size,
}  # fmt: skip


# Checks and tables


def checks(cells: list[Cell]) -> list[Check]:
    def part(name: str, **like: Any) -> list[Cell]:
        return [c for c in cells if c["part"] == name and all(c.get(k) == v for k, v in like.items())]

    made = []

    def add(name: str, value: Any, target: str, holds: bool) -> None:
        told = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        made.append(Check(name, told, target, bool(holds)))

    lost = {s: [c["lost"] for c in part("failure", system=s, how="down")] for s in SYSTEMS}
    if lost["dovetail"]:
        medians = {s: statistics.median(v) for s, v in lost.items() if v}
        add(
            "Packets lost per link failure at 20,000 packets/s: median ≤ 2, against FRR and a 50 ms controller "
            "in the same emulation",
            medians, "dovetail: median ≤ 2", medians["dovetail"] <= 2,
        )  # fmt: skip
    if p := part("probes"):
        total = {k: sum(c[k] for c in p) for k in ("probes", "violations", "loops", "lost", "less_preferred")}
        kinds = len({c["topology"] for c in p})
        clean = not any(total[k] for k in total if k != "probes")
        add(
            "0 violations and 0 loops over ≥ 10,000 probes on ≥ 8 topologies with 0–5 failures",
            {**total, "topologies": kinds}, "0, 0, ≥ 10,000, ≥ 8", clean and total["probes"] >= 10_000 and kinds >= 8,
        )  # fmt: skip
    if costed := part("cost"):
        ratios = [round(c["ratio"], 3) for c in costed]
        net = round(statistics.median(c["net_ratio"] for c in costed), 3)
        add(
            "Cost per packet in the kernel's test runner: transit ≤ 2 × a plain XDP redirect with the same header work",
            {"median": statistics.median(ratios), "worst": max(ratios), "median without the runner's own part": net},
            "≤ 2", max(ratios) <= 2,
        )  # fmt: skip
        ingress = {f"{c['switches']} switches": c["search"] for c in part("cost", policy="any path")}
        add("ingress computation for 20, 64, 256 switches reported (ns)", ingress, "reported", len(ingress) >= 3)
    if rate := {c["system"]: c["median"] for c in part("all-reduce")}:
        ratio = rate["dovetail"] / rate["kernel forwarding"]
        add(
            "All-reduce over the fabric without failures: ≥ 0.9 × the throughput of plain kernel forwarding",
            round(ratio, 3), "≥ 0.9", ratio >= 0.9,
        )  # fmt: skip
    for t in part("training", system="dovetail"):
        add(
            "links fail and heal during training; no step is lost, the loss curve equals the undisturbed one",
            {"same_losses": t["same_losses"], "steps ≥ 200 ms late": t["steps_200ms_late"]}, "the same",
            t["same_losses"],
        )  # fmt: skip
    for s in part("size"):
        add("Sizes: at least 256 switches", s["switches"], "≥ 256, policy holds", s["switches"] >= 256 and s["holds"])
    return made


def tables(cells: list[Cell]) -> None:
    out = console
    table = Table(title="datagrams lost per link failure, 20,000/s (position: edge→agg, agg→core, core→agg, agg→edge)")
    for column in ("system", "failure", "position 0", "1", "2", "3", "median", "longest gap, median ms"):
        table.add_column(column)
    rows = dict.fromkeys((c["system"], c["how"]) for c in cells if c["part"] == "failure")
    for system, how in rows:
        mine = [c for c in cells if c["part"] == "failure" and (c["system"], c["how"]) == (system, how)]
        by = [" ".join(str(c["lost"]) for c in mine if c["position"] == i) for i in range(4)]
        middle = statistics.median(c["lost"] for c in mine)
        gap = statistics.median(c["longest_gap"] for c in mine) * 1e3
        table.add_row(system, how, *by, f"{middle:g}", f"{gap:.1f}")
    out.print(table)
    table = Table(
        title="nanoseconds per packet in the kernel's test runner (whole runs; `nothing` is the runner itself)"
    )
    keys = ("topology", "switches", "policy", "search", "cached", "transit", "plain", "recompute", "nothing")
    for column in (*keys, "transit/plain"):
        table.add_column(column)
    for c in cells:
        if c["part"] == "cost":
            table.add_row(*(f"{c[k]:g}" if isinstance(c[k], float) else str(c[k]) for k in keys), f"{c['ratio']:.2f}")
    out.print(table)
    for c in cells:
        if c["part"] == "all-reduce":
            each = ", ".join(f"{r / 1e6:.0f}" for r in c["bytes_per_second"])
            out.print(
                f"all-reduce 16 MiB, {c['ranks']} hosts, {c['system']}: {c['median'] / 1e6:.1f} MB/s (turns: {each})"
            )
        elif c["part"] == "training":
            out.print(
                f"training over {c['system']}: {c['failures']} failures, same losses {c['same_losses']}, longest stall "
                f"{c['stall'] * 1e3:.0f} ms (undisturbed {c['stall_undisturbed'] * 1e3:.0f}), median step "
                f"{c['median_step'] * 1e3:.0f} ms, steps 200 ms late: {c['steps_200ms_late']}"
            )
        elif c["part"] == "size":
            built = f"built in {c['seconds_to_build']:.1f} s"
            out.print(f"{c['switches']} switches, {c['links']} links: {built}, check holds: {c['holds']}")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--parts", metavar="A,B", help=f"only some of {', '.join(PARTS)}")
    args = options.parse_args()
    if unknown := set((args.parts or "costs").split(",")) - set(PARTS):
        options.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if why := kernel.missing():
        raise SystemExit(f"benchmarks/fabric.py: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was built is removed
    cells: list[Cell] = []
    for part in args.parts.split(",") if args.parts else PARTS:
        cells += PARTS[part](quick=args.quick)
    tables(cells)
    finish("fabric", args, cells, checks(cells))


if __name__ == "__main__":
    main()

"""The fabric against routers: what a link failure costs, whether a policy is ever broken, what a packet costs.

    python benchmarks/fabric.py [--quick] [--json FILE]

Needs root on Linux with clang and libbpf; the FRR rows need FRR and are left out, and said to be, where it is absent.
Everything runs in namespaces of this machine (emulated switches, real packets); no hardware switch is involved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fabric_cost
import fabric_frr
import fabric_loss
from common import finish, parser
from dovetail.core.errors import Error
from dovetail.fabric import check, emulation, hooks, kernel
from dovetail.fabric.disturbed import disturbed_run
from dovetail.fabric.disturbed.disturbed_run import BreakableFabric
from dovetail.fabric.heartbeat import HeartbeatSender
from dovetail.fabric.routing import shapes
from dovetail.fabric.routing.policy import compile_policy
from dovetail.fabric.routing.topology import Topology
from dovetail.fabric.routing.topology_file import load
from fabric_report import AT_XDP, LARGE, OURS, SEGMENTED, Cell, checks, markdown, tables
from fabric_routed import RouteController, routed

ZOO = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "topologies"
RATE = 20_000


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# What a failure costs


@dataclasses.dataclass(frozen=True)
class System:
    """A running fabric of one kind, and what measuring it takes."""

    fabric: BreakableFabric
    walk_of: fabric_loss.Walk
    settle: Callable[[], None]
    """Brings it back to its first state after a link was healed."""


@contextlib.contextmanager
def _ours(hook: str = "") -> Iterator[System]:
    with emulation.temporary(shapes.fat_tree(4), hook=hook) as fabric:

        def walk_of(source: int, target: int, sport: int, dport: int) -> tuple[int, ...]:
            return check.find_walk(fabric, source, target, flow=sport - 1024, port=dport)

        yield System(fabric, walk_of, lambda: fabric.plane.forget(fabric.topology))


def _ours_at_xdp() -> contextlib.AbstractContextManager[System]:
    return _ours(hooks.XDP)


@contextlib.contextmanager
def _ecmp() -> Iterator[System]:
    with routed(shapes.fat_tree(4)) as fabric:
        yield System(fabric, fabric.walk_of, fabric.restore)


@contextlib.contextmanager
def _controller() -> Iterator[System]:
    with routed(shapes.fat_tree(4)) as fabric:
        controller = RouteController(fabric, delay=0.05)
        controller.start()

        def settle() -> None:
            time.sleep(0.4)
            fabric.restore()

        try:
            yield System(fabric, fabric.walk_of, settle)
        finally:
            controller.stop()


@contextlib.contextmanager
def _frr() -> Iterator[System]:
    with fabric_frr.frr(shapes.fat_tree(4)) as fabric:
        yield System(fabric, fabric.walk_of, lambda: fabric_frr.wait_for_routes(fabric, all_ways=20.0))


SYSTEMS = {
    OURS: _ours, AT_XDP: _ours_at_xdp, "static ECMP": _ecmp, "controller, 50 ms": _controller, "FRR OSPF+BFD": _frr,
}  # fmt: skip


def failures(*, quick: bool) -> list[Cell]:
    """A stream at 20,000 datagrams/s, one link of its path cut in mid-stream, at each of the four positions."""
    cells = []
    turns = 1 if quick else 3
    for name, start in SYSTEMS.items():
        if name.startswith("FRR") and fabric_frr.missing():
            say(f"{name}: left out: {fabric_frr.missing()}")
            continue
        say(f"link failures: {name}")
        with start() as system:
            for turn in range(turns):
                for position in range(4):
                    cells.append(_one(name, system, position, turn, how="down"))
    return cells


def _one(name: str, system: System, position: int, turn: int, *, how: str) -> Cell:
    for attempt in range(3):
        try:
            got = fabric_loss.measure(
                system.fabric, system.walk_of, 0, 7, position, rate=RATE, seconds=1.2,
                sport=20_000 + 13 * turn + 101 * attempt, how=how, end=turn % 2 if how == "down" else 0,
                settle=system.settle,
            )  # fmt: skip
        except Error as e:
            say(f"{name}: {e}; once more")
            system.settle()
            continue
        return {"part": "failure", "system": name, "how": how, **dataclasses.asdict(got)}
    raise Error(f"{name}: no measurement at position {position}")


def silent(*, quick: bool) -> list[Cell]:
    """The same with links that fail in silence, which take heartbeats or BFD and some time to detect."""
    cells = []
    for name in ("dovetail, heartbeat 3 × 10 ms", "dovetail, heartbeat 3 × 50 ms", "FRR OSPF+BFD 3 × 50 ms"):
        if name.startswith("FRR") and (fabric_frr.missing() or quick):
            continue
        say(f"silent failures: {name}")
        with (_frr if name.startswith("FRR") else _ours)() as system:
            if isinstance(system.fabric, emulation.Fabric):
                with HeartbeatSender(system.fabric, interval=0.05 if "50" in name else 0.01, misses=3):
                    for position in (1, 2) if quick else range(4):
                        cells.append(_one(name, system, position, 0, how="silent"))
                        time.sleep(0.2)
            else:
                for position in range(4):
                    cells.append(_one(name, system, position, 0, how="silent"))
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
        made += [load(ZOO / f"{name}.gml") for name in names if (ZOO / f"{name}.gml").exists()]
    else:
        say("no Topology Zoo files beside the checkout: random regular graphs in their place")
        made += [shapes.expander(n, 4, seed=n) for n in (12, 20, 30, 40)]
    return made


def policies(plan: Topology, rng: random.Random) -> dict[str, Any]:
    """Every kind of clause at once, on hosts drawn by lot; drawn again until the compiler accepts it."""
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
        with emulation.temporary(plan, policies(plan, rng)) as fabric, check.Prober(fabric) as prober:
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
            turns, repeat = (3, 10_000) if quick else (15, 20_000)
            got = fabric_cost.measure(plan, waypoints=waypoints, turns=turns, repeat=repeat)
            cells.append({"part": "cost", **dataclasses.asdict(got), "ratio": got.ratio, "net_ratio": got.net_ratio})
    return cells


@dataclasses.dataclass(frozen=True)
class Wire:
    """What all links of a fabric have in common."""

    mtu: int
    rate: float = 0.0
    """Bytes per second and direction; 0: as fast as the machine is."""

    def plan(self) -> Topology:
        made = shapes.fat_tree(4, mtu=self.mtu)
        links = tuple(dataclasses.replace(k, rate=self.rate) for k in made.links)
        return dataclasses.replace(
            made, links=links, hosts=tuple(dataclasses.replace(h, rate=self.rate) for h in made.hosts)
        )


GBIT = 125e6
LIMITED = (Wire(1500, GBIT), Wire(1500, 2 * GBIT), Wire(9000, GBIT), Wire(9000, 2 * GBIT))
FREE = (Wire(1500), Wire(9000))
QUICK = (Wire(1500, GBIT), Wire(1500))


def _carrier(name: str, plan: Topology) -> contextlib.AbstractContextManager[BreakableFabric]:
    if name in (OURS, AT_XDP):
        return emulation.temporary(plan, hook=hooks.XDP if name == AT_XDP else "")
    return routed(plan, superframes=name == LARGE)


def _all_reduce_rate(fabric: BreakableFabric, hosts: list[int], *, turns: int, floats: int = 1 << 22) -> float:
    """Bytes per second of one all-reduce: payload over the median time."""
    worker = [str(Path(__file__).with_name("fabric_all_reduce.py"))]
    result = disturbed_run.run(fabric, hosts, iterations=turns, width=floats, worker=worker)
    return 4 * floats / statistics.median(result.seconds[2:])


def throughput(*, quick: bool) -> list[Cell]:
    """All-reduce of 16 MiB between hosts in different pods, the systems by turns.

    Kernel forwarding has all its offloads: frames of 64 KiB pass from one namespace to the next, and so they do over
    ours. For the eye: ours at XDP, which cuts them to the MTU as on a wire, and kernel forwarding cut in the same way.
    """
    hosts = [0, 7]
    cells = []
    for w in QUICK if quick else LIMITED + FREE:
        plan, rates = w.plan(), dict[str, list[float]]()
        turns = {OURS: 5, LARGE: 5, AT_XDP: 3, SEGMENTED: 0 if w.rate else 3} if not quick else {OURS: 2, LARGE: 2}
        with contextlib.ExitStack() as stack:
            systems = {name: stack.enter_context(_carrier(name, plan)) for name in turns if turns[name]}
            for turn in range(max(turns.values())):
                for name, fabric in systems.items():
                    if turn < turns[name]:
                        say(f"all-reduce: MTU {w.mtu}, {w.rate * 8 / 1e9:g} Gbit/s, {name}, turn {turn + 1}")
                        rate = _all_reduce_rate(fabric, hosts, turns=8 if quick else 30)
                        rates.setdefault(name, []).append(rate)
        for name, r in rates.items():
            cells.append(
                {
                    "part": "all-reduce", "mtu": w.mtu, "rate": w.rate, "system": name, "ranks": len(hosts),
                    "bytes_per_second": r, "median": statistics.median(r),
                }
            )  # fmt: skip
    return cells


def trained(*, quick: bool) -> list[Cell]:
    """The same training undisturbed and with eight failures, over ours and over FRR."""
    plan, hosts = shapes.fat_tree(4), [0, 7] if quick else [0, 3, 5, 7]
    iterations, count = (50, 6) if quick else (90, 8)
    cells = []
    events = disturbed_run.disturbances(plan, iterations=iterations, failures=count, hosts=hosts)
    for name, start in ((OURS, _ours), ("FRR OSPF+BFD", _frr)):
        if name.startswith("FRR") and (quick or fabric_frr.missing()):
            continue
        with start() as system:
            say(f"training: {name}, undisturbed")
            calm = disturbed_run.run(system.fabric, hosts, iterations=iterations)
            say(f"training: {name}, {count} failures")
            rough = disturbed_run.run(system.fabric, hosts, iterations=iterations, events=events)
            system.settle()
        cells.append(
            {
                "part": "training", "system": name, "steps": len(rough.losses), "failures": count,
                "same_losses": calm.losses == rough.losses, "median_step": rough.median, "stall": rough.stall,
                "stall_undisturbed": calm.stall, "steps_200ms_late": rough.late_iterations,
                "total": sum(rough.seconds), "total_undisturbed": sum(calm.seconds),
            }
        )  # fmt: skip
    return cells


def size(*, quick: bool) -> list[Cell]:
    """A fabric of more than 256 switches, up and checked."""
    plan = shapes.expander(260, 4)
    say("size: 260 switches")
    begin = time.monotonic()
    with emulation.temporary(plan) as fabric:
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


def main() -> None:
    options = parser(__doc__ or "")
    told = f"only some of {', '.join(PARTS)}; what the JSON has of the others stays"
    options.add_argument("--parts", metavar="A,B", help=told)
    args = options.parse_args()
    if unknown := set((args.parts or "costs").split(",")) - set(PARTS):
        options.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if why := kernel.missing():
        raise SystemExit(f"benchmarks/fabric.py: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was built is removed
    cells: list[Cell] = []
    for part in args.parts.split(",") if args.parts else PARTS:
        cells += PARTS[part](quick=args.quick)
    if args.parts and args.json and args.json.exists():
        made = {c["part"] for c in cells}
        before = json.loads(args.json.read_text(encoding="utf-8"))["cells"]
        cells = [*(c for c in before if c["part"] not in made), *cells]
    tables(cells)
    finish("fabric", args, cells, checks(cells), tables=markdown(cells))


if __name__ == "__main__":
    main()

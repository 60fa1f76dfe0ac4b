"""`dovetail fabric`: build an emulated fabric, break its links, check it, explain it, remove it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import console

app = typer.Typer(
    name="fabric",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Policy-compliant routing in the data plane: emulated switches and hosts, real packets.",
)
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Which fabric; not needed while there is only one.")]
LinkName = Annotated[str, typer.Argument(metavar="A-B", help="A link, by the names of its switches.")]


@app.command()
def up(
    topology: Annotated[
        Path, typer.Argument(metavar="topo.yaml", help="A topology: YAML, or GML of the Topology Zoo.")
    ],
    policy: Annotated[
        Path | None,
        typer.Option(metavar="policy.yaml", help="Default: the `policy:` of the topology file, or any path."),
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Up to 16 of a-z and 0-9.")] = "lab",
    hook: Annotated[
        str, typer.Option(metavar="tc|xdp", help="Where the programs sit; at tc segments of 64 KiB stay whole.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check topology and policy; build nothing.")] = False,
    json: console.Json = False,
) -> None:
    """Build a fabric. If it is up already, bring its policy to what the file says, without a window in between."""
    from dovetail.fabric import emulation, hooks
    from dovetail.fabric.dataplane import addresses
    from dovetail.fabric.routing.policy import compile_policy
    from dovetail.fabric.routing.topology_file import from_document, load, read_yaml

    document: dict[str, Any] = {}
    if topology.suffix == ".gml":
        plan = load(topology)
    else:
        whole = read_yaml(topology)
        document = whole.pop("policy", None) or {}
        plan = from_document(whole, topology)
    if policy:
        document = read_yaml(policy)
    hooks.chosen(hook, plan.mtu)
    policies = compile_policy(document, plan, policy or topology)
    for warning in policies.warnings:
        typer.echo(f"note: {warning}", err=True)
    size = f"{len(plan.switches)} switches, {len(plan.links)} links, {len(plan.hosts)} hosts"
    if dry_run:
        console.result(
            {"topology": plan.name, "policies": len(policies.automata)}, json, f"{plan.name}: {size}; policy holds"
        )
        return
    fabric = emulation.up(plan, document, name=name, hook=hook)
    try:
        generation = fabric.plane.config()["generation"]
        hosts = {h.name: addresses(i).v4 for i, h in enumerate(plan.hosts)}
        facts = {"name": name, "topology": plan.name, "generation": generation, "hosts": hosts, "emulated": True}
        facts["hook"] = fabric.plane.hook
        first = list(hosts.items())[:4]
        shown = ", ".join(f"{h} {a}" for h, a in first) + (", …" if len(hosts) > 4 else "")
        console.result(facts, json, f"{name}: {size} (emulated), tables {generation}", f"hosts: {shown}")
    finally:
        fabric.close()


@app.command()
def status(name: Name = None, json: console.Json = False) -> None:
    """Links that are not up, and what the switches counted."""
    from dovetail.fabric import emulation, page_source

    fabric = emulation.find(name)
    try:
        topology, facts = fabric.topology, page_source.state(fabric)
        links = facts["links"]
        broken = {k: v for k, v in links.items() if v != "up"}
        lines = [
            f"{fabric.name}: {topology.name}, {len(topology.switches)} switches, {len(links)} links, "
            f"{len(topology.hosts)} hosts (emulated, at {facts['hook']}), tables {fabric.plane.config()['generation']}",
            f"links: {len(links) - len(broken)} up" + "".join(f"; {k} {v}" for k, v in broken.items()),
        ]
        lines += [f"{k:>20} {v:,}" for k, v in facts["counters"].items() if v]
        lines += [f"{s} heard that {', '.join(b)} failed" for s, b in list(facts["believed"].items())[:8]]
        console.result(facts, json, *lines)
    finally:
        fabric.close()


@app.command()
def fail(
    link: LinkName,
    silent: Annotated[bool, typer.Option("--silent", help="Frames vanish, the carrier stays on.")] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Take it out of service in good order: nothing is lost.")
    ] = False,
    name: Name = None,
    json: console.Json = False,
) -> None:
    """Break a link: carrier lost at both ends, at once."""
    from dovetail.fabric import emulation

    if silent and drain:
        raise typer.BadParameter("choose one of --silent and --drain")
    fabric = emulation.find(name)
    try:
        index = fabric.topology.find_link(link)
        fabric.fail(index, how="silent" if silent else "drained" if drain else "down")
        state = fabric.link_state(index)
        console.result({"link": fabric.topology.link_name(index), "state": state}, json, f"{link}: {state}")
    finally:
        fabric.close()


@app.command()
def heal(
    link: Annotated[str | None, typer.Argument(metavar="A-B", help="A link; without one, all of them.")] = None,
    name: Name = None,
    json: console.Json = False,
) -> None:
    """Bring a link back, or all."""
    from dovetail.fabric import emulation

    fabric = emulation.find(name)
    try:
        wanted = [fabric.topology.find_link(link)] if link else sorted(fabric.failed())
        for index in wanted:
            fabric.heal(index)
        healed = [fabric.topology.link_name(i) for i in wanted]
        console.result({"healed": healed}, json, f"up: {', '.join(healed) or 'all links were'}")
    finally:
        fabric.close()


@app.command()
def check(
    flows: Annotated[int, typer.Option(min=1, help="Flows per pair of hosts.")] = 2,
    most: Annotated[int, typer.Option(min=1, help="Sample this many probes where there would be more.")] = 20_000,
    ipv6: Annotated[bool, typer.Option("--ipv6", help="Probe with IPv6.")] = False,
    name: Name = None,
    json: console.Json = False,
) -> None:
    """Send real probes between all hosts, compare each path with the oracle; fail if one breaks the policy."""
    from dataclasses import asdict

    from dovetail.fabric import check as checking
    from dovetail.fabric import emulation

    fabric = emulation.find(name)
    try:
        report = checking.check(fabric, flows=flows, most=most, v6=ipv6)
    finally:
        fabric.close()
    lines = [
        f"{report.probes:,} probes: {report.delivered:,} delivered, {report.no_path:,} without a compliant path, "
        f"{report.denied:,} denied, {report.stranded:,} stranded",
        f"violations {len(report.violations)}, loops {len(report.loops)}, lost {len(report.lost)}, "
        f"less preferred {len(report.less_preferred)}; "
        f"hops {report.stretch:.3f} × the fewest possible",
        *[f"  {line}" for line in report.faults[:10]],
    ]
    console.result({**asdict(report), "holds": report.holds, "stretch": report.stretch}, json, *lines)
    if not report.holds:
        raise typer.Exit(1)


@app.command()
def trace(
    source: Annotated[str, typer.Argument(metavar="A", help="The host that sends.")],
    target: Annotated[str, typer.Argument(metavar="B", help="The host that receives.")],
    flow: Annotated[int, typer.Option(min=0, help="Another flow may take another of the equal paths.")] = 0,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Destination port: a class may be of one port.")] = 9,
    name: Name = None,
    json: console.Json = False,
) -> None:
    """The path of one real probe from A to B, and why it is this one."""
    from dataclasses import asdict

    from dovetail.fabric import check as checking
    from dovetail.fabric import emulation

    fabric = emulation.find(name)
    try:
        topology = fabric.topology
        found = checking.trace(fabric, topology.find_host(source), topology.find_host(target), flow=flow, port=port)
    finally:
        fabric.close()
    way = " → ".join((found.source, *found.walk, found.target)) if found.walk else f"{found.source} ✗ {found.target}"
    console.result(asdict(found), json, way, f"policy {found.policy!r}: {found.why}")


@app.command()
def heartbeat(
    interval: Annotated[float, typer.Option(min=0.001, help="Seconds between rounds.")] = 0.01,
    misses: Annotated[int, typer.Option(min=2, help="Silent rounds after which a link is down.")] = 3,
    name: Name = None,
) -> None:
    """Find links that fail in silence, until interrupted: every switch says something on every link."""
    import time

    from dovetail.fabric import emulation
    from dovetail.fabric.heartbeat import HeartbeatSender

    fabric = emulation.find(name)
    try:
        with HeartbeatSender(fabric, interval=interval, misses=misses):
            typer.echo(f"{fabric.name}: a round every {interval * 1e3:g} ms, down after {misses}; ^C ends", err=True)
            while True:
                time.sleep(3600)
    finally:
        fabric.close()


@app.command("exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def execute(
    host: Annotated[str, typer.Argument(help="A host of the fabric.")],
    command: Annotated[list[str], typer.Argument(help="What to run there.")],
    name: Name = None,
) -> None:
    """Run a command on a host of the fabric."""
    from dovetail.fabric import emulation

    fabric = emulation.find(name)
    try:
        process = fabric.run(fabric.topology.find_host(host), command)
    finally:
        fabric.close()
    raise typer.Exit(process.wait())


@app.command()
def down(
    name: Name = None,
    everything: Annotated[bool, typer.Option("--all", help="Every fabric, whoever built it.")] = False,
    json: console.Json = False,
) -> None:
    """Remove a fabric and all that runs in it, also after an interrupted `up`. Nothing else is touched."""
    from dovetail.fabric import emulation

    names = [name] if name and not everything else emulation.standing()
    if len(names) > 1 and not everything:
        raise typer.BadParameter(f"several fabrics are up: {', '.join(names)}; choose with --name, or --all")
    removed = {n: emulation.down(n) for n in names}
    lines = [f"{n}: removed {count} namespaces" for n, count in removed.items()]
    console.result(removed, json, *(lines or ["no fabric is up"]))

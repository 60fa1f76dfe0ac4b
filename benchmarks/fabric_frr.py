"""The FRR baseline: OSPF with BFD in every switch, tuned for speed.

One area; the links of the hosts are passive interfaces in it, so that a failure is one flooded change and one run of
the shortest-path algorithm, without external routes. Links are point-to-point. Carrier loss is seen at once, silent
failures after three missed BFD packets. Nothing is held back: no delay before the first computation, 10 ms (at most
100 ms) between later ones, no interval between advertisements, neither sending nor accepting.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dovetail.core.errors import Error
from dovetail.fabric import netns
from dovetail.fabric.dataplane import host_slot, link_slot
from dovetail.fabric.extra import nx
from dovetail.fabric.lock import RUN
from dovetail.fabric.routing.topology import Topology
from dovetail.fabric.wiring import device
from fabric_routed import Routed, routed, subnet

_LIB = Path("/usr/lib/frr")


def missing() -> str:
    """Why FRR cannot run here, or nothing."""
    if not (_LIB / "ospfd").exists():
        return "the FRR baseline needs FRR: apt-get install frr"
    return ""


def _config(fabric: Routed, switch: int, *, bfd_ms: int) -> dict[str, str]:
    topology = fabric.topology
    mine = [(i, 0 if k.a == switch else 1) for i, k in enumerate(topology.links) if switch in (k.a, k.b)]
    router = f"192.0.{switch >> 8}.{switch & 255}"
    ospf = [f"hostname s{switch}", "log syslog errors"]
    for link, end in mine:
        ospf += [
            f"interface {device(link_slot(link, end))}",
            " ip ospf area 0", " ip ospf network point-to-point",
            " ip ospf hello-interval 1", " ip ospf dead-interval 3",
            " ip ospf bfd", " ip ospf bfd profile fast", "exit",
        ]  # fmt: skip
    for h, host in enumerate(topology.hosts):
        if host.switch == switch:
            ospf += [
                f"interface {device(host_slot(topology, h))}",
                " ip ospf area 0", " ip ospf network point-to-point", " ip ospf passive", "exit",
            ]  # fmt: skip
    ospf += [
        "router ospf", f" ospf router-id {router}", " maximum-paths 16",
        " timers throttle spf 0 10 100", " timers throttle lsa all 0", " timers lsa min-arrival 0", "exit",
    ]  # fmt: skip
    bfd = [
        "bfd",
        " profile fast",
        f"  receive-interval {bfd_ms}",
        f"  transmit-interval {bfd_ms}",
        "  detect-multiplier 3",
    ]
    return {
        "ospfd": "\n".join(ospf) + "\n",
        "bfdd": "\n".join([*bfd, " exit", "exit"]) + "\n",
        # Routes carry their next hops themselves: zebra 8.4 does not put back a next-hop object that the kernel removed
        # with its link, and the route would lack one of its ways ever after.
        "zebra": f"hostname s{switch}\nno zebra nexthop kernel enable\n",
    }


@contextlib.contextmanager
def frr(topology: Topology, *, bfd_ms: int = 50, wait: float = 60.0) -> Iterator[Routed]:
    """A routed fabric whose tables FRR fills; ready when every switch has a route to every host."""
    if why := missing():
        raise Error(why)
    with routed(topology, push=False) as fabric:
        home = RUN / fabric.names.name
        home.mkdir(parents=True, exist_ok=True)
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            for s in range(len(topology.switches)):
                here = home / f"s{s}"
                here.mkdir()
                shutil.chown(here, "frr", "frr")  # FRR's daemons give up root
                texts = _config(fabric, s, bfd_ms=bfd_ms)
                for daemon in ("zebra", "bfdd", "ospfd"):
                    config = here / f"{daemon}.conf"
                    config.write_text(texts[daemon])
                    shutil.chown(config, "frr", "frr")
                    command = [
                        "ip", "netns", "exec", fabric.names.switch(s), str(_LIB / daemon), "-f", str(config),
                        "-i", str(here / f"{daemon}.pid"), "-z", str(here / "zserv"),
                        "--vty_socket", str(here), "-P", "0",
                    ]  # fmt: skip
                    if daemon == "bfdd":
                        command += ["--bfdctl", str(here / "bfdd.sock")]
                    daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                    if daemon == "zebra":
                        _until((here / "zserv").exists, 10, "zebra")
            wait_for_routes(fabric, wait, all_ways=wait)
            yield fabric
        finally:
            for daemon_process in daemons:
                daemon_process.kill()
            for daemon_process in daemons:
                daemon_process.wait()
            shutil.rmtree(home, ignore_errors=True)


def _until(done: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise Error(f"{what} did not get ready within {seconds:.0f} s")
        time.sleep(0.02)


def wait_for_routes(fabric: Routed, seconds: float = 60.0, *, all_ways: float = 5.0) -> None:
    """Until every switch knows a way to every host, and for `all_ways` seconds until it knows all shortest ones.

    A link that came back is used again only after the daemons at its ends have greeted each other, some seconds later.
    """
    topology = fabric.topology
    distance = dict(nx.all_pairs_shortest_path_length(topology.graph))

    def known(everything: bool) -> bool:
        for s in range(len(topology.switches)):
            with netns.inside(fabric.names.switch(s)):
                shown = subprocess.run(["ip", "-o", "route"], capture_output=True, text=True, check=False).stdout
            ways = {line.split()[0]: max(1, line.count("nexthop")) for line in shown.splitlines()}
            for h, host in enumerate(topology.hosts):
                wanted = sum(distance[n][host.switch] < distance[s][host.switch] for n in topology.graph[s]) or 1
                if ways.get(subnet(h), 0) < (wanted if everything else 1):
                    return False
        return True

    with contextlib.suppress(Error):
        _until(lambda: known(True), all_ways, "OSPF")
    _until(lambda: known(False), seconds, "OSPF")

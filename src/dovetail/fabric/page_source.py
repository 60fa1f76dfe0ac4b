"""A running fabric on the page: states of its links, counters and beliefs of its switches, paths of probes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import check, emulation
from .emulation import Fabric

if TYPE_CHECKING:
    from dovetail.view.page import Contents

MOST_PATHS = 3
"""Paths on the page; each is found by one real probe whenever the page asks."""


def state(fabric: Fabric) -> dict[str, Any]:
    """What `dovetail fabric status --json` prints."""
    topology, plane = fabric.topology, fabric.plane
    heard = {name: plane.believed(s) for s, name in enumerate(topology.switches)}
    return {
        "name": fabric.name,
        "hook": plane.hook,
        "links": {topology.link_name(i): state for i, state in enumerate(fabric.link_states())},
        "counters": plane.totals(topology),
        "believed": {name: sorted(map(topology.link_name, links)) for name, links in heard.items() if links},
    }


@dataclass(frozen=True)
class FabricSource:
    """A `view.page.Source`: reads the fabric of this name anew for every request. Needs root, as the fabric does."""

    name: str
    live: bool = True

    def contents(self) -> Contents:
        import msgspec

        from dovetail.view.page import sort
        from dovetail.view.page.reports import FabricReport, TraceReport

        fabric = emulation.find(self.name)
        try:
            found: list[Any] = [msgspec.convert(state(fabric), FabricReport)]
            last = len(fabric.topology.hosts) - 1
            # From the first host to the last one, and to some between.
            for target in sorted({last * i // MOST_PATHS for i in range(1, MOST_PATHS + 1)} - {0}, reverse=True):
                found.append(msgspec.convert(asdict(check.trace(fabric, 0, target)), TraceReport))
        finally:
            fabric.close()
        return sort(found, files=[f"the running fabric {self.name}"], only=["fabrics"])

"""A running fabric for whoever looks on: its links' states, what switches counted and heard, the way packets take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.view.page import Contents

    from .emulate import Fabric

MOST_PATHS = 3
"""Of which the page shows the way: each is one real probe, whenever somebody looks."""


def state(fabric: Fabric) -> dict[str, Any]:
    """What `dovetail fabric status --json` prints."""
    topology, plane = fabric.topology, fabric.plane
    heard = {name: plane.believed(s) for s, name in enumerate(topology.switches)}
    return {
        "name": fabric.name,
        "hook": plane.hook,
        "links": {topology.link_name(i): fabric.link_state(i) for i in range(len(topology.links))},
        "counters": plane.totals(topology),
        "believed": {name: sorted(map(topology.link_name, links)) for name, links in heard.items() if links},
    }


@dataclass(frozen=True)
class Running:
    """A `view.page.Source`: the fabric of a name, looked at anew whenever asked. Needs root, as the fabric does."""

    name: str
    live: bool = True

    def contents(self) -> Contents:
        import msgspec

        from dovetail.view.page import sort
        from dovetail.view.page.reports import FabricReport, TraceReport

        from . import check, emulate

        fabric = emulate.find(self.name)
        try:
            found: list[Any] = [msgspec.convert(state(fabric), FabricReport)]
            last = len(fabric.topology.hosts) - 1
            # From the first host to the farthest in the list, and to some between.
            for target in sorted({last * i // MOST_PATHS for i in range(1, MOST_PATHS + 1)} - {0}, reverse=True):
                found.append(msgspec.convert(asdict(check.trace(fabric, 0, target)), TraceReport))
        finally:
            fabric.close()
        return sort(found, files=[f"the running fabric {self.name}"], only=["fabrics"])

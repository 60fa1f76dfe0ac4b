"""Contents of a page: nouns and reports of commands, sorted by kind.

Files give contents once; a running cluster gives new ones whenever it is asked. Both are a `Source`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.job import Schedule
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline

from .document import ScheduleSection
from .reports import BurstReport, CommandReport, FabricReport, ScaleReport, StudyReport, TraceReport


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything the page can show, in the order in which it was given."""

    files: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = ()
    networks: tuple[Network, ...] = ()
    plans: tuple[Plan, ...] = ()
    bursts: tuple[BurstPlan, ...] = ()
    depths: tuple[DepthPlan, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    clusters: tuple[ScheduleSection, ...] = ()
    """Schedules that a cluster has already made into a section: it knows states and reasons that no noun has."""
    scale_reports: tuple[ScaleReport, ...] = ()
    burst_reports: tuple[BurstReport, ...] = ()
    studies: tuple[StudyReport, ...] = ()
    fabrics: tuple[FabricReport, ...] = ()
    paths: tuple[TraceReport, ...] = ()
    beside: tuple[Profile | Network, ...] = ()
    """What plans were made from, found beside them: used for predictions, not shown for itself."""
    notes: tuple[str, ...] = ()
    """Lines to show below the first sentence."""
    only: tuple[str, ...] = ()
    """Kinds of sections (keys of `build.EMPTY`) whose absence is mentioned; empty for all kinds."""


class Source(Protocol):
    """Where a page's contents come from."""

    @property
    def live(self) -> bool:
        """Whether asking again may give something new."""
        ...

    def contents(self) -> Contents: ...


@dataclass(frozen=True)
class Given:
    """Contents that stay as they are."""

    given: Contents
    live: bool = False

    def contents(self) -> Contents:
        return self.given


@dataclass(frozen=True)
class Several:
    """Sources side by side on one page."""

    sources: Sequence[Source]

    @property
    def live(self) -> bool:
        return any(s.live for s in self.sources)

    def contents(self) -> Contents:
        found = [s.contents() for s in self.sources]
        joined = {f.name: sum((getattr(c, f.name) for c in found), ()) for f in fields(Contents)}
        return Contents(**joined | {"only": () if any(not c.only for c in found) else joined["only"]})


FIELDS: dict[type[Any], str] = {
    Profile: "profiles",
    Network: "networks",
    Plan: "plans",
    BurstPlan: "bursts",
    DepthPlan: "depths",
    Timeline: "timelines",
    Schedule: "schedules",
    ScaleReport: "scale_reports",
    BurstReport: "burst_reports",
    StudyReport: "studies",
    FabricReport: "fabrics",
    TraceReport: "paths",
}


def sort(
    things: Iterable[Any | CommandReport],
    *,
    files: Iterable[str] = (),
    beside: Iterable[Profile | Network] = (),
    only: Iterable[str] = (),
) -> Contents:
    """Sorts nouns and reports into the fields of their kinds."""
    found: dict[str, tuple[Any, ...]] = {}
    for thing in things:
        field = FIELDS[type(thing)]
        found[field] = (*found.get(field, ()), thing)
    return replace(Contents(files=tuple(files), beside=tuple(beside), only=tuple(only)), **found)

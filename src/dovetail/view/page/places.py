"""Who gets which devices, and which way packets go, as the page's data."""

from __future__ import annotations

from dovetail.core.files import Record

from .pictures import Drawn, Told
from .reports import TraceReport


class JobRow(Record, frozen=True, kw_only=True):
    """A job as its cluster saw it."""

    name: str
    color: str
    first: float | None = None
    """When it got its first device."""
    last: float | None = None
    devices: int = 0
    """Distinct ones that it ran on."""
    tasks: int = 0
    device_time: float = 0.0


class LiveJob(Record, frozen=True, kw_only=True):
    """A job as its cluster knows it now, in the cluster's own words."""

    number: int
    name: str
    color: str
    state: str
    done: int = 0
    total: int = 0
    """Iterations; 0 while nobody has said how many there will be."""
    speed: float = 0.0
    """Seconds an iteration takes; 0 while unknown."""
    promise: str = ""
    """Of a foreground job, what it was promised and what was measured; of others, what sharing costs them."""
    devices: str = ""
    submitted: float
    """Seconds of the calendar's clock."""
    why: tuple[str, ...] = ()
    """Why it waits, is slow, or has ended; the first reason first."""


class LiveDevice(Record, frozen=True, kw_only=True):
    name: str
    state: str
    jobs: str
    busy: float
    """Share of its time in tasks, lately."""
    bytes: int
    bytes_total: int


class Shared(Told, frozen=True, kw_only=True):
    """A schedule: who ran where; of a live cluster also who runs now and why others do not."""

    more: tuple[str, ...] = ()
    drawn: Drawn
    jobs: tuple[JobRow, ...] = ()
    live: tuple[LiveJob, ...] = ()
    devices: tuple[LiveDevice, ...] = ()
    missing: str = ""
    """Why nothing is drawn."""


class Outcome(Record, frozen=True, kw_only=True):
    """One policy of a cluster study, means over its samples."""

    policy: str
    load: float | None
    makespan: float
    mean: float
    queueing: float
    busy: float


class Study(Told, frozen=True, kw_only=True):
    outcomes: tuple[Outcome, ...]


class Switch(Record, frozen=True, kw_only=True):
    name: str
    x: float
    y: float
    """Both from 0 to 1."""
    believes: tuple[str, ...] = ()
    """Links that it heard have failed."""


class Link(Record, frozen=True, kw_only=True):
    name: str
    a: int
    b: int
    state: str


class Fabric(Told, frozen=True, kw_only=True):
    switches: tuple[Switch, ...]
    links: tuple[Link, ...]
    counters: dict[str, int]
    paths: tuple[TraceReport, ...] = ()

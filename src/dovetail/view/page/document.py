"""What the page shows, as data: `web/src/document.ts` has the same shapes. Times in seconds, sizes in bytes.

Big tables travel as columns: little-endian arrays in base64, which a browser turns into typed arrays at once. First
come drawn timelines, then a job's sections, then a cluster's and a fabric's, then the whole document.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dovetail.core.files import Record

from .reports import TraceReport

Source = Literal["predicted", "measured"]


class LegendEntry(Record, frozen=True, kw_only=True):
    """How a kind of work is drawn: a colour, and a height as a share of the row that tells it apart without colour."""

    label: str
    color: str
    height: float = 1.0


class TimelineRow(Record, frozen=True, kw_only=True):
    """A row of a timeline: spans [first, stop) of the columns, by time, none of which overlap."""

    label: str
    group: str
    first: int
    stop: int


class Columns(Record, frozen=True, kw_only=True):
    """Spans of all rows, row after row. A communication that is hidden in part is several spans of one name."""

    count: int
    start: str
    """float64, seconds from the start of the timeline."""
    duration: str
    """float32, seconds."""
    look: str
    """uint8, into `looks`."""
    name: str
    """uint32, into `names`."""
    bytes: str
    """float64; empty where no span carries any."""


class DrawnTimeline(Record, frozen=True, kw_only=True):
    """A timeline made ready for drawing."""

    name: str
    title: str
    """Heading: source, name or policy, and duration."""
    source: Source
    emulated: bool = False
    duration: float
    origin: float = 0.0
    """Time 0 of a live picture, in seconds of one clock: it moves on from each picture to the next."""
    looks: tuple[LegendEntry, ...]
    names: tuple[str, ...]
    rows: tuple[TimelineRow, ...]
    columns: Columns


class Section(Record, frozen=True, kw_only=True):
    """What every section begins with: what it is of, and what to read first."""

    title: str
    sentence: str


Family = Literal["data-parallel", "burst", "other"]


class Bar(Record, frozen=True, kw_only=True):
    """Where the time of one iteration goes, on the rank that waits longest."""

    label: str
    source: Source
    emulated: bool = False
    total: float
    forward: float
    backward: float
    optimizer: float
    hidden: float | None
    """Communication behind computation; None where nothing tells how long communication takes."""
    exposed: float | None
    """Communication that nothing hides."""

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.optimizer


class Lead(Record, frozen=True, kw_only=True):
    """What a newcomer reads first."""

    sentence: str
    more: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    """The first is how it is; the three numbers are its."""


class LayersSection(Section, frozen=True, kw_only=True):
    """A profile at its own batch, layers in execution order."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    parameters: tuple[int, ...]
    activations: tuple[int, ...]
    """Bytes for one sample."""
    batches: tuple[tuple[int, float, float], ...]
    """(local batch, forward, backward) of the whole model."""


class PolicyRow(Record, frozen=True, kw_only=True):
    """One way of merging gradients and what it promises."""

    name: str
    buckets: int
    iteration: float
    exposed: float
    bound: float
    chosen: bool
    how: str = ""
    """How it cuts, in a line."""


class BucketRow(Record, frozen=True, kw_only=True):
    bytes: int
    tensors: int
    first: str
    last: str
    kind: str = ""
    """Whole or split, and the precision if it is not full; empty where all are whole."""


class PlanSection(Record, frozen=True, kw_only=True):
    """A plan, its rivals, and both drawn against backward and forward."""

    title: str
    sentences: tuple[str, ...]
    policies: tuple[PolicyRow, ...]
    buckets: tuple[BucketRow, ...]
    drawn: tuple[DrawnTimeline, ...] = ()
    missing: str = ""
    """Why nothing is drawn."""


class DepthRow(Record, frozen=True, kw_only=True):
    worker: int
    depth: int
    batch: int
    forward: float
    backward: float
    activations: int
    sent: int


class DepthsSection(Section, frozen=True, kw_only=True):
    """A plan of partial backpropagation: its last phase."""

    segments: int
    workers: tuple[DepthRow, ...]


class ComparisonSection(Record, frozen=True, kw_only=True):
    """A prediction beside what happened, by kind of work; the first row is the whole iteration."""

    sentence: str
    rows: tuple[tuple[str, float, float], ...]


class Series(Record, frozen=True, kw_only=True):
    """One policy over numbers of workers."""

    name: str
    workers: tuple[int, ...]
    speedup: tuple[float, ...]
    iteration: tuple[float, ...]


class ScalingSection(Section, frozen=True, kw_only=True):
    series: tuple[Series, ...]


class SizeRow(Record, frozen=True, kw_only=True):
    bytes: int
    median: float
    low: float
    high: float


class CollectiveRow(Record, frozen=True, kw_only=True):
    name: str
    latency: float
    seconds_per_byte: float
    error: float
    samples: tuple[SizeRow, ...]


class NetworkSection(Section, frozen=True, kw_only=True):
    """A network: what each collective costs."""

    collectives: tuple[CollectiveRow, ...]


class TradeOff(Record, frozen=True, kw_only=True):
    """A plan of devices per layer as a point: how fast against how much device-time."""

    name: str
    family: Family
    iteration: float
    device_time: float
    amplification: float
    free: float | None
    chosen: bool


class BurstSection(Record, frozen=True, kw_only=True):
    title: str
    sentences: tuple[str, ...]
    devices: int
    points: tuple[TradeOff, ...]
    layers: tuple[str, ...]
    counts: tuple[int, ...]


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
    """Promised and measured slow-down of a foreground job; of other jobs, the slow-down by sharing."""
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


class ScheduleSection(Section, frozen=True, kw_only=True):
    """A schedule: who ran where; of a live cluster also who runs now and why others do not."""

    more: tuple[str, ...] = ()
    drawn: DrawnTimeline
    jobs: tuple[JobRow, ...] = ()
    live: tuple[LiveJob, ...] = ()
    devices: tuple[LiveDevice, ...] = ()
    missing: str = ""
    """Why nothing is drawn."""


class StudyRow(Record, frozen=True, kw_only=True):
    """One policy of a cluster study, means over its samples."""

    policy: str
    load: float | None
    makespan: float
    mean: float
    queueing: float
    busy: float


class StudySection(Section, frozen=True, kw_only=True):
    outcomes: tuple[StudyRow, ...]


class DrawnSwitch(Record, frozen=True, kw_only=True):
    name: str
    x: float
    y: float
    """Both from 0 to 1."""
    believes: tuple[str, ...] = ()
    """Links that it heard have failed."""


class DrawnLink(Record, frozen=True, kw_only=True):
    name: str
    a: int
    b: int
    state: str


class FabricSection(Section, frozen=True, kw_only=True):
    switches: tuple[DrawnSwitch, ...]
    links: tuple[DrawnLink, ...]
    counters: dict[str, int]
    paths: tuple[TraceReport, ...] = ()


class Document(Record, frozen=True, kw_only=True):
    """The whole page. Where a section is empty, `empty` says by what command it is filled."""

    title: str
    files: tuple[str, ...]
    live: bool = False
    """True where a server has more to come."""
    lead: Lead
    timelines: tuple[DrawnTimeline, ...] = ()
    compared: ComparisonSection | None = None
    plans: tuple[PlanSection, ...] = ()
    depths: tuple[DepthsSection, ...] = ()
    profiles: tuple[LayersSection, ...] = ()
    networks: tuple[NetworkSection, ...] = ()
    scaling: tuple[ScalingSection, ...] = ()
    bursts: tuple[BurstSection, ...] = ()
    schedules: tuple[ScheduleSection, ...] = ()
    studies: tuple[StudySection, ...] = ()
    fabrics: tuple[FabricSection, ...] = ()
    empty: dict[str, str]
    notes: tuple[str, ...] = ()
    series: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Colours for lines, one policy each."""
    colors: dict[str, str]
    """Colours by kind of span."""


def encode(document: Document) -> bytes:
    return msgspec.json.encode(document)

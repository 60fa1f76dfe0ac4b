"""What the page shows, as data: `web/src/document.ts` has the same shapes. Seconds and bytes everywhere.

Pictures and places have files of their own; this one has what is about a job, and the whole.

Big tables travel as columns: little-endian arrays in base64, which a browser turns into typed arrays at once.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dovetail.core.files import Record

from .pictures import Drawn, Source, Told
from .places import Fabric, Shared, Study

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


class Layers(Told, frozen=True, kw_only=True):
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


class Policy(Record, frozen=True, kw_only=True):
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


class Planned(Record, frozen=True, kw_only=True):
    """A plan, its rivals, and both drawn against backward and forward."""

    title: str
    sentences: tuple[str, ...]
    policies: tuple[Policy, ...]
    buckets: tuple[BucketRow, ...]
    drawn: tuple[Drawn, ...] = ()
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


class Depths(Told, frozen=True, kw_only=True):
    """A plan of partial backpropagation: its last phase."""

    segments: int
    workers: tuple[DepthRow, ...]


class Kinds(Record, frozen=True, kw_only=True):
    """A prediction beside what happened, by kind of work; the first row is the whole iteration."""

    sentence: str
    rows: tuple[tuple[str, float, float], ...]


class Series(Record, frozen=True, kw_only=True):
    """One policy over numbers of workers."""

    name: str
    workers: tuple[int, ...]
    speedup: tuple[float, ...]
    iteration: tuple[float, ...]


class Scaling(Told, frozen=True, kw_only=True):
    series: tuple[Series, ...]


class Sized(Record, frozen=True, kw_only=True):
    bytes: int
    median: float
    low: float
    high: float


class Collective(Record, frozen=True, kw_only=True):
    name: str
    latency: float
    seconds_per_byte: float
    error: float
    samples: tuple[Sized, ...]


class Wires(Told, frozen=True, kw_only=True):
    """A network: what each collective costs."""

    collectives: tuple[Collective, ...]


class Trade(Record, frozen=True, kw_only=True):
    """A plan of devices per layer as a point: how fast against how much device-time."""

    name: str
    family: Family
    iteration: float
    device_time: float
    amplification: float
    free: float | None
    chosen: bool


class Burst(Record, frozen=True, kw_only=True):
    title: str
    sentences: tuple[str, ...]
    devices: int
    points: tuple[Trade, ...]
    layers: tuple[str, ...]
    counts: tuple[int, ...]


class Document(Record, frozen=True, kw_only=True):
    """The whole page. Where a section is empty, `empty` says by what command it is filled."""

    title: str
    files: tuple[str, ...]
    live: bool = False
    """True where a server has more to come."""
    lead: Lead
    timelines: tuple[Drawn, ...] = ()
    compared: Kinds | None = None
    plans: tuple[Planned, ...] = ()
    depths: tuple[Depths, ...] = ()
    profiles: tuple[Layers, ...] = ()
    networks: tuple[Wires, ...] = ()
    scaling: tuple[Scaling, ...] = ()
    bursts: tuple[Burst, ...] = ()
    schedules: tuple[Shared, ...] = ()
    studies: tuple[Study, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    empty: dict[str, str]
    notes: tuple[str, ...] = ()
    series: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Colours for lines, one policy each."""
    colors: dict[str, str]
    """By kind of work."""


def encode(document: Document) -> bytes:
    return msgspec.json.encode(document)

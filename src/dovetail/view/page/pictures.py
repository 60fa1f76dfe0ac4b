"""Timelines made ready for drawing, as the page's data: spans in columns of typed arrays."""

from __future__ import annotations

from typing import Literal

from dovetail.core.files import Record

Source = Literal["predicted", "measured"]


class Look(Record, frozen=True, kw_only=True):
    """How a kind of work is drawn: a colour, and a height as a share of the row that tells it apart without colour."""

    label: str
    color: str
    height: float = 1.0


class Row(Record, frozen=True, kw_only=True):
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


class Drawn(Record, frozen=True, kw_only=True):
    """A timeline made ready for drawing."""

    name: str
    title: str
    """Who made it, what it is of, how long it takes."""
    source: Source
    emulated: bool = False
    duration: float
    origin: float = 0.0
    """Where a live picture's time 0 stands, in seconds of any clock that goes on: it moves from one to the next."""
    looks: tuple[Look, ...]
    names: tuple[str, ...]
    rows: tuple[Row, ...]
    columns: Columns


class Told(Record, frozen=True, kw_only=True):
    """What every section begins with: what it is of, and what to read first."""

    title: str
    sentence: str

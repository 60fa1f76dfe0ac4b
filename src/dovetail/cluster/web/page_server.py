"""The page of a running cluster: GET / is the page, GET /data.json what it shows now.

The coordinator's loop takes a snapshot of its memory, of bounded size; a thread reads the spans that devices have
recorded since and makes the document. One document is made at a time, and at most one in a second: all viewers get it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import mmap
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from dovetail.cluster.coordinator.coordinator import Coordinator
from dovetail.cluster.coordinator.status import Snapshot, snapshot
from dovetail.cluster.executor.recorder import ClockLine, LeaseLine, Line, TaskLine
from dovetail.core.errors import Error

if TYPE_CHECKING:  # imported with the first request: a coordinator must be back quickly after a restart
    from dovetail.view.page.document import Document

PATHS = frozenset(("/", "/data.json"))
"""Paths of the page; where the cluster has a token, browsers may give it as a password for these only."""
ASK = {"WWW-Authenticate": 'Basic realm="dovetail cluster: any name, and its token as the password", charset="UTF-8"'}
EVERY = 1.0
"""Seconds from one document to the next, at least."""
_CLOCK = b'{"type":"clock"'
_SPAN_BYTES = 200
"""Bytes of a line at most, in practice: the first call of `newest` reads so many for each span that it wants."""
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def add_page(app: FastAPI, c: Coordinator) -> None:
    maker = PageMaker(c)

    @app.get("/", include_in_schema=False)
    async def whole() -> Response:
        try:
            return _answer(await maker.html(), "text/html")
        except Error as e:  # not built
            line = f"dovetail: {e}; `dovetail cluster status --watch` shows the same in a terminal\n"
            return _answer(line.encode(), "text/plain", 404)

    @app.get("/data.json", include_in_schema=False)
    async def data() -> Response:
        return _answer(await maker.data(), "application/json")


def _answer(body: bytes, kind: str, status: int = 200) -> Response:
    from dovetail.view.page.server import HEADERS

    return Response(body, status_code=status, media_type=f"{kind}; charset=utf-8", headers=HEADERS)


def password(header: str, token: str) -> bool:
    """Whether an Authorization header is HTTP's Basic one with the token as the password, as browsers send it."""
    kind, _, rest = header.partition(" ")
    try:
        given = base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return False
    return kind.lower() == "basic" and hmac.compare_digest(given, token.encode())


class PageMaker:
    """Makes the documents of a coordinator, for all its viewers."""

    def __init__(self, c: Coordinator) -> None:
        self._c = c
        self._spans: SpanReader | None = None
        self._turn = asyncio.Lock()
        self._made: Document | None = None
        self._at = 0.0

    async def html(self) -> bytes:
        """The whole page; an Error where it is not built."""
        from dovetail.view.page.html import page

        found = await self._document()
        return (await asyncio.to_thread(page, found, connect=True)).encode()

    async def data(self) -> bytes:
        from dovetail.view.page.document import encode

        return encode(await self._document())

    async def _document(self) -> Document:
        async with self._turn:
            if self._made is None or time.monotonic() - self._at >= EVERY:
                self._made = await asyncio.to_thread(self._make, snapshot(self._c))
                self._at = time.monotonic()
            return self._made

    def _make(self, now: Snapshot) -> Document:
        from dovetail.view.page import Contents, document

        from . import cluster_section

        if self._spans is None:
            most = max(8, 2 * cluster_section.MOST_SPANS // max(1, len(now.status["devices"])))
            self._spans = SpanReader(self._c.home.path, most=min(cluster_section.MOST_SPANS, most))
        shown = cluster_section.section(now, self._spans.newest())
        return document(Contents(files=("a running cluster",), clusters=(shown,), only=("cluster",)), live=True)


# -- the newest spans --


@dataclass
class _SpanFile:
    """How far the file of one device has been read."""

    inode: int
    at: int = 0
    """Bytes read so far."""
    offset: float = 0.0
    """Seconds from the file's clock to time.time()."""
    spans: deque[TaskLine | LeaseLine] = field(default_factory=deque)


class SpanReader:
    """The newest spans of every device, at most `most` of each. Used by one thread at a time.

    The first call of `newest` reads the end of each device's file, later calls only what has been written since. A file
    that the recorder has moved away meanwhile is read to its end before the new one. No writer waits for this.
    """

    def __init__(self, home: str | Path, *, most: int) -> None:
        self._folder, self._most = Path(home) / "spans", most
        self._files: dict[str, _SpanFile] = {}
        self._offsets: dict[tuple[str, str], float] = {}  # one for each machine and start, as in `recorder`

    def newest(self) -> list[TaskLine | LeaseLine]:
        """Spans by their start, in seconds of time.time().

        They begin where the spans of every device are still known: those of a busy device reach back less far.
        """
        for path in self._folder.glob("device-*.jsonl"):
            if ".1." not in path.name:
                with contextlib.suppress(OSError, ValueError):
                    self._follow(path)
        kept = [file.spans for file in self._files.values()]
        begin = max((spans[0].start for spans in kept if len(spans) == self._most), default=0.0)
        found = [span for spans in kept for span in spans if span.start >= begin]
        return sorted(found, key=lambda s: (s.start, s.device))

    def _follow(self, path: Path) -> None:
        now, before = path.stat(), path.with_name(f"{path.stem}.1.jsonl")
        known = self._files.get(path.name)
        if known is None:
            known = self._files[path.name] = _SpanFile(now.st_ino, spans=deque(maxlen=self._most))
            if now.st_size < self._most * _SPAN_BYTES and before.exists():
                known.inode = before.stat().st_ino
                self._begin(before, known)
            else:
                self._begin(path, known)
        if known.inode != now.st_ino:
            with contextlib.suppress(OSError):
                self._take(before, known)
            known.inode, known.at = now.st_ino, 0
        self._take(path, known)

    def _begin(self, path: Path, known: _SpanFile) -> None:
        """Finds where the last spans begin, and the clock line that is valid there."""
        size = path.stat().st_size
        start = max(0, size - self._most * _SPAN_BYTES)
        if not start:
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            known.at = data.find(b"\n", start) + 1 or size
            clock = data.rfind(_CLOCK, 0, known.at)
            if clock >= 0:
                self._line(data[clock : data.find(b"\n", clock)], known)

    def _take(self, path: Path, known: _SpanFile) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != known.inode:
                return  # moved away meanwhile: the next call reads it
            file.seek(known.at)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            self._line(line, known)
        known.at += whole

    def _line(self, data: bytes, known: _SpanFile) -> None:
        try:
            line = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # its writer was killed in the middle of it
        if isinstance(line, ClockLine):
            known.offset = self._offsets.setdefault((line.node, line.boot), line.offset)
        elif line.stop >= line.start and line.job.isdecimal():
            start, stop = line.start + known.offset, line.stop + known.offset
            known.spans.append(msgspec.structs.replace(line, start=start, stop=stop))

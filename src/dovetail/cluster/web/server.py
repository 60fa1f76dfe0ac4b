"""The page of a running cluster: GET / is the page, GET /data.json what it shows now.

The coordinator's loop gives a snapshot from its memory, of bounded size; a thread reads what devices have recorded
since and makes the document. One is made at a time, and at most one in a second however many look: they get the same.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import time
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import Response

from dovetail.cluster.coordinator.coordinator import Coordinator
from dovetail.cluster.coordinator.snapshot import Snapshot, glimpse
from dovetail.core.errors import Error

from .tail import Tail

if TYPE_CHECKING:  # imported with the first look: a coordinator should be back quickly
    from dovetail.view.page.document import Document

PATHS = frozenset(("/", "/data.json"))
"""What a browser asks for; where there is a token it may be given as a password."""
ASK = {"WWW-Authenticate": 'Basic realm="dovetail cluster: any name, and its token as the password", charset="UTF-8"'}
EVERY = 1.0
"""Seconds from one document to the next, at least."""


def add_page(app: FastAPI, c: Coordinator) -> None:
    pager = Pager(c)

    @app.get("/", include_in_schema=False)
    async def whole() -> Response:
        try:
            return _answer(await pager.html(), "text/html")
        except Error as e:  # not built
            told = f"dovetail: {e}; `dovetail cluster status --watch` shows the same in a terminal\n"
            return _answer(told.encode(), "text/plain", 404)

    @app.get("/data.json", include_in_schema=False)
    async def data() -> Response:
        return _answer(await pager.data(), "application/json")


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


class Pager:
    """Makes documents of a coordinator, for everybody who looks."""

    def __init__(self, c: Coordinator) -> None:
        self._c = c
        self._tail: Tail | None = None
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
                self._made = await asyncio.to_thread(self._make, glimpse(self._c))
                self._at = time.monotonic()
            return self._made

    def _make(self, now: Snapshot) -> Document:
        from dovetail.view.page import Contents, document

        from . import page

        if self._tail is None:
            most = max(8, 2 * page.MOST_SPANS // max(1, len(now.status["devices"])))
            self._tail = Tail(self._c.home.path, most=min(page.MOST_SPANS, most))
        shown = page.section(now, self._tail.look())
        return document(Contents(files=("a running cluster",), clusters=(shown,), only=("cluster",)), live=True)

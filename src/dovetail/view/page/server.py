"""The page on this machine's loopback address: nothing else may connect, and only requests that name it are answered.

A web site that a user visits could point its own name at 127.0.0.1 and read what is served there; its requests carry
its name in the Host header, and are refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dovetail.core.errors import Error

from .build import document
from .contents import Source
from .document import encode
from .html import page

ADDRESS = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer, whoever serves the page."""


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, source: Source, port: int) -> None:
        self.source = source
        self.lock = threading.Lock()  # a page is built once at a time, however many ask
        self.built: bytes | None = None
        super().__init__((ADDRESS, port), PageHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away before its answer is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def html(self) -> bytes:
        with self.lock:
            if self.built is None or self.source.live:
                made = document(self.source.contents(), live=self.source.live)
                self.built = page(made, connect=self.source.live).encode("utf-8")
            return self.built

    def data(self) -> bytes:
        with self.lock:
            return encode(document(self.source.contents(), live=self.source.live))


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            self._answer(403, b"expected a request to this machine by its loopback address\n", "text/plain")
            return
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                self._answer(200, self.server.html(), "text/html")
            elif path == "/data.json" and self.server.source.live:
                self._answer(200, self.server.data(), "application/json")
            else:
                self._answer(404, b"there is nothing here\n", "text/plain")
        except Error as e:
            self._answer(500, f"dovetail: {e}\n".encode(), "text/plain")

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the terminal belongs to the command that serves."""


@contextmanager
def serving(source: Source, *, port: int = 0) -> Iterator[PageServer]:
    """The page of a source, served from a thread until the block ends; port 0 takes a free one."""
    try:
        server = PageServer(source, port)
    except OSError as e:
        raise Error(f"port {port}: cannot be used: {(e.strerror or str(e)).lower()}") from None
    with server:
        server.html()  # errors in the contents are raised here, and not shown to a browser
        thread = threading.Thread(target=server.serve_forever, name="dovetail-page", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

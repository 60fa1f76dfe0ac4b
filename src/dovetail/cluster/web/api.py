"""The HTTP API: every verb of the command line. A wrong request gets a 4xx with one line.

Of a request, only a job's number reaches a file's path. Web pages in a browser on the same machine cannot use the API:
requests that name another host (DNS rebinding) or come from another origin are refused, and no CORS header is sent.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from dovetail.cluster.coordinator import decide, job_files
from dovetail.cluster.coordinator import status as reports
from dovetail.cluster.coordinator.coordinator import Coordinator
from dovetail.cluster.coordinator.job_state import ActiveJob
from dovetail.cluster.coordinator.job_store import STATES
from dovetail.cluster.job.submission import MOST_BODY, Submission, decode, explain
from dovetail.core.errors import Error

from . import page_server

LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
Number = Annotated[int, Path(ge=1, le=2**62, description="The job's number.")]


class Down(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /down."""

    grace: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0


def answer(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")


def error_answer(line: str, status: int) -> Response:
    return answer({"detail": " ".join(line.split())}, status)


def make_app(c: Coordinator, *, token: str = "") -> FastAPI:
    """The API of a coordinator, in whose event loop it runs."""
    app = FastAPI(title="dovetail cluster", docs_url=None, redoc_url=None)
    _guard(app, token)
    _errors(app)

    def known(number: int) -> None:
        if number not in c.jobs:
            try:
                c.store.job(number)
            except Error as e:
                raise HTTPException(404, str(e)) from None

    body = {"requestBody": {"content": {"application/json": {"schema": _schema()}}, "required": True}}

    @app.post("/jobs", openapi_extra=body)
    async def submit(request: Request) -> Response:
        """Submit a job; it is on disk when this answers."""
        submission = decode(await _body(request))
        return answer(reports.one_job(c, c.submit(submission).id), 201)

    @app.get("/jobs")
    async def jobs(
        state: Annotated[str, Query(max_length=16)] = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        before: Annotated[int, Query(ge=0, le=2**62)] = 0,
    ) -> Response:
        """Jobs as stored, newest first."""
        if state and state not in STATES:
            raise HTTPException(400, f"state: expected one of {', '.join(STATES)}")
        wanted = [s for s in STATES if not state or s == state]
        rows = c.store.jobs(wanted, limit=limit, before=before)
        return answer(
            {"jobs": [reports.active_job(c, c.jobs[r.id]) if r.id in c.jobs else reports.stored_job(r) for r in rows]}
        )

    @app.get("/jobs/{number}")
    async def job(number: Number) -> Response:
        known(number)
        return answer(reports.one_job(c, number))

    @app.get("/jobs/{number}/why")
    async def why(number: Number) -> Response:
        """The reasons for which the job waits, or is slow."""
        known(number)
        found = c.jobs.get(number) or c.store.job(number)
        if isinstance(found, ActiveJob):
            lines = reports.reasons(c, found, decide.queue(c))
        else:
            lines = [f"{found.state}: {found.reason}" if found.reason else found.state]
        return answer({"job": number, "name": found.name, "state": found.state, "why": lines, "policy": c.policy.name})

    @app.get("/jobs/{number}/logs")
    async def logs(
        number: Number,
        offset: Annotated[int, Query(ge=-1, le=2**62)] = -1,
        limit: Annotated[int, Query(ge=16, le=1 << 20)] = 65536,
    ) -> Response:
        """At most `limit` bytes of the job's log, and the offset after them; offset -1: the last `limit` bytes."""
        known(number)
        text, after = job_files.read_log(c.home, number, offset=offset, limit=limit)
        return answer({"job": number, "text": text, "offset": after, "state": reports.one_job(c, number)["state"]})

    @app.post("/jobs/{number}/{verb}")
    async def change(number: Number, verb: str) -> Response:
        """cancel, pause or resume; on disk when this answers."""
        verbs: dict[str, Callable[[int], None]] = {"cancel": c.cancel, "pause": c.pause, "resume": c.resume}
        if verb not in verbs:
            raise HTTPException(404, "there is no such verb")
        known(number)
        try:
            verbs[verb](number)
        except Error as e:
            raise HTTPException(409, str(e)) from None
        return answer(reports.one_job(c, number))

    @app.get("/status")
    async def status(jobs: bool = True) -> Response:
        return answer(reports.status(c, jobs=jobs))

    @app.get("/timeline")
    async def timeline(limit: Annotated[int, Query(ge=1, le=100_000)] = 10_000) -> Response:
        """The latest tasks, by device."""
        return answer(await asyncio.to_thread(_timeline, c, limit))

    @app.post("/down")
    async def down(request: Request) -> Response:
        """Ends the cluster; jobs write checkpoints within `grace` seconds."""
        data = await _body(request)
        wanted = msgspec.json.decode(data, type=Down) if data else Down()
        await c.down(wanted.grace)
        return answer({"down": True})

    page_server.add_page(app, c)
    return app


def _timeline(c: Coordinator, limit: int) -> Any:
    from dovetail.cluster.executor.recorder import timeline

    found = timeline(c.home.path)
    spans = found.spans[-limit:]
    return {
        "kind": found.kind,
        "version": found.version,
        **msgspec.to_builtins(msgspec.structs.replace(found, spans=spans)),
    }


def _schema() -> dict[str, Any]:
    _, parts = msgspec.json.schema_components([Submission], ref_template="#/components/schemas/{name}")
    found: dict[str, Any] = msgspec.json.schema(Submission)
    found["$defs"] = parts
    return found


async def _body(request: Request) -> bytes:
    """The body, if it is JSON and no longer than the longest valid one."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page cannot send this without a preflight request
        raise HTTPException(415, "expected Content-Type: application/json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY:
            raise HTTPException(413, f"expected a body of at most {MOST_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


def _guard(app: FastAPI, token: str) -> None:
    wanted = f"Bearer {token}".encode()

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if token:
            given = request.headers.get("authorization", "")
            browser = request.method == "GET" and request.url.path in page_server.PATHS
            known = hmac.compare_digest(given.encode("latin-1", "replace"), wanted)
            if not known and not (browser and page_server.password(given, token)):
                refused = error_answer("expected the cluster's token: Authorization: Bearer TOKEN", 401)
                refused.headers.update(page_server.ASK if browser else {})
                return refused
        elif _host(request.headers.get("host", "")) not in LOOPBACK_NAMES:
            return error_answer("Host: expected this machine's loopback", 403)
        origin = request.headers.get("origin")
        if origin is not None and urlsplit_host(origin) != request.headers.get("host", ""):
            return error_answer("Origin: requests of other web pages are refused", 403)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return error_answer("Sec-Fetch-Site: requests of other web pages are refused", 403)
        return await call_next(request)


def _host(header: str) -> str:
    """The name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] or header if header.count(":") == 1 else header


def urlsplit_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, e: Exception) -> Response:
        assert isinstance(e, RequestValidationError)
        first = e.errors()[0]
        return error_answer(f"{'.'.join(str(p) for p in first['loc'][1:])}: {first['msg']}", 422)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        return error_answer(str(e.detail), e.status_code)

    @app.exception_handler(Error)
    async def wrong_input(request: Request, e: Exception) -> Response:
        return error_answer(str(e), 400)

    @app.exception_handler(msgspec.MsgspecError)
    async def unreadable(request: Request, e: Exception) -> Response:
        return error_answer(explain(e), 400)

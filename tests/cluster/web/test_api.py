"""The HTTP API: every verb works, every wrong request gets a 4xx with one line, other web pages are refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from dovetail.cluster.job.submission import MOST_TEXT, Submission
from dovetail.cluster.transport import messages as m
from dovetail.cluster.web.api import make_app
from tests.cluster.coordinator.stage import HANG, Stage, patience, stage

TOKEN = "0123456789abcdef"


def play(
    tmp_path: Path, scene: Callable[[Stage, httpx.AsyncClient], Awaitable[None]], *, token: str = "", **options: Any
) -> None:
    async def whole() -> None:
        async with stage(tmp_path, **options) as s:
            transport = httpx.ASGITransport(make_app(s.c, token=token))  # an exception in it is raised here
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9") as client:
                await asyncio.wait_for(scene(s, client), 2 * HANG)

    with patience():
        asyncio.run(whole())


def test_a_job_is_submitted_shown_paused_resumed_and_cancelled(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        answer = await http.post("/jobs", json={"text": "job", "name": "one", "options": {"steps": 10}})
        assert answer.status_code == 201
        job = answer.json()["job"]
        assert (answer.json()["state"], answer.json()["name"]) == ("queued", "one")
        await s.running(job)
        s.aggregator(job).progress(4, task_seconds=(0.1,), iteration_seconds=0.2)
        await s.until(lambda: s.live(job).iteration == 4)
        found = (await http.get(f"/jobs/{job}")).json()
        assert (found["state"], found["iteration"], found["iterations"], found["slowdown"]) == ("running", 4, 10, 1.0)
        assert "alone on device" in (await http.get(f"/jobs/{job}/why")).json()["why"][0]
        status = (await http.get("/status")).json()
        assert [d["residents"] for d in status["devices"]].count([job]) == 1
        assert status["counts"] == {"running": 1} and status["jobs"][0]["job"] == job
        assert (await http.post(f"/jobs/{job}/pause")).json()["state"] == "paused"
        await s.until(lambda: not s.live(job).process)
        assert (await http.get(f"/jobs/{job}/why")).json()["why"][0].startswith("paused")
        assert (await http.post(f"/jobs/{job}/pause")).status_code == 409
        assert (await http.post(f"/jobs/{job}/resume")).json()["state"] == "queued"
        await s.running(job)
        assert (await http.post(f"/jobs/{job}/cancel")).json()["state"] == "cancelled"
        assert (await http.post(f"/jobs/{job}/cancel")).status_code == 409
        assert (await http.get(f"/jobs/{job}/why")).json()["why"] == ["cancelled"]
        assert [j["job"] for j in (await http.get("/jobs?state=cancelled")).json()["jobs"]] == [job]
        assert [j["job"] for j in (await http.get("/status")).json()["ended"]] == [job]

    play(tmp_path, scene)


def test_logs_are_read_in_pieces_that_never_cut_a_character(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        job = s.submit()
        assert (await http.get(f"/jobs/{job}/logs")).json()["text"] == ""
        await s.until(lambda: s.home.job(job).is_dir())
        text = "ä€𝄞 line\n" * 50
        (s.home.job(job) / "log.txt").write_text(text, encoding="utf-8")
        got, offset = "", 0
        while piece := (await http.get(f"/jobs/{job}/logs?offset={offset}&limit=17")).json():
            if not piece["text"]:
                break
            got, offset = got + piece["text"], piece["offset"]
        assert got == text
        tail = (await http.get(f"/jobs/{job}/logs?limit=100")).json()
        assert text.endswith(tail["text"][2:]) and tail["offset"] == len(text.encode())

    play(tmp_path, scene)


def test_the_timeline_is_read_from_what_executors_recorded(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        from dovetail.cluster.executor.recorder import DeviceRecorder

        recorder = DeviceRecorder(s.home.path, 1, node="n", emulated=True)
        for i in range(5):
            recorder.task("1", i, 0, 10.0 + i, 10.5 + i, 0.0)
        recorder.close()
        found = (await http.get("/timeline?limit=3")).json()
        assert found["kind"] == "timeline" and found["emulated"] is True
        assert [span["name"] for span in found["spans"]] == [f"1 iteration {i} worker 0" for i in (2, 3, 4)]

    play(tmp_path, scene)


WRONG_BODIES: list[tuple[Any, str]] = [
    (b"", ""),
    (b"{", ""),
    (b"[]", ""),
    (b"\xff\xfe", ""),
    (b"[" * 100_000, ""),
    ({}, "text"),
    ({"text": 1}, "text"),
    ({"text": ""}, "text"),
    ({"text": "a\0b"}, "text"),
    ({"text": "x" * (MOST_TEXT + 1)}, "text"),
    ({"text": "€" * (MOST_TEXT // 2)}, "text"),
    ({"text": "x", "name": "../../etc"}, "name"),
    ({"text": "x", "name": "a\nb"}, "name"),
    ({"text": "x", "name": ""}, "name"),
    ({"text": "x", "unknown": 1}, "unknown"),
    ({"text": "x", "options": {"steps": 0}}, "options.steps"),
    ({"text": "x", "options": {"steps": 1e99}}, "options.steps"),
    ({"text": "x", "options": {"workers": 5000}}, "options.workers"),
    ({"text": "x", "options": {"spb": "deep"}}, "options.spb"),
    ({"text": "x", "share": "mine"}, "share"),
    ({"text": "x", "bound": -1}, "bound"),
    ({"text": "x", "kind": "gang"}, "gang"),
    ({"text": "x", "gang": 2}, "gang"),
    ({"text": "x", "arguments": ["a"]}, "arguments"),
    ({"text": "x", "kind": "gang", "gang": 2, "arguments": ["a"] * 300}, "arguments"),
    ({"text": "x", "request": "a b"}, "request"),
    (b'{"text": "x", "bound": NaN}', ""),
    (b'{"text": "x", "bound": 1e999}', "bound"),
    (b'{"text": "\\ud800"}', ""),
]
WRONG_PATHS = [
    ("GET", "/jobs/0", 422), ("GET", "/jobs/-1", 422), ("GET", "/jobs/x", 422), ("GET", f"/jobs/{10**20}", 422),
    ("GET", "/jobs/7", 404), ("GET", "/jobs/7/why", 404), ("GET", "/jobs/7/logs", 404), ("POST", "/jobs/7/cancel", 404),
    ("POST", "/jobs/1/explode", 404), ("GET", "/jobs/..%2f..%2fkey", 404), ("GET", "/nothing", 404),
    ("DELETE", "/jobs/1", 405), ("GET", "/jobs?state=odd", 400), ("GET", "/jobs?limit=0", 422),
    ("GET", "/jobs?limit=99999999", 422), ("GET", "/jobs/1/logs?offset=-5", 422), ("GET", "/jobs/1/logs?limit=1", 422),
    ("GET", "/timeline?limit=x", 422), ("GET", "/status?jobs=perhaps", 422),
]  # fmt: skip


def test_every_wrong_request_gets_one_line(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        kind = {"Content-Type": "application/json"}
        for body, field in WRONG_BODIES:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await http.post("/jobs", content=data, headers=kind)
            line = answer.json()["detail"]
            assert answer.status_code == 400 and field in line and "\n" not in line, (body, line)
        too_much = await http.post("/jobs", content=b'{"text": "' + b"x" * (MOST_TEXT * 8) + b'"}', headers=kind)
        assert too_much.status_code == 413
        assert (await http.post("/down", content=b'{"grace": "long"}', headers=kind)).status_code == 400
        s.submit()
        for method, path, code in WRONG_PATHS:
            answer = await http.request(method, path)
            assert answer.status_code == code and "\n" not in answer.json()["detail"], (method, path, answer.text)
        assert s.store.counts() in ({"queued": 1}, {"preparing": 1}, {"running": 1})

    play(tmp_path, scene)


def test_fuzzed_requests_never_raise_in_the_application(tmp_path: Path) -> None:
    """An exception in the application would be raised here; a 5xx fails too."""

    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        spread = random.Random(5)
        values: list[Any] = [
            None,
            True,
            0,
            -1,
            2**64,
            1e308,
            "",
            "x",
            "\0",
            "../..",
            [],
            {},
            ["a"],
            {"steps": 3},
            "gang",
        ]
        fields = list(Submission.__struct_fields__)
        for _ in range(300):
            body = {spread.choice([*fields, "odd"]): spread.choice(values) for _ in range(spread.randrange(5))}
            if spread.random() < 0.5:
                body |= {"text": "x"}
            path = spread.choice(["/jobs", "/jobs/1/cancel", "/jobs/1/pause", "/jobs/1/resume", "/jobs/2/x", "/jobs/1"])
            answer = await http.request(spread.choice(["POST", "POST", "GET", "PUT"]), path, json=body)
            assert answer.status_code < 500, (path, body, answer.text)

    play(tmp_path, scene)


def test_requests_of_other_web_pages_and_host_names_are_refused(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        for headers in (
            {"Host": "evil.example"}, {"Host": "evil.example:9"}, {"Host": ""}, {"Origin": "http://evil.example"},
            {"Origin": "null"}, {"Origin": "http://127.0.0.1:8"}, {"Sec-Fetch-Site": "cross-site"},
            {"Origin": "http://[bad"},
        ):  # fmt: skip
            answer = await http.get("/status", headers=headers)
            assert answer.status_code == 403, headers
            assert "access-control-allow-origin" not in answer.headers
        for host in ("localhost", "localhost:9", "127.0.0.1:1", "[::1]:9", "[::1]"):
            assert (await http.get("/status", headers={"Host": host})).status_code == 200
        same = {"Origin": "http://127.0.0.1:9", "Sec-Fetch-Site": "same-origin"}
        assert (await http.get("/status", headers=same)).status_code == 200
        # What a form or a simple fetch of another web page could send.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = await http.post("/jobs", content=b'{"text": "x"}', headers={"Content-Type": kind})
            assert answer.status_code == 415
        assert s.store.counts() == {}

    play(tmp_path, scene)


def test_with_a_token_every_request_needs_it(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        for path in ("/status", "/jobs", "/jobs/1/logs", "/openapi.json", "/nothing"):
            for given in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": TOKEN},
                {"Authorization": "Bearer é"},
            ):
                headers = {k.encode(): v.encode("utf-8") for k, v in given.items()}
                assert (await http.get(path, headers=headers)).status_code == 401, (path, given)
        assert (await http.post("/jobs", json={"text": "x"})).status_code == 401
        right = {"Authorization": f"Bearer {TOKEN}", "Host": "anywhere"}
        assert (await http.get("/status", headers=right)).status_code == 200

    play(tmp_path, scene, token=TOKEN)


def test_status_with_a_thousand_queued_jobs_takes_a_few_queries(tmp_path: Path) -> None:
    """A query for each job would show as a thousand of them. How long it takes is the benchmark's matter."""

    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        s.store._db.execute("PRAGMA synchronous=OFF")  # only to get a thousand quickly
        for i in range(1000):
            s.submit(name=f"job-{i}")
        await s.until(lambda: sum(j.connected for j in s.c.jobs.values()) == 16 + 4)
        await asyncio.sleep(0.1)
        queries: list[str] = []
        s.store._db.set_trace_callback(queries.append)
        answer = await http.get("/status")
        assert len(answer.json()["jobs"]) == 1000
        assert len(queries) <= 4, queries
        assert (await http.get("/status?jobs=false")).json().get("jobs") is None

    play(tmp_path, scene)


def test_down_answers_and_stops_the_engine(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        job = s.submit()
        await s.running(job)
        aggregator = s.aggregator(job)
        assert (await http.post("/down", json={"grace": 5})).json() == {"down": True}
        assert s.engine.stopped and aggregator.received(m.StopJob)

    play(tmp_path, scene)

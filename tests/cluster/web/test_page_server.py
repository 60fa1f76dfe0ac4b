"""The page of a running cluster: the newest spans, a document of bounded size, and who may see it."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail.cluster.coordinator import status
from dovetail.cluster.coordinator.status import Snapshot
from dovetail.cluster.executor.recorder import DeviceRecorder, TaskLine, recorded_tasks
from dovetail.cluster.web import page_server
from dovetail.cluster.web.page_server import SpanReader
from dovetail.view.page import html
from tests.cluster.coordinator.stage import Stage

from .test_api import TOKEN, play

# -- the newest spans --


def test_a_reader_gives_what_a_whole_reading_gives_however_files_grow_and_rotate(tmp_path: Path) -> None:
    """Read after every few tasks while files rotate at a small limit, a line is cut short and an executor is started
    again: no span is missing, none comes twice."""
    spread, most, written = random.Random(3), 40, list[tuple[int, int]]()
    recorders = [DeviceRecorder(tmp_path, d, node="n", emulated=True, limit=3000) for d in (0, 1)]
    reader = SpanReader(tmp_path, most=most)
    for turn in range(60):
        for device, r in enumerate(recorders):
            for _ in range(spread.randrange(6)):
                at = 100.0 + 0.5 * len(written)
                r.task(str(turn % 3 + 1), len(written), 0, at, at + 0.5, 0.0)
                written.append((device, len(written)))
            r.flush()
        if turn == 20:
            with recorders[0].path.open("ab") as torn:
                torn.write(b'{"type":"task","job":"1","itera')
            recorders[0].close()
            recorders[0] = DeviceRecorder(tmp_path, 0, node="n", emulated=True, limit=3000)
        if spread.random() < 0.7:
            found = [(r.device, r.iteration) for r in reader.newest() if isinstance(r, TaskLine)]
            assert found == written[found[0][1] :], "all there is since the first"
            assert len(found) >= min(most, len(written)), "one device's newest at least"
            assert all(sum(d == device for d, _ in found) <= most for device in (0, 1))
    late = SpanReader(tmp_path, most=10).newest()
    assert late and late == [r for r in recorded_tasks(tmp_path) if r.start >= late[0].start]
    for r in recorders:
        r.close()


def test_the_clock_is_found_far_before_the_last_spans(tmp_path: Path) -> None:
    recorder = DeviceRecorder(tmp_path, 0, node="n", emulated=False)
    for i in range(3000):
        recorder.task("1", i, 0, float(i), i + 0.5, 0.0)
    recorder.close()
    found = SpanReader(tmp_path, most=5).newest()
    assert [r.iteration for r in found if isinstance(r, TaskLine)] == [2995, 2996, 2997, 2998, 2999]
    assert found == recorded_tasks(tmp_path)[-5:], "in seconds of time.time()"


# -- who may see it, and at what cost --


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}


def test_a_browser_gives_the_token_as_a_password_and_only_for_the_page(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        for path in ("/", "/data.json"):
            for headers in ({}, basic("wrong"), basic(""), {"Authorization": "Basic ???"}, {"Authorization": "Basic"}):
                refused = await http.get(path, headers=headers)
                assert refused.status_code == 401 and "token as the password" in refused.headers["www-authenticate"]
                assert refused.json()["detail"].startswith("expected the cluster's token")
        for headers in (basic(TOKEN), {"Authorization": f"Bearer {TOKEN}"}):
            assert (await http.get("/data.json", headers=headers | {"Host": "10.0.0.5:8800"})).status_code == 200
        for path in ("/status", "/jobs"):
            assert (await http.get(path, headers=basic(TOKEN))).status_code == 401
        assert (await http.post("/jobs", json={"text": "x"}, headers=basic(TOKEN))).status_code == 401

    play(tmp_path, scene, token=TOKEN)


def test_requests_of_other_hosts_and_web_pages_see_no_page(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        for path in ("/", "/data.json"):
            for headers in ({"Host": "10.0.0.5:8800"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                assert (await http.get(path, headers=headers)).status_code == 403
        answer = await http.get("/data.json")
        assert answer.status_code == 200 and answer.headers["x-frame-options"] == "DENY"

    play(tmp_path, scene)


def test_a_page_that_is_not_built_answers_with_the_command_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "BUNDLE", tmp_path / "nowhere")

    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        answer = await http.get("/")
        assert answer.status_code == 404 and answer.headers["content-type"].startswith("text/plain")
        assert answer.text.count("\n") == 1 and "make page" in answer.text and "dovetail cluster status" in answer.text

    play(tmp_path, scene)


def test_for_many_viewers_one_document_is_made_and_it_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(c: Any) -> Snapshot:
        made.append(1)
        return status.snapshot(c)

    monkeypatch.setattr(page_server, "snapshot", counted)
    monkeypatch.setattr(page_server, "EVERY", 1e9)

    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        s.store._db.execute("PRAGMA synchronous=OFF")  # only to get many quickly
        for i in range(300):
            s.submit(name=f"job-{i}")
        await s.until(lambda: sum(bool(j.devices) for j in s.c.jobs.values()) >= 4)
        answers = await asyncio.gather(*(http.get("/data.json") for _ in range(20)))
        assert len({a.content for a in answers}) == 1 and len(made) == 1
        shown = json.loads(answers[0].content)["schedules"][0]
        assert len(shown["live"]) == status.MOST_JOBS and len(answers[0].content) < 200_000
        assert shown["live"][0]["state"] == "running" and "wait" in shown["sentence"]
        assert all(j["why"] for j in shown["live"])

    play(tmp_path, scene)


def test_a_coordinator_starts_without_importing_what_only_its_page_needs() -> None:
    code = "import dovetail.cluster.web.api, sys; sys.exit(any(m.startswith('dovetail.view') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0

"""What a cluster's page is made of: the newest spans, a bounded glimpse, words for people; and who may see it."""

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
import numpy as np
import pytest

from dovetail.cluster.coordinator import snapshot
from dovetail.cluster.coordinator.snapshot import Doing, Snapshot
from dovetail.cluster.executor.recorder import Held, Ran, Recorder, ran
from dovetail.cluster.web import page, server
from dovetail.cluster.web.tail import Tail
from dovetail.view.page import html
from dovetail.view.page.places import Shared
from tests.cluster.coordinator.stage import Stage

from .test_api import TOKEN, play

# -- the newest spans --


def test_a_tail_gives_what_a_whole_reading_gives_however_files_grow_and_rotate(tmp_path: Path) -> None:
    """Looked at after every few tasks while files are moved away at a small limit, a line is torn and an executor
    comes back: nothing is missing that should be there, nothing comes twice."""
    spread, most, written = random.Random(3), 40, list[tuple[int, int]]()
    recorders = [Recorder(tmp_path, d, node="n", emulated=True, limit=3000) for d in (0, 1)]
    tail = Tail(tmp_path, most=most)
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
            recorders[0] = Recorder(tmp_path, 0, node="n", emulated=True, limit=3000)
        if spread.random() < 0.7:
            found = [(r.device, r.iteration) for r in tail.look() if isinstance(r, Ran)]
            assert found == written[found[0][1] :], "all there is since the first"
            assert len(found) >= min(most, len(written)), "one device's newest at least"
            assert all(sum(d == device for d, _ in found) <= most for device in (0, 1))
    late = Tail(tmp_path, most=10).look()
    assert late and late == [r for r in ran(tmp_path) if r.start >= late[0].start]
    for r in recorders:
        r.close()


def test_the_clock_is_found_far_before_the_last_spans(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, node="n", emulated=False)
    for i in range(3000):
        recorder.task("1", i, 0, float(i), i + 0.5, 0.0)
    recorder.close()
    found = Tail(tmp_path, most=5).look()
    assert [r.iteration for r in found if isinstance(r, Ran)] == [2995, 2996, 2997, 2998, 2999]
    assert found == ran(tmp_path)[-5:], "in the calendar's seconds"


# -- words and pictures --


def a_job(number: int, **more: Any) -> dict[str, Any]:
    known = {
        "job": number, "name": "net", "kind": "tasks", "share": "normal", "state": "running", "reason": "",
        "iteration": 3, "iterations": 10, "submitted": 5.0, "devices": [0], "iteration_seconds": 0.1,
        "slowdown": None, "bound": None,
    }  # fmt: skip
    return known | more


def a_status(jobs: list[dict[str, Any]], *, devices: int = 2, ended: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for j in (*jobs, *ended):
        counts[j["state"]] = counts.get(j["state"], 0) + 1
    machines = [
        {"device": d, "ready": True, "residents": [1], "running": 0, "utilization": 0.5, "bytes": 1, "bytes_total": 2}
        for d in range(devices)
    ]
    return {
        "policy": "jigsaw", "emulated": True, "devices": machines, "counts": counts, "jobs": jobs, "ended": list(ended)
    }  # fmt: skip


def task(job: int, device: int, start: float, stop: float, iteration: int = 0) -> Ran:
    return Ran(job=str(job), iteration=iteration, worker=0, device=device, start=start, stop=stop)


def cells(shown: Shared) -> list[tuple[str, str, float, float]]:
    def column(name: str, dtype: str) -> list[Any]:
        return np.frombuffer(base64.b64decode(getattr(shown.drawn.columns, name)), dtype=dtype).tolist()

    start, long, name = column("start", "<f8"), column("duration", "<f4"), column("name", "<u4")
    return [
        (row.label, shown.drawn.names[name[i]], round(start[i], 4), round(start[i] + long[i], 4))
        for row in shown.drawn.rows
        for i in range(row.first, row.stop)
    ]


def test_an_unfinished_task_is_drawn_as_far_as_it_is_known_and_never_over_another() -> None:
    doing = [Doing(1, 0, 1003.0, 1004.0), Doing(2, 1, 1000.5, 1002.5)]
    spans = [task(1, 0, 1000.0, 1002.0), task(2, 1, 1000.5, 1002.0, 7)]
    shown = page.section(Snapshot(a_status([a_job(1), a_job(2)]), {}, doing), spans)
    assert cells(shown) == [
        ("device 0", "job 1 (net), iteration 0, worker 0", 0.0, 2.0),
        ("device 0", "job 1 (net), running", 3.0, 4.0),
        ("device 1", "job 2 (net), iteration 7, worker 0", 0.5, 2.0),
        ("device 1", "job 2 (net), running", 2.0, 2.5),
    ]
    assert shown.drawn.origin == 1000.0 and shown.drawn.duration == 4.0


def test_a_gang_holds_its_device_and_fillers_get_a_row_beside_it() -> None:
    jobs = [a_job(1, kind="gang"), a_job(2)]
    doing = [Doing(1, 0, 990.0, 1010.0, gang=True)]
    held = Held(job="2", device=0, start=1000.0, stop=1005.0)
    shown = page.section(Snapshot(a_status(jobs), {}, doing), [task(2, 0, 1000.0, 1001.0), held])
    assert [c[:2] for c in cells(shown)] == [
        ("device 0", "job 2 (net), iteration 0, worker 0"),
        ("device 0 (2)", "job 1 (net), has the device"),
    ]


def test_pictures_are_bounded_and_devices_without_work_keep_their_row() -> None:
    spans = [task(1 + i % 300, i % 2, i * 0.1, i * 0.1 + 0.1, i) for i in range(20_000)]
    shown = page.section(Snapshot(a_status([a_job(1)], devices=3), {}), spans)
    assert shown.drawn.columns.count == page.MOST_SPANS
    assert len(shown.drawn.looks) <= 61 and shown.drawn.looks[-1].label == "240 smaller jobs"
    assert [row.label for row in shown.drawn.rows] == ["device 0", "device 1", "device 2"]
    assert page.section(Snapshot(a_status([a_job(1)]), {}), [task(1, 0, 1.0, 2.0), task(1, 0, 9000.0, 9001.0)]).drawn \
        .columns.count == 1  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "bound", "share", "told"),
    [
        (0.012, 0.05, "foreground", "promised to be slowed by at most 5.0 % by others: 1.2 % measured, kept"),
        (0.07, 0.05, "foreground", "promised to be slowed by at most 5.0 % by others: 7.0 % measured, broken"),
        (None, 0.05, "foreground", "promised to be slowed by at most 5.0 % by others: not measured yet"),
        (0.3, None, "normal", "30.0 % slower than alone"),
        (None, None, "normal", ""),
    ],
)
def test_a_promise_is_told_beside_what_was_measured(slow: float | None, bound: float, share: str, told: str) -> None:
    jobs = [a_job(1, slowdown=slow, bound=bound, share=share)]
    shown = page.section(Snapshot(a_status(jobs), {}), [])
    assert shown.live[0].promise == told
    assert any(told and told in line for line in shown.more) == (bound is not None)


def test_the_first_sentence_counts_who_runs_waits_and_ended() -> None:
    def first(jobs: list[dict[str, Any]], *ended: dict[str, Any]) -> str:
        return page.section(Snapshot(a_status(jobs, ended=ended), {}), []).sentence

    queued, gone = a_job(2, state="queued", devices=[]), a_job(3, state="failed", reason="it raised")
    assert first([a_job(1), queued], gone) == ("1 job runs on 2 emulated devices, 1 waits and 1 has ended (1 failed).")
    assert first([]) == "Nothing has been submitted to this cluster yet. 2 emulated devices are ready."
    shown = page.section(Snapshot(a_status([queued], ended=(gone,)), {2: ["memory: too little", "more"]}), [])
    assert shown.live[0].why == ("memory: too little", "more") and shown.live[1].why == ("it raised",)
    assert shown.more == ("Job 2 (net) waits (memory): too little.",)
    assert shown.missing and shown.sentence.startswith("No job runs on 2 emulated devices, 1 waits and")


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


def test_strangers_see_no_page(tmp_path: Path) -> None:
    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        for path in ("/", "/data.json"):
            for headers in ({"Host": "10.0.0.5:8800"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                assert (await http.get(path, headers=headers)).status_code == 403
        answer = await http.get("/data.json")
        assert answer.status_code == 200 and answer.headers["x-frame-options"] == "DENY"

    play(tmp_path, scene)


def test_a_page_that_is_not_built_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "BUNDLE", tmp_path / "nowhere")

    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        answer = await http.get("/")
        assert answer.status_code == 404 and answer.headers["content-type"].startswith("text/plain")
        assert answer.text.count("\n") == 1 and "make page" in answer.text and "dovetail cluster status" in answer.text

    play(tmp_path, scene)


def test_however_many_look_one_document_is_made_and_it_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(c: Any) -> Snapshot:
        made.append(1)
        return snapshot.glimpse(c)

    monkeypatch.setattr(server, "glimpse", counted)
    monkeypatch.setattr(server, "EVERY", 1e9)

    async def scene(s: Stage, http: httpx.AsyncClient) -> None:
        s.store._db.execute("PRAGMA synchronous=OFF")  # only to get many quickly
        for i in range(300):
            s.submit(name=f"job-{i}")
        await s.until(lambda: sum(bool(j.devices) for j in s.c.jobs.values()) >= 4)
        answers = await asyncio.gather(*(http.get("/data.json") for _ in range(20)))
        assert len({a.content for a in answers}) == 1 and len(made) == 1
        shown = json.loads(answers[0].content)["schedules"][0]
        assert len(shown["live"]) == snapshot.MOST_JOBS and len(answers[0].content) < 200_000
        assert shown["live"][0]["state"] == "running" and "wait" in shown["sentence"]
        assert all(j["why"] for j in shown["live"])

    play(tmp_path, scene)


def test_a_coordinator_comes_back_without_what_only_its_page_needs() -> None:
    code = "import dovetail.cluster.web.api, sys; sys.exit(any(m.startswith('dovetail.view') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
